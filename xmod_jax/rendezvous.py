"""How the processes of a run meet before JAX connects them, and compare how they were started.

JAX waits for minutes for one that does not come, deaf to signals, and then aborts. Here process 0
listens at the coordinator's port, the others say who they are and what they were started with, and
each gets the same answer: they have met, or one line that says what is wrong.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import queue
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from xmod_jax.agreement import Hello, difference, named
from xmod_jax.errors import UserError
from xmod_jax.wire import Message, Peer

_LOOK_S = 0.2  # between looks at whether this process was asked to leave
_CONNECT_S = 5  # for one try
_GREETING_S = 5  # for process 0 to say that it is one
_SILENT_S = 10  # for one that connects to say who it is
_STRAGGLERS_S = 10  # that those still to come get once it is known that something is wrong
_REPLACES_S = 60  # for one that replaces a lost process: the others have ended by then
_TAKEN_S = 15  # for a port to become free: the run's last attempt may just be ending

# A name or an address, that of IPv6 in brackets.
_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%\w+)?)\]|([^\s:/\[\]@]+)):([0-9]{1,5})"
)

Asked = Callable[[], bool]


class NotMet(Exception):
    """The processes have not met, and may when they are started again; nothing is lost."""


class Place(NamedTuple):
    """Where processes meet: a host, its ports in the order they are tried, and whose they are."""

    host: str
    ports: tuple[int, ...]
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """That of ``host:port``; None for anything else."""
        match = _ADDRESS.fullmatch(text)
        if match is None or not 0 < int(match[3]) < 65_536:
            return None
        return cls(match[1] or match[2], (int(match[3]),))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.ports[0]}"


class Door:
    """Where process 0 receives the others; who connects and says nothing delays nobody."""

    def __init__(self, listener: socket.socket, name: str) -> None:
        """Receives at a listening socket; `name` as in `Place`."""
        self.listener, self._name = listener, name
        self._guests: list[Peer] = []  # have not said who they are

    def watched(self) -> list[socket.socket | Peer]:
        """What may become readable."""
        return [self.listener, *self._guests]

    def received(self, ready: Sequence[Any]) -> list[tuple[Peer, Hello, list[Message]]]:
        """Those that have said who they are, and what else, given what has become readable."""
        came: list[tuple[Peer, Hello, list[Message]]] = []
        for guest in list(self._guests):
            if guest in ready:
                messages = guest.hear()
                if messages == []:
                    continue
                self._guests.remove(guest)
                hello = Hello.read(messages[0]) if messages else None
                if not messages or hello is None:
                    guest.close()
                else:
                    came.append((guest, hello, messages[1:]))
            elif time.monotonic() - guest.since > _SILENT_S:
                self._guests.remove(guest)
                guest.close()
        if self.listener in ready:
            self._admit()
        return came

    def _admit(self) -> None:
        try:
            guest = Peer(self.listener.accept()[0])
        except OSError:  # gone again
            return
        guest.say(xmod=self._name)
        self._guests.append(guest)

    def close(self) -> None:
        """Sends away who has not said who it is, and listens no more."""
        for guest in self._guests:
            guest.close()
        self.listener.close()


def ready(watched: Sequence[Any], seconds: float = _LOOK_S) -> list[Any]:
    """Those of the sockets that can be read within so many seconds."""
    with selectors.DefaultSelector() as selector:
        for item in watched:
            selector.register(item, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]


def open_door(place: Place, me: Hello, asked: Asked, patience_s: float) -> Door:
    """Process 0's door at the first of the place's ports that is free.

    Raises:
      UserError: a port that may not be used, or that another program or a second process 0 has.
      NotMet: a run that meets there as well has not ended in time; or this was asked to leave.
    """
    begin = time.monotonic()
    while True:
        for port in place.ports:
            try:
                return Door(_listen(port), place.name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(
                        f"process 0 cannot listen at port {port}: {os.strerror(error.errno or 0)}: "
                        "choose another --coordinator"
                    ) from error
        ours = _who_has(place, me, asked)
        waited = time.monotonic() - begin
        if not ours and waited > min(_TAKEN_S, patience_s):
            raise UserError(
                f"another program listens at port {place.ports[0]} of {socket.gethostname()}, "
                f"where process 0 should: choose another port (--coordinator={place})"
            )
        if waited > patience_s:
            raise NotMet(f"another run has met at {place} and goes on: start this one later")
        _rest(asked)


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)


def _who_has(place: Place, me: Hello, asked: Asked) -> bool:
    """Whether a run meets at the place already; UserError where this would be its second leader."""
    try:
        peer = Peer(socket.create_connection(("localhost", place.ports[0]), _CONNECT_S))
    except OSError:
        return False
    try:
        if not _greeted(peer, place.name, asked):
            return False
        peer.say(hello=dataclasses.asdict(me))
        _answer(peer, me, time.monotonic() + 2 * _STRAGGLERS_S, asked)
        return True
    finally:
        peer.close()


def lead(door: Door, me: Hello, asked: Asked, patience_s: float) -> dict[int, Peer]:
    """Process 0 receives all others; gives their connections by number. They wait for `met`.

    Raises:
      UserError: they were started differently; all that came are told.
      NotMet: not all came in time, or one was asked to leave; likewise.
    """
    end = time.monotonic() + patience_s
    came: list[tuple[Peer, Hello]] = []
    trouble = None
    try:
        while True:
            hellos = [me, *(hello for _, hello in came)]
            known, trouble = trouble, difference(hellos)
            if trouble and not known:
                end = min(end, time.monotonic() + _STRAGGLERS_S)
            expected = max(hello.count for hello in hellos)
            if len({hello.index for hello in hellos}) >= expected or time.monotonic() > end:
                break
            if asked():
                raise NotMet("process 0 was asked to leave before all had met: nothing is lost")
            able = ready([*door.watched(), *(peer for peer, _ in came)])
            for peer, hello in list(came):
                if peer in able and not _stays(peer, peer.hear()):
                    came.remove((peer, hello))
            for peer, hello, rest in door.received(able):
                _stays(peer, rest)
                came.append((peer, hello))
        if trouble:
            raise UserError(trouble)
        missing = sorted({*range(me.count)} - {hello.index for hello in hellos})
        if missing:
            raise NotMet(
                f"{named(missing)} of {me.count} did not come within {patience_s:g} s: start "
                "all of them; nothing is lost"
            )
    except (UserError, NotMet) as error:
        kind = "refused" if isinstance(error, UserError) else "left"
        for peer, _ in came:
            peer.say(**{kind: str(error)})
        raise
    return {hello.index: peer for peer, hello in came}


def _stays(peer: Peer, messages: list[Message] | None) -> bool:
    """Whether one that has come and says this is still there; NotMet when it was asked to leave."""
    for message in messages or ():
        if "left" in message:
            raise NotMet(str(message["left"]))
    if messages is None:
        peer.close()
    return messages is not None


def follow(place: Place, me: Hello, asked: Asked, patience_s: float) -> tuple[Peer, Message]:
    """Meets process 0: the connection to it, and what it said then.

    Raises:
      UserError: the processes were started differently, or no process 0 listens there.
      NotMet: there is no process 0 in time, or one of the processes was asked to leave.
    """
    end = time.monotonic() + patience_s
    strange_since = None  # when something else first answered at every port that answers
    taken_since = None  # when process 0 first said that it goes on without this one
    why = ""
    while time.monotonic() < end:
        greeted = strange = False
        for port in place.ports:
            peer, why = _visit((place.host, port), asked)
            if peer is None:
                continue
            if not (greeted := _greeted(peer, place.name, asked)):
                strange, why = True, "what answers there is no process 0"
                peer.close()
                continue
            peer.say(hello=dataclasses.asdict(me))
            # Received, it is process 0 that says when the time is over.
            answer = _answer(peer, me, math.inf, asked)
            if answer and "met" in answer:
                return peer, answer
            taken_since = (taken_since or time.monotonic()) if answer else None
            why = str(answer["taken"]) if answer else "process 0 went"
            peer.close()
            break
        strange_since = (strange_since or time.monotonic()) if strange and not greeted else None
        if strange_since and time.monotonic() - strange_since > 2 * _TAKEN_S:
            raise UserError(
                f"another program answers at {place}, where process 0 should: choose another port "
                "for --coordinator"
            )
        if taken_since and time.monotonic() - taken_since > _REPLACES_S:
            raise UserError(why)
        _rest(asked)
    raise NotMet(
        f"process {me.index} of {me.count} found no process 0 at {place} within {patience_s:g} s "
        f"({why}): start all of them, with the same --coordinator; nothing is lost"
    )


def _visit(address: tuple[str, int], asked: Asked) -> tuple[Peer | None, str]:
    """A connection, or None and why there is none.

    Made in a thread: a name can take long to be found, and a signal is heeded all the same.
    """
    made: queue.SimpleQueue[socket.socket | OSError | UnicodeError] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put(socket.create_connection(address, _CONNECT_S))
        except (OSError, UnicodeError) as error:  # the latter: a name no encoding of names takes
            made.put(error)

    threading.Thread(target=connect, daemon=True).start()
    while True:
        try:
            result = made.get(timeout=_LOOK_S)
        except queue.Empty:
            _leave_if(asked)
            continue
        if isinstance(result, socket.socket):
            return Peer(result), ""
        return None, getattr(result, "strerror", None) or str(result) or type(result).__name__


def _greeted(peer: Peer, name: str, asked: Asked) -> bool:
    """Whether what is at the other end is process 0 of this run."""
    for message in _answers(peer, time.monotonic() + _GREETING_S, asked):
        return message.get("xmod") == name
    return False


def _answer(peer: Peer, me: Hello, end: float, asked: Asked) -> Message | None:
    """`met` as process 0 says it, or `taken` when that was before; None when process 0 has gone."""
    try:
        for message in _answers(peer, end, asked):
            if "refused" in message:
                raise UserError(str(message["refused"]))
            if "left" in message:
                raise NotMet(str(message["left"]))
            return message
    except _AskedToLeave as leaving:
        line = f"process {me.index} was asked to leave before all had met: nothing is lost"
        peer.say(left=line)
        raise NotMet(line) from leaving
    return None


class _AskedToLeave(NotMet):
    """This process itself was asked."""


def _answers(peer: Peer, end: float, asked: Asked) -> Any:
    """The messages of a peer as they come, until it closes or the time is over."""
    while time.monotonic() < end:
        _leave_if(asked)
        if ready([peer]):
            messages = peer.hear()
            if messages is None:
                return
            yield from messages


def _rest(asked: Asked) -> None:
    _leave_if(asked)
    time.sleep(_LOOK_S)


def _leave_if(asked: Asked) -> None:
    if asked():
        raise _AskedToLeave("asked to leave before the processes had met: nothing is lost")
