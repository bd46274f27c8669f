"""Being asked to leave: SIGTERM and SIGUSR1 end a run at its next step, saved.

A scheduler sends SIGTERM before it kills, or SIGUSR1 some time ahead where asked to. The run then
finishes the step it is in, saves, and its command exits with `processes.REQUEUE`, which tells the
scheduler's script to queue it again. While it waits for data or evaluates there is no step to
finish: it saves at once, and does what it left out when it resumes.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar, cast

from xmod_jax.processes import ALONE, LeavingTogether, Processes

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
T = TypeVar("T")


class Preempted(LeavingTogether):
    """The run was asked to leave and has saved what it has; the message says where."""


class Interrupted(Exception):
    """The wait that this leaves was cut short by a signal."""


class Watch:
    """Knows whether this process, or any that trains with it, was asked to leave."""

    def __init__(self, processes: Processes = ALONE) -> None:
        """Watches nothing until `signals` is entered."""
        self.processes = processes
        self.arrived = False
        self._waiting = False

    @contextlib.contextmanager
    def signals(self) -> Iterator[Watch]:
        """Notes SIGTERM and SIGUSR1 while the block runs; main thread only."""
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.arrived = True
        if self._waiting:
            raise Interrupted

    def wait_for(self, result: Callable[[], T]) -> T:
        """``result()``, or `Interrupted` as soon as a signal arrives.

        With several processes the wait is finished first: the others may already be in the step
        that this process waits to take, and cannot leave it without this one.
        """
        if self.processes.count > 1:
            return result()
        self._waiting = True
        try:
            # A signal between the last look and the line above would be overlooked.
            if self.arrived:
                raise Interrupted
            return result()
        finally:
            self._waiting = False

    def until_asked(self, items: Iterator[T]) -> Iterator[T]:
        """The items, until any process was asked to leave: then `Interrupted`."""
        end = object()
        while (item := self.wait_for(lambda: next(items, end))) is not end:
            if self.processes.any(self.arrived):
                raise Interrupted
            yield cast(T, item)
