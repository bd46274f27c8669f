"""Several processes that train one run: who they are, how they meet, what they agree on.

Process 0 leads: it holds the run's claim and writes its records. The others take the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xmod_jax import lifeline
from xmod_jax.errors import UserError

_PORTS = range(20_000, 60_000)
_SILENCE_S = 60  # after which JAX aborts all processes, should one hang
_GRACE_S = 5  # for the main thread to hear of a lost process by itself
# What Gloo, NCCL and JAX's coordination say when the other end has gone.
_LOST = re.compile(r"gloo|nccl|coordination|heartbeat|connection|peer", re.IGNORECASE)
_STOPPED = -1  # what process 0 tells the others when it cannot go on
_VARIABLES = ("XMOD_COORDINATOR", "XMOD_PROCESS_COUNT", "XMOD_PROCESS_INDEX")


class ProcessLost(Exception):
    """Another process of the run has died; this one cannot go on."""


class LeavingTogether(Exception):
    """Raised by every process of a run at the same point: none of them is lost."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run, and which of them this is.

    Attributes:
      count: number of processes.
      index: of this one; 0 leads.
      coordinator: ``host:port`` where they meet; process 0 listens there.
      local_devices: accelerators of its node that this process takes; None: all that it sees.
    """

    count: int = 1
    index: int = 0
    coordinator: str | None = None
    local_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"process index {self.index} is not below {self.count} processes")
        if self.count > 1 and not re.fullmatch(r".+:\d+", self.coordinator or ""):
            raise UserError(f"{self.count} processes need a coordinator host:port to meet at")

    @classmethod
    def find(
        cls,
        coordinator: str | None = None,
        count: int | None = None,
        index: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Processes:
        """Those that the arguments name; else the variables XMOD_COORDINATOR, XMOD_PROCESS_COUNT
        and XMOD_PROCESS_INDEX; else the tasks of a Slurm step; else this process alone.

        Raises:
          UserError: some of the three given, but not all; or values that do not fit together.
        """
        given = [coordinator, count, index]
        if all(value is None for value in given):
            given = [environment.get(name) for name in _VARIABLES]
        if any(value is not None for value in given):
            missing = [n for n, value in zip(_VARIABLES, given, strict=True) if value is None]
            if missing:
                flags = ", ".join(f"--{n.removeprefix('XMOD_').lower()}" for n in missing)
                raise UserError(f"processes: {flags} ({', '.join(missing)}) missing beside others")
            return cls(_whole(given[1]), _whole(given[2]), str(given[0]))
        return _of_slurm(environment) or cls()

    @property
    def leads(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.index == 0

    @contextlib.contextmanager
    def meeting(self, abandon: Callable[[ProcessLost], object]) -> Iterator[None]:
        """Connects the processes while the block runs; before JAX touches a device.

        Args:
          abandon: ends this process with the message of its argument; called in a thread.

        Raises:
          ProcessLost: another process or its node died. Where the main thread is in a wait that
            does not hear of it, `abandon` is called instead, half a minute later at the latest.
        """
        if self.count == 1:
            yield
            return
        self._connect()
        lost = ProcessLost(
            f"process {self.index}: another process of the run was lost: start all of them "
            "again, and the run resumes from its last checkpoint"
        )
        left = threading.Event()

        def on_loss() -> None:
            # Mostly the main thread hears of it by itself, and ends in good order.
            if not left.wait(_GRACE_S):
                abandon(lost)

        host = (self.coordinator or "").rpartition(":")[0].strip("[]")
        with lifeline.tied(host, self.leads, _broadcast, (LeavingTogether,), on_loss) as line:
            try:
                yield
            except (LeavingTogether, UserError):
                # A mistake that all of them find is this process's own, though another left first.
                raise
            except Exception as error:
                if not (line.broken or _LOST.search(str(error))):
                    raise
                raise lost from error
            finally:
                left.set()

    def _connect(self) -> None:
        import jax

        # On CPU processes talk through Gloo, which JAX does not choose by itself.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would take SIGTERM for itself, and tell no one (training/preemption.py).
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            self.coordinator,
            self.count,
            self.index,
            local_device_ids=None if self.local_devices is None else list(self.local_devices),
            # Slurm's would give every process the one device of its number on the node.
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=_SILENCE_S,
            shutdown_timeout_seconds=_SILENCE_S,
        )

    def from_leader(self, decide: Callable[[], int | None]) -> int:
        """What process 0 decides, in every process; alone it is a plain call.

        Args:
          decide: called in process 0 only; gives a number of at least 0, None being 0.

        Raises:
          UserError: in the others, when `decide` failed in process 0, where its error is raised.
        """
        if self.count == 1:
            return decide() or 0
        value = _STOPPED
        try:
            if self.leads:
                value = decide() or 0
        finally:
            value = _broadcast(value)
        if value == _STOPPED:
            raise UserError("process 0 cannot go on: its message says why")
        return value

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; waits for all of them."""
        return flag if self.count == 1 else bool(self.vote(flag))

    def vote(self, flag: bool) -> Any:
        """`any` as an array whose value is there once every process has voted."""
        if self.count == 1:
            return flag
        return _ballot()(flag)


ALONE = Processes()


@functools.cache
def _ballot() -> Callable[[bool], Any]:
    """One program for all votes: whether any process's flag is up."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("all",))
    count = jax.jit(lambda votes: votes.any(), out_shardings=NamedSharding(mesh, P()))
    parts = NamedSharding(mesh, P("all"))

    def vote(flag: bool) -> Any:
        mine = lambda index: np.full(mesh.size, flag)[index]
        return count(jax.make_array_from_callback((mesh.size,), parts, mine))

    return vote


def _broadcast(value: int) -> int:
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _whole(value: Any) -> int:
    try:
        return int(value)
    except ValueError as error:
        raise UserError(f"processes: {value!r} is not a whole number") from error


def _of_slurm(environment: Mapping[str, str]) -> Processes | None:
    """The tasks of the Slurm step that this process is one of, or None.

    A batch script's own shell is no task of a step with several, so nothing is detected there.
    """
    count = _whole(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if count == 1:
        return None
    try:
        job, step = environment["SLURM_JOB_ID"], environment["SLURM_STEP_ID"]
        host = _first_host(environment["SLURM_STEP_NODELIST"])
        index = _whole(environment["SLURM_PROCID"])
        local = _whole(environment["SLURM_LOCALID"])
    except KeyError as error:
        raise UserError(f"a Slurm step of {count} tasks without {error}") from error
    # Elements of an array that share a node have jobs, and steps of a job numbers, of their own.
    port = _PORTS[(_whole(job) * 8 + _whole(step)) % len(_PORTS)]
    return Processes(count, index, f"{host}:{port}", _own_devices(environment, local))


def _own_devices(environment: Mapping[str, str], local: int) -> tuple[int, ...] | None:
    """The accelerators of a task that shares its node and sees all of it; None: all that it sees.

    Tasks divide them evenly, in their order on the node.
    """
    seen = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    tasks = _tasks_here(environment)
    share = len(seen) // tasks
    if tasks == 1 or not share:
        return None
    return tuple(range(local * share, (local + 1) * share))


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node, from a list by nodes such as ``8(x2),4``."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE: {part!r} is not a number of tasks")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _whole(environment.get("SLURM_NODEID", "0"))
    return counts[min(node, len(counts) - 1)]


def _first_host(nodes: str) -> str:
    """First name of a list of nodes as Slurm writes it: ``gpu[03-05,9],other`` is gpu03."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise UserError(f"a Slurm list of nodes without a first: {nodes!r}")
    return match[1] + (match[2] or "")
