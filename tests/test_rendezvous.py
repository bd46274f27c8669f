"""How processes meet: all or none, in time, told why not in one line, whoever else connects."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from tests.devices import coordinator
from xmod_jax import rendezvous
from xmod_jax.agreement import Hello, differing
from xmod_jax.errors import UserError
from xmod_jax.rendezvous import NotMet, Place

_LONG = 15  # seconds within which anything here happens


def place(name=""):
    found = Place.parse(coordinator())
    assert found is not None
    return found._replace(name=name)


class Meeting:
    """Processes that meet in threads: what each ended with, by its place in the order given."""

    def __init__(self, where, hellos, patience_s=_LONG):
        self.ends: list = [None] * len(hellos)
        self.asked = [threading.Event() for _ in hellos]
        self.where, self.patience_s = where, patience_s
        self.threads = [
            threading.Thread(target=self._live, args=(i, hello), daemon=True)
            for i, hello in enumerate(hellos)
        ]
        for thread in self.threads:
            thread.start()

    def _live(self, i, hello):
        asked = self.asked[i].is_set
        try:
            if hello.index == 0:
                with contextlib.closing(
                    rendezvous.open_door(self.where, hello, asked, self.patience_s)
                ) as door:
                    peers = rendezvous.lead(door, hello, asked, self.patience_s)
                    for peer in peers.values():
                        peer.say(met=True)
                    self.ends[i] = sorted(peers)
            else:
                self.ends[i] = rendezvous.follow(self.where, hello, asked, self.patience_s)[1]
        except (UserError, NotMet) as error:
            self.ends[i] = error

    def over(self):
        for thread in self.threads:
            thread.join(_LONG)
            assert not thread.is_alive()
        return self.ends


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """What is waited for in vain is waited for briefly."""
    monkeypatch.setattr(rendezvous, "_STRAGGLERS_S", 0.5)
    monkeypatch.setattr(rendezvous, "_TAKEN_S", 0.5)
    monkeypatch.setattr(rendezvous, "_GREETING_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LOOK_S", 0.05)


def refusals(ends):
    """The one line that all were told."""
    assert all(isinstance(end, UserError) for end in ends), ends
    (line,) = {str(end) for end in ends}
    assert "\n" not in line
    return line


def test_processes_that_were_started_alike_meet():
    what = {"--seed": "0"}
    ends = Meeting(place(), [Hello(2, 3, what), Hello(0, 3, what), Hello(1, 3, what)]).over()
    assert ends == [{"met": True}, [1, 2], {"met": True}]


@pytest.mark.parametrize(
    ("hellos", "told"),
    [
        (
            [Hello(0, 3, {"--seed": "0"}), Hello(1, 3, {"--seed": "1"}), Hello(2, 3)],
            "--seed is 0 in process 0, 1 in process 1, not given in process 2",
        ),
        (
            [Hello(0, 3, {"x": "a"}), Hello(1, 3, {"x": "b"}), Hello(2, 3, {"x": "a"})],
            "x is a in processes 0, 2, b in process 1",
        ),
        ([Hello(0, 2), Hello(1, 3)], "--process_count is 2 in process 0, 3 in process 1"),
        ([Hello(0, 3), Hello(1, 2)], "--process_count is 3 in process 0, 2 in process 1"),
        ([Hello(0, 3), Hello(1, 3), Hello(1, 3)], "two processes were started as process 1"),
        ([Hello(0, 2), Hello(0, 2)], "two processes were started as process 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_processes_that_were_started_differently_are_all_told_the_difference(hellos, told):
    assert told in refusals(Meeting(place(), hellos).over())


def test_a_label_that_one_process_alone_has_is_a_difference():
    assert differing({0: {}, 1: {"a": "1"}}) is not None
    assert differing({0: {"a": "1"}, 1: {"a": "1"}}) is None


def test_one_that_never_comes_is_named_to_those_that_wait():
    ends = Meeting(place(), [Hello(0, 4), Hello(2, 4)], patience_s=2).over()
    assert all(isinstance(end, NotMet) for end in ends)
    assert [str(end) for end in ends] == [str(ends[0])] * 2
    assert "processes 1, 3 of 4 did not come within 2 s" in str(ends[0])


def test_where_there_is_no_process_0_the_place_and_the_reason_are_told():
    where = place()
    (end,) = Meeting(where, [Hello(1, 2)], patience_s=0.3).over()
    assert isinstance(end, NotMet)
    assert str(where) in str(end) and os.strerror(errno.ECONNREFUSED) in str(end)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70 + ".x", "x" * 300, "\u2603.x"])
def test_a_name_that_is_no_hosts_is_one_line(host):
    where = place()._replace(host=host)
    (end,) = Meeting(where, [Hello(1, 2)], patience_s=0.3).over()
    assert isinstance(end, NotMet) and "found no process 0" in str(end)


def connected(where):
    """A connection to process 0, as soon as it is there."""
    for _ in range(_LONG * 50):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((where.host, where.ports[0]), _LONG)
        time.sleep(0.02)
    raise AssertionError("nobody listens")


_ONE_OF_THREE = b'{"hello": {"index": 1, "count": 3, "what": {}, "host": "a"}}\n'


def test_process_0_that_is_asked_to_leave_tells_those_that_have_come():
    where = place()
    meeting = Meeting(where, [Hello(0, 3)])
    with connected(where) as follower:
        follower.sendall(_ONE_OF_THREE)
        lines = follower.makefile()
        assert "xmod" in lines.readline()
        meeting.asked[0].set()
        (end,) = meeting.over()
        assert isinstance(end, NotMet) and "process 0 was asked to leave" in str(end)


def test_another_process_that_is_asked_to_leave_takes_along_process_0():
    where = place()
    meeting = Meeting(where, [Hello(0, 3)])
    with connected(where) as follower:
        follower.sendall(_ONE_OF_THREE)
        follower.makefile().readline()
        follower.sendall(b'{"left": "process 1 was asked to leave"}\n')
        (end,) = meeting.over()
    assert isinstance(end, NotMet) and "process 1 was asked to leave" in str(end)


def test_one_that_waits_alone_leaves_when_asked_to():
    for index in (0, 1):
        meeting = Meeting(place(), [Hello(index, 2)])
        meeting.asked[0].set()
        (end,) = meeting.over()
        assert isinstance(end, NotMet) and "asked to leave" in str(end)


def test_one_that_goes_before_all_have_met_may_come_again():
    where = place()
    meeting = Meeting(where, [Hello(0, 3)])
    with connected(where) as gone:
        gone.sendall(_ONE_OF_THREE)
        gone.makefile().readline()
    followers = Meeting(where, [Hello(1, 3), Hello(2, 3)])
    assert (meeting.over(), followers.over()) == ([[1, 2]], [{"met": True}] * 2)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\x00\xff\xfe\n",
        b"[1]\n",
        b"{}\n",
        b'{"hello": 1}\n',
        b'{"hello": {"index": -1, "count": 2, "what": {}, "host": "a"}}\n',
        b'{"hello": {"index": true, "count": 2, "what": {}, "host": "a"}}\n',
        b'{"hello": {"index": 1, "count": 2, "what": {"a": 1}, "host": "a"}}\n',
        b"[" * 100_000 + b"\n",
    ],
    ids=lambda said: said[:30],
)
def test_a_stranger_neither_counts_nor_delays_the_others(said):
    where = place()
    leader = Meeting(where, [Hello(0, 2)])
    with connected(where) as stranger:
        stranger.sendall(said)
        follower = Meeting(where, [Hello(1, 2)])
        assert (leader.over(), follower.over()) == ([[1]], [{"met": True}])


def test_a_port_of_another_program_is_told_and_not_waited_for():
    where = place()
    with socket.create_server(("", where.ports[0]), family=socket.AF_INET6, dualstack_ipv6=True):
        leader, follower = Meeting(where, [Hello(0, 2), Hello(1, 2)]).over()
    assert isinstance(leader, UserError) and f"port {where.ports[0]}" in str(leader)
    assert isinstance(follower, UserError) and "another program answers" in str(follower)


def test_a_step_takes_its_next_port_where_another_program_has_the_first():
    first, second = place(), place()
    where = Place("localhost", (*first.ports, *second.ports), "slurm 7.0")
    with socket.create_server(("", first.ports[0])):
        assert Meeting(where, [Hello(0, 2), Hello(1, 2)]).over() == [[1], {"met": True}]


def test_steps_whose_ports_overlap_do_not_meet_each_other():
    (a,), (b,) = place().ports, place().ports
    one, other = Place("localhost", (a, b), "slurm 7.0"), Place("localhost", (a, b), "slurm 8.0")
    meetings = [Meeting(where, [Hello(0, 2)]) for where in (one, other)]
    followers = [Meeting(where, [Hello(1, 2)]) for where in (other, one)]
    assert [m.over() for m in meetings] == [[[1]], [[1]]]
    assert [f.over() for f in followers] == [[{"met": True}]] * 2


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node1:29400", Place("node1", (29400,))),
        ("a.b-c.org:1", Place("a.b-c.org", (1,))),
        ("10.0.0.1:65535", Place("10.0.0.1", (65535,))),
        ("[fe80::1%eth0]:80", Place("fe80::1%eth0", (80,))),
        ("[::1]:80", Place("::1", (80,))),
        *((text, None) for text in ("", "a", "a:", ":1", "a:0", "a:65536", "a:1x", "a:-1")),
        *((text, None) for text in ("::1:80", "http://a:1", "a b:1", " a:1", "a:1 ", "a:\u0663")),
        *((text, None) for text in ("u@a:1", "[a]:1", "[]:1", "a:1:2", "a,b:1\n")),
    ],
)
def test_a_place_is_a_host_and_a_port(text, found):
    assert Place.parse(text) == found
