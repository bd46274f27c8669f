"""Flags that say on which devices, and in which processes, runs are trained.

A command imports this module; `flags.adopt_module_key_flags(cluster)` lists the flags in its
``--help``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from absl import flags

import experiments
import xmod_jax
from experiments import cli
from experiments.progress import Display
from experiments.runner import Trainer
from xmod_jax.config import RunConfig
from xmod_jax.errors import UserError
from xmod_jax.processes import Processes
from xmod_jax.training.preemption import Watch

if TYPE_CHECKING:  # at run time a mistake is told without loading JAX
    from xmod_jax.sharding import MeshShape
    from xmod_jax.training.checkpoint import Keep

_MESH = flags.DEFINE_string(
    "mesh",
    None,
    "devices along the axes data, fsdp and tensor, for instance data:2,fsdp:4 (default: all that "
    "share a batch evenly, on data); a run may resume on another mesh",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "host:port where the processes of a run meet, the first one's (default: XMOD_COORDINATOR, or "
    "what Slurm says)",
)
_COUNT = flags.DEFINE_integer(
    "process_count", None, "processes of a run (default: XMOD_PROCESS_COUNT, or what Slurm says)"
)
_INDEX = flags.DEFINE_integer(
    "process_index",
    None,
    "which of them this one is, 0 leads (default: XMOD_PROCESS_INDEX, or what Slurm says)",
)


_NEWEST = flags.DEFINE_integer(
    "keep_checkpoints", None, "newest checkpoints that are kept (default: the run's own number)", 1
)
_EVERY = flags.DEFINE_integer(
    "keep_every",
    0,
    "steps between checkpoints that are made and kept for good, beside the newest (default: none)",
    lower_bound=0,
)


def check(runs: Sequence[RunConfig]) -> None:
    """Refuses flags that cannot be, before anything is made or printed.

    Raises:
      UserError: a mesh that cannot be, or that does not fit a run; processes that make no whole.
    """
    if shape := given_mesh():
        for run in runs:
            shape.check(run)
    _processes()


def alone() -> bool:
    """Whether this process trains by itself: it may then look at devices before `joined`."""
    return _processes().count == 1


def _processes() -> Processes:
    return Processes.find(_COORDINATOR.value, _COUNT.value, _INDEX.value)


@contextlib.contextmanager
def joined() -> Iterator[Watch]:
    """Meets the other processes; notes requests to leave while the block runs."""
    processes = _processes()
    with Watch(processes).signals() as watch:
        what = started_with() if processes.count > 1 else {}
        with processes.meeting(cli.abandon, what, lambda: watch.arrived):
            import jax

            # Where there are none, that is told before a folder is made.
            if jax.device_count() > 1 and jax.config.values["jax_disable_jit"]:
                raise UserError(
                    "JAX_DISABLE_JIT: several devices train by one compiled program: unset it"
                )
            yield watch


# Flags that may differ between processes: whose they are, and paths, of which the content counts.
_OWN_FLAGS = ("coordinator", "process_count", "process_index", "workdir", "data", "start_from")
# What decides about numbers beside the code, whether set by a variable or not at all.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_disable_jit",  # else one would run operations that the others never join
)
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def started_with() -> dict[str, str]:
    """What must be equal in all processes of a run, by label: flags, code, packages, settings."""
    import jax

    given = [
        flag
        for module, defined in flags.FLAGS.flags_by_module_dict().items()
        if module == sys.argv[0] or module.startswith("experiments.")
        for flag in defined
    ]
    found = {f"--{f.name}": _shown(f.value) for f in given if f.name not in _OWN_FLAGS}
    if "start_from" in flags.FLAGS:
        found["--start_from"] = "given" if flags.FLAGS["start_from"].value else "not given"
    found["the code in experiments and xmod_jax"] = code_hash()
    found |= {f"the version of {name}": metadata.version(name) for name in _PACKAGES}
    # Each may write down its programs in a place of its own.
    flags_of_xla = os.environ.get("XLA_FLAGS", "").split()
    found["XLA_FLAGS"] = " ".join(f for f in flags_of_xla if "dump" not in f) or "not given"
    return found | {name.upper(): _shown(getattr(jax.config, name)) for name in _SETTINGS}


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)


def code_hash() -> str:
    """Fingerprint of the Python files that this process runs from."""
    digest = hashlib.blake2b(digest_size=8)
    for package in (experiments, xmod_jax):
        root = pathlib.Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def trainer(watch: Watch) -> Trainer:
    """What trains a run on the mesh of the flags."""
    from xmod_jax.training import loop

    kept = keep()

    def train(run, directory, progress):
        return loop.train(run, directory, progress, _shape(run), watch, kept)

    return Trainer(train, loop.RunFailed)


def keep() -> Keep:
    """Which checkpoints stay, as the flags say."""
    from xmod_jax.training.checkpoint import Keep

    return Keep(_NEWEST.value, _EVERY.value)


def given_mesh() -> MeshShape | None:
    """What ``--mesh`` says; None without it."""
    if _MESH.value is None:
        return None
    from xmod_jax.sharding import MeshShape

    return MeshShape.parse(_MESH.value)


def _shape(run: RunConfig) -> MeshShape:
    if given := given_mesh():
        return given
    import jax

    from xmod_jax.sharding import MeshShape

    count = jax.device_count()
    shape = MeshShape.for_devices(count, run)
    if shape.size < count:
        _tell_once(
            f"{run.name} uses {shape.size} of {count} devices: its micro-batch cannot be cut "
            "further (--mesh chooses other axes)"
        )
    return shape


@functools.cache
def _tell_once(line: str) -> None:
    print(line, file=sys.stderr)


def display(runs: Sequence[RunConfig], watch: Watch, workers: int = 1) -> Display:
    """Progress of `runs`: process 0 shows it."""
    return Display(runs, None if watch.processes.leads else open(os.devnull, "w"), workers)
