"""A process that dies is noticed at once; one that leaves is not missed."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading

import pytest

from xmod_jax import lifeline

_LONG = 60  # seconds within which anything here happens


class Left(Exception):
    pass


class Run:
    """A leader and a follower in two threads, each in `tied` until it is told how to leave."""

    def __init__(self) -> None:
        self.lost: dict[bool, threading.Event] = {True: threading.Event(), False: threading.Event()}
        self.orders: dict[bool, queue.Queue] = {True: queue.Queue(), False: queue.Queue()}
        self.passed: queue.Queue[int] = queue.Queue()
        self.tied = threading.Barrier(3)
        self.threads = {leads: self._start(leads) for leads in (True, False)}
        self.tied.wait(_LONG)

    def _agree(self, leads: bool, value: int) -> int:
        if leads:
            self.passed.put(value)
            return value
        return self.passed.get(timeout=_LONG)

    def _start(self, leads: bool) -> threading.Thread:
        thread = threading.Thread(target=self._live, args=(leads,), daemon=True)
        thread.start()
        return thread

    def _live(self, leads: bool) -> None:
        agree = lambda value: self._agree(leads, value)
        tie = lifeline.tied("localhost", leads, agree, (Left,), self.lost[leads].set)
        with contextlib.suppress(Left, ValueError), tie as self.line:
            self.tied.wait(_LONG)
            if order := self.orders[leads].get(timeout=_LONG):
                raise order

    def leave(self, leads: bool, how: Exception | None = None) -> None:
        self.orders[leads].put(how)
        self.threads[leads].join(_LONG)
        assert not self.threads[leads].is_alive()


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("how", [None, Left()])
def test_one_that_leaves_is_not_missed(leads, how):
    run = Run()
    run.leave(leads, how)
    run.leave(not leads)
    assert not run.lost[True].is_set() and not run.lost[False].is_set()


@pytest.mark.parametrize("leads", [True, False])
def test_one_that_fails_is_missed(leads):
    run = Run()
    run.leave(leads, ValueError())
    assert run.lost[not leads].wait(_LONG)
    run.leave(not leads)
    assert not run.lost[leads].is_set()


@pytest.fixture
def leader():
    """A leader in `tied`: the numbers it passed on, whether it lost anyone, its lifeline."""
    lost = threading.Event()
    told: list[int] = []

    def agree(value: int) -> int:
        told.append(value)
        return value

    with lifeline.tied("localhost", True, agree, (), lost.set) as line:
        yield told, lost, line


def test_a_stranger_at_the_port_neither_counts_nor_hurts(leader):
    (port, _), lost, line = leader
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # hung up on
    assert not lost.is_set() and not line.broken


_FOLLOWER = """
import sys
from xmod_jax import lifeline
told = iter(map(int, sys.argv[1:]))
with lifeline.tied("localhost", False, lambda _: next(told), (), lambda: None):
    print("tied", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_is_missed(leader):
    told, lost, line = leader
    command = [sys.executable, "-c", _FOLLOWER, *map(str, told)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as follower:
        assert follower.stdout is not None and follower.stdout.readline() == "tied\n"
        follower.kill()
        assert lost.wait(_LONG) and line.broken
