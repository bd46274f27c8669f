"""The progress bar of a sweep: tokens, loss and remaining time of a run and of the whole sweep."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TextIO

from tqdm import tqdm

from experiments import estimate, tables
from xmod_jax import accounting
from xmod_jax.config import RunConfig

_STEPS = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} {unit}, {remaining} left"
_FORMAT = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} tokens{postfix}"


class Progress(Protocol):
    """What training reports after a step; the fields that a bar shows."""

    # Read-only, so that a frozen class fits.
    @property
    def tokens(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...
    @property
    def eta_s(self) -> float: ...


class Shows(Protocol):
    """What shows how far runs are: a `Display`, or what passes it on to one."""

    def say(self, line: str) -> None: ...
    def drop(self, run: RunConfig) -> None: ...
    def bar(
        self, run: RunConfig
    ) -> contextlib.AbstractContextManager[Callable[[Progress], None]]: ...


class Display:
    """A bar for each run that is under way, and lines of text that do not tear them."""

    def __init__(
        self, runs: Sequence[RunConfig], stream: TextIO | None = None, workers: int = 1
    ) -> None:
        """Starts with `runs` still to do, in their order, by so many workers; writes to stderr."""
        self._stream = stream or sys.stderr
        self._total, self._workers = len(runs), workers
        self._running: set[str] = set()
        self._work = {run.folder: estimate.work(run) for run in runs}

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        tqdm.write(line, file=self._stream)

    def drop(self, run: RunConfig) -> None:
        """Takes a run that is finished, failed or another worker's out of the remaining time."""
        self._work.pop(run.folder, None)

    @contextlib.contextmanager
    def bar(self, run: RunConfig) -> Iterator[Callable[[Progress], None]]:
        """Shows a bar while the block trains `run`; gives the function that training calls."""
        per_token = accounting.run_hardware_flops_per_token(run)
        place = self._total - len(self._work) + len(self._running) + 1
        self._running.add(run.folder)
        terminal = self._stream.isatty()
        with tqdm(
            total=run.train.tokens,
            desc=f"[{place}/{self._total}] {run.folder}",
            bar_format=_FORMAT,
            unit_scale=True,
            file=self._stream,
            # A log file gets a line now and then, not ten a second, and no moves of a cursor.
            mininterval=0.1 if terminal else 30,
            position=None if terminal else 0,
        ) as bar:

            def update(progress: Progress) -> None:
                waiting = set(self._work) - self._running
                others = sum(self._work[name] for name in waiting) / self._workers
                rate = progress.tokens_per_s * per_token
                sweep = progress.eta_s + others / rate if rate > 0 else float("inf")
                bar.set_postfix_str(
                    f"loss {progress.loss:.3f}, {tables.duration(progress.eta_s)} left, "
                    f"sweep {tables.duration(sweep)}",
                    refresh=False,
                )
                bar.update(progress.tokens - bar.n)

            try:
                yield update
            finally:
                self._running.discard(run.folder)


@contextlib.contextmanager
def steps(title: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr how far the block is and the time that is left.

    Gives the function that is told how many units are done, and of how many.
    """
    terminal = sys.stderr.isatty()
    with tqdm(
        desc=title,
        unit=unit,
        bar_format=_STEPS,
        file=sys.stderr,
        miniters=1,
        mininterval=0.1 if terminal else 10,
    ) as bar:

        def update(done: int, total: int) -> None:
            first = bar.n == 0
            bar.total = total
            bar.update(done - bar.n)
            if first:
                bar.refresh()  # a log file shall not wait for the first estimate

        yield update


def warn(doubts: Iterable[str]) -> None:
    """Says on stderr what is allowed and probably not meant."""
    for doubt in doubts:
        print(f"warning: {doubt}", file=sys.stderr, flush=True)
