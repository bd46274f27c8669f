"""Trains the small run in one of several processes; run by test_processes.py.

    python -m tests.training.together DIRECTORY MESH PROCESSES INDEX COORDINATOR [SIGNAL_AT]

SIGNAL_AT: the step after which this process gets a SIGTERM; with a minus, a SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator

from experiments import cli, runner
from experiments.progress import Display, Progress
from tests.training import small
from xmod_jax.config import RunConfig
from xmod_jax.processes import Processes
from xmod_jax.sharding import MeshShape
from xmod_jax.training import loop
from xmod_jax.training.preemption import Watch

# With the default seed windows begin with a run of one character, whose rows are equal but for
# rounding: which of them a router selects then depends on the order of sums. Not with this seed.
RUN = small.run(seed=6)


class Signalling(Display):
    """Shows nothing; sends the signal."""

    def __init__(self, signal_at: int) -> None:
        super().__init__([])
        self.signal_at = signal_at

    @contextlib.contextmanager
    def bar(self, run: RunConfig) -> Iterator[Callable[[Progress], None]]:
        yield self.update

    def update(self, progress: Progress) -> None:
        if progress.tokens == abs(self.signal_at) * RUN.train.tokens_per_step:
            os.kill(os.getpid(), signal.SIGTERM if self.signal_at > 0 else signal.SIGKILL)


def main(arguments: list[str]) -> int:
    directory, mesh, count, index, coordinator, *rest = arguments
    processes = Processes.find(coordinator, int(count), int(index))
    shape = MeshShape.parse(mesh)
    with Watch(processes).signals() as watch, processes.meeting(cli.abandon):
        train = lambda run, folder, progress: loop.train(run, folder, progress, shape, watch)
        trainer = runner.Trainer(train, loop.RunFailed)
        display = Signalling(int(rest[0]) if rest else 0)
        folder = pathlib.Path(directory)
        status = runner.train_one(RUN, folder, trainer, display, processes=processes)
    print(status.value)
    return 0


if __name__ == "__main__":
    given, sys.argv[1:] = sys.argv[1:], []
    cli.run(lambda: main(given))
