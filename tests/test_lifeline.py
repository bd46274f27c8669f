"""A process that dies or ends is noticed at once, with its status; one that leaves is not."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from xmod_jax.agreement import Hello, differing
from xmod_jax.lifeline import Lifeline
from xmod_jax.rendezvous import Door
from xmod_jax.wire import Peer

_LONG = 30  # seconds within which anything here happens


class Run:
    """The lifelines of process 0 and its followers; `lost` says who missed another."""

    def __init__(self, count: int) -> None:
        self.listener = socket.create_server(("localhost", 0))
        self.address = self.listener.getsockname()
        self.lost = [threading.Event() for _ in range(count)]
        self.asked = [False] * count
        ends, others = {}, {}
        for index in range(1, count):
            others[index] = Peer(socket.create_connection(self.address, _LONG))
            ends[index] = Peer(self.listener.accept()[0])
        self.lines = [self._line(0, count, Door(self.listener, ""), ends)]
        self.lines += [self._line(i, count, None, {0: others[i]}) for i in range(1, count)]

    def _line(self, index, count, door, peers):
        asked = lambda: self.asked[index]
        return Lifeline(Hello(index, count), door, peers, "token", self.lost[index].set, asked)


@pytest.fixture
def run():
    made = Run(3)
    yield made
    for line in made.lines:
        with contextlib.suppress(OSError):
            line.close()


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_leaves_is_not_missed(run, index):
    run.lines[index].leave()
    run.lines[index].close()
    other = run.lines[1 - index]
    # What it says after its leave has been read as well.
    other._thread.join(0.2)
    assert not any(lost.is_set() for lost in run.lost)


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_dies_without_a_word_is_missed(run, index):
    run.lines[index].close()
    assert run.lost[1 - index].wait(_LONG)
    assert run.lines[1 - index].lost.is_set() and run.lines[1 - index].status is None


@pytest.mark.parametrize(("index", "missing"), [(0, [1, 2]), (2, [0])])
def test_one_that_ends_says_with_what_status(run, index, missing):
    run.lines[index].end(2)
    run.lines[index].close()
    for other in missing:
        assert run.lost[other].wait(_LONG)
        assert (run.lines[other].who, run.lines[other].status) == (index, 2)


def compared(run, values):
    """What each process is told of the values of all."""
    told: dict[int, str | None] = {}

    def compare(index):
        told[index] = run.lines[index].compare({"x": values[index]}, differing)

    threads = [threading.Thread(target=compare, args=(i,)) for i in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LONG)
    return [told[index] for index in range(len(values))]


def test_values_are_compared_again_and_again_and_all_are_told_the_same(run):
    for _ in range(3):
        assert compared(run, "aaa") == [None] * 3
        (line,) = set(compared(run, "aab"))
        assert "x is a in processes 0, 1, b in process 2" in line


@pytest.mark.parametrize("index", [0, 1])
def test_a_comparison_ends_when_a_process_is_lost_meanwhile(run, index):
    run.lines[2].close() if index == 0 else run.lines[0].close()
    assert run.lines[index].compare({}, differing) is None
    assert run.lines[index].lost.is_set()


@pytest.mark.parametrize("index", [0, 1])
def test_a_comparison_ends_when_this_process_is_asked_to_leave(run, index):
    run.asked[index] = True
    assert run.lines[index].compare({}, differing) is None
    assert not run.lines[index].lost.is_set()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00" * 100 + b"\n"])
def test_a_stranger_at_the_port_neither_counts_nor_delays(run, said):
    with socket.create_connection(run.address, _LONG) as stranger:
        stranger.sendall(said)
        assert compared(run, "aaa") == [None] * 3
        assert not any(lost.is_set() for lost in run.lost)


def answers(run, hello):
    """What a latecomer is told after the greeting."""
    with socket.create_connection(run.address, _LONG) as late:
        late.sendall(hello)
        return late.makefile().read()


def test_a_latecomer_of_another_run_is_told_so_and_one_of_this_run_to_come_again(run):
    of = lambda count: b'{"hello": {"index": 1, "count": %d, "what": {}, "host": "a"}}\n' % count
    assert "--process_count is 3 in process 0, 4 in process 1" in answers(run, of(4))
    assert '"taken"' in answers(run, of(3)) and "refused" not in answers(run, of(3))
    assert not any(lost.is_set() for lost in run.lost)


_FOLLOWER = """
import socket, sys
from xmod_jax.lifeline import Lifeline
from xmod_jax.agreement import Hello
from xmod_jax.wire import Peer
peer = Peer(socket.create_connection(("localhost", int(sys.argv[1]))))
Lifeline(Hello(1, 2), None, {0: peer}, "", lambda: None, lambda: False)
print("tied", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_is_missed():
    listener, lost = socket.create_server(("localhost", 0)), threading.Event()
    command = [sys.executable, "-c", _FOLLOWER, str(listener.getsockname()[1])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as follower:
        peers = {1: Peer(listener.accept()[0])}
        line = Lifeline(Hello(0, 2), Door(listener, ""), peers, "", lost.set, lambda: False)
        assert follower.stdout is not None and follower.stdout.readline() == "tied\n"
        follower.kill()
        assert lost.wait(_LONG) and line.lost.is_set() and line.status is None
    line.close()
