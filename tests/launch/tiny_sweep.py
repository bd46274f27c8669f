"""The project's commands with one more experiment, ``tiny``, whose runs take a second each.

    python -m tests.launch.tiny_sweep python -m experiments.sweep --experiment=tiny ...

Stands for XMOD_RUN, so it takes any command. While there is a file ``HOLD/RUN`` in the folder that
TINY_HOLD names, run RUN waits at step `HELD_AT` until it is asked to leave, five minutes at most.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import time
from typing import Any

from experiments import cli, cluster, registry
from experiments.registry import Experiment
from experiments.runner import Trainer
from tests.training import small
from xmod_jax.config import RunConfig

HELD_AT = 3
# Hierarchy and seed; runs that differ in their seed alone are compiled once. As in together.py the
# seeds are such that no two rows tie, so that two processes select what one does.
RUNS = {"dense": ("dense", 0), "xmod": ("A1K2", 6), "other_seed": ("A1K2", 7)}


def tiny(scale: str) -> Experiment:
    """Dense and two X-MoD runs of eight steps."""
    runs = []
    for name, (hierarchy, seed) in RUNS.items():
        run = small.run(hierarchy, seed=seed)
        architecture = "dense" if name == "dense" else "xmod"
        runs.append(RunConfig("tiny", name, architecture, "tiny", scale, run.model, run.train))
    return Experiment("tiny", scale, tuple(runs))


def _holding(watch: Any, make: Any) -> Trainer:
    trainer = make(watch)

    def train(run: RunConfig, directory: pathlib.Path, progress: Any) -> Any:
        hold = pathlib.Path(os.environ.get("TINY_HOLD", "")) / run.name

        def held(state: Any) -> None:
            progress(state)
            end = time.monotonic() + 300
            waits = lambda: state.step == HELD_AT and hold.exists() and not watch.arrived
            while waits() and time.monotonic() < end:
                time.sleep(0.05)

        return trainer.train(run, directory, held if watch.processes.leads else progress)

    return Trainer(train, trainer.failure)


def main(command: list[str]) -> None:
    if command[:2] != ["python", "-m"]:
        os.execvp(command[0], command)
    registry.register("tiny")(tiny)
    make = cluster.trainer
    cluster.trainer = lambda watch: _holding(watch, make)
    module = importlib.import_module(command[2])
    sys.argv[1:] = command[3:]
    cli.run(module.main)


if __name__ == "__main__":
    main(sys.argv[1:])
