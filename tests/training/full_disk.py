"""Trains the small run in one of two processes, the second of which finds its disk full.

    python -m tests.training.full_disk DIRECTORY INDEX COORDINATOR [FULL_AT]

From step FULL_AT on process 1 can write no file of more than a few bytes. Run by test_full_disk.py.
"""

from __future__ import annotations

import pathlib
import resource
import sys
from typing import Any

from experiments import cli
from tests.training import together
from xmod_jax.processes import Processes
from xmod_jax.sharding import MeshShape
from xmod_jax.training import loop
from xmod_jax.training.preemption import Watch


def main(arguments: list[str]) -> int:
    directory, index, coordinator, *rest = arguments
    processes = Processes.find(coordinator, 2, int(index))

    def progress(state: Any) -> None:
        if rest and state.step == int(rest[0]) and not processes.leads:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))

    with Watch(processes).signals() as watch, processes.meeting(cli.abandon):
        loop.train(together.RUN, pathlib.Path(directory), progress, MeshShape(fsdp=2), watch)
    return 0


if __name__ == "__main__":
    given, sys.argv[1:] = sys.argv[1:], []
    cli.run(lambda: main(given))
