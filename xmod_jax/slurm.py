"""What Slurm says, in variables, of the tasks of a step: who they are and where they meet."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from xmod_jax.errors import UserError

# Below the ports that kernels give to outgoing connections: from 32768 on Linux.
_PORTS = range(20_000, 32_768)
_SPARE = 4  # ports that a step may meet at; another program may listen at some
_NO_DEVICE = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES
_ANSWER_S = 10  # within which scontrol answers, or goes without
_NUMBER = re.compile(r"[0-9]{1,12}")
_ITEM = re.compile(r"(?:[^\s\[\],]|\[[^\[\]]*\])+")  # of a list of nodes: text and brackets
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclasses.dataclass(frozen=True)
class Step:
    """The tasks of a Slurm step that trains a run.

    Attributes:
      name: what no other step at the same ports is called.
      count: number of tasks.
      index: of this task.
      host: name of the node of task 0.
      ports: where task 0 may listen, best first.
      local_devices: accelerators of its node that this task takes; None: all that it sees.
    """

    name: str
    count: int
    index: int
    host: str
    ports: tuple[int, ...]
    local_devices: tuple[int, ...] | None


def step(environment: Mapping[str, str]) -> Step | None:
    """The Slurm step that this process is a task of, or None where it is alone in it.

    A batch script's own shell is no task of a step with several, so nothing is detected there.

    Raises:
      UserError: variables that are missing, or that Slurm would not set.
    """
    if not environment.get("SLURM_STEP_NUM_TASKS"):
        return None
    count = _number(environment, "SLURM_STEP_NUM_TASKS")
    if count == 1:
        return None
    job, number = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    index = _number(environment, "SLURM_PROCID")
    if index >= count:
        raise UserError(f"SLURM_PROCID={index} is not below SLURM_STEP_NUM_TASKS={count}")
    host = _first_host(_text(environment, "SLURM_STEP_NODELIST"), environment.get("PATH", ""))
    # Elements of an array that share a node have jobs, and steps of a job numbers, of their own.
    first, apart = job * 8 + number, len(_PORTS) // _SPARE
    ports = tuple(_PORTS[(first + apart * spare) % len(_PORTS)] for spare in range(_SPARE))
    return Step(f"slurm {job}.{number}", count, index, host, ports, _own_devices(environment))


def hostnames(nodes: str) -> Iterator[str]:
    """The names in a list of nodes as Slurm writes it, in its order.

    ``rack[0-1]n[08-09]-ib,login`` is rack0n08-ib, rack0n09-ib, rack1n08-ib, rack1n09-ib, login.

    Raises:
      UserError: it is no such list.
    """
    if not re.fullmatch(f"{_ITEM.pattern}(,{_ITEM.pattern})*", nodes):
        raise UserError(f"SLURM_STEP_NODELIST: {nodes!r} is not a list of nodes")
    for item in _ITEM.findall(nodes):
        # Texts at even places, what stands in brackets at odd ones.
        parts = re.split(r"[\[\]]", item)
        choices = [_in_brackets(part) if i % 2 else [part] for i, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _in_brackets(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("", "")
        if match is None or int(last) < int(first) or int(last) - int(first) > 65_536:
            raise UserError(f"SLURM_STEP_NODELIST: [{text}] is not a list of numbers")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def _first_host(nodes: str, path: str) -> str:
    """The first of a list of nodes: as Slurm's own program reads it, where that is at hand."""
    if program := shutil.which("scontrol", path=path):
        try:
            command = [program, "show", "hostnames", nodes]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
        except (OSError, UnicodeDecodeError, subprocess.TimeoutExpired):
            pass
        else:
            if done.returncode == 0 and done.stdout.split():
                return done.stdout.split()[0]
    return next(hostnames(nodes))


def _own_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The accelerators of a task that shares its node and sees all of it; None: all that it sees.

    Tasks divide them evenly, in their order on the node.
    """
    local = _number(environment, "SLURM_LOCALID")
    seen = [
        n for n in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if n not in _NO_DEVICE
    ]
    tasks = _tasks_here(environment)
    if local >= tasks:
        raise UserError(f"SLURM_LOCALID={local} is not below the {tasks} tasks of its node")
    # A task that is bound to devices of its own sees fewer than there are.
    known = bool(environment.get("SLURM_GPUS_ON_NODE"))
    if known and len(seen) < _number(environment, "SLURM_GPUS_ON_NODE"):
        return None
    share, rest = divmod(len(seen), tasks)
    # Fewer than tasks may be those that this one is bound to, unless they are all of the node's.
    if tasks == 1 or not (share or (known and seen)):
        return None
    if rest:
        raise UserError(
            f"{tasks} tasks on a node cannot share its {len(seen)} devices evenly "
            f"(CUDA_VISIBLE_DEVICES={','.join(seen)}): choose another --ntasks-per-node"
        )
    return tuple(range(local * share, (local + 1) * share))


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node, from a list by nodes such as ``8(x2),4``."""
    counts: list[tuple[int, int]] = []  # tasks, and on how many nodes in a row
    for part in (environment.get("SLURM_STEP_TASKS_PER_NODE") or "1").split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if match is None or int(match[1]) == 0:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE: {part!r} is not a number of tasks")
        counts.append((int(match[1]), int(match[2] or 1)))
    node = _number(environment, "SLURM_NODEID") if environment.get("SLURM_NODEID") else 0
    for tasks, nodes in counts:
        if node < nodes:
            return tasks
        node -= nodes
    return counts[-1][0]


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise UserError(f"a Slurm step of several tasks without {name}: start it with srun")
    return value


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _text(environment, name)
    if not _NUMBER.fullmatch(value):
        raise UserError(f"{name}: {value!r} is not a whole number")
    return int(value)
