"""How the processes of a run notice at once that one of them died.

JAX notices after a minute of silence, and then aborts the others. Here every process keeps a TCP
connection to process 0, which breaks as soon as either end dies, and which the kernel probes for an
end that vanished without a word.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator

_BYE = b"."  # an end that is closed without this has died
_HELLO = struct.Struct("!q")
_CONNECT_S = 60
_PROBES = (  # a node without power is noticed after 10 + 4 * 5 s
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (getattr(socket, "TCP_KEEPIDLE", None), socket.IPPROTO_TCP, 10),
    (getattr(socket, "TCP_KEEPINTVL", None), socket.IPPROTO_TCP, 5),
    (getattr(socket, "TCP_KEEPCNT", None), socket.IPPROTO_TCP, 4),
)


class Lifeline:
    """The connections of one process: to process 0, or, in process 0, to all others."""

    def __init__(
        self,
        listener: socket.socket | None,
        peers: list[socket.socket],
        secret: int,
        lost: Callable[[], None],
    ) -> None:
        """Starts to watch.

        Args:
          listener: where the others connect; in process 0 only.
          peers: connections that are there already.
          secret: what a connection must begin with to count.
          lost: called once, in a thread, when an end breaks that did not take its leave.
        """
        self.broken = False
        self._listener, self._peers, self._secret, self._lost = listener, peers, secret, lost
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for watched in (listener, *peers, self._woken):
            if watched is not None:
                self._selector.register(watched, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lifeline")
        self._thread.start()

    def close(self, leaving: bool) -> None:
        """Stops watching; `leaving`: all is well, the others need not follow."""
        self._wake.send(_BYE)
        self._thread.join()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                if leaving:
                    peer.send(_BYE)
            peer.close()
        for end in (self._listener, self._wake, self._woken):
            if end is not None:
                end.close()
        self._selector.close()

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                    continue
                assert isinstance(key.fileobj, socket.socket)
                if not self._still_there(key.fileobj):
                    self.broken = True
                    self._lost()
                    return

    def _welcome(self) -> None:
        assert self._listener is not None
        peer, _ = self._listener.accept()
        _probe(peer)
        peer.settimeout(_CONNECT_S)  # a stranger may connect and say nothing
        with contextlib.suppress(OSError):
            if peer.recv(_HELLO.size, socket.MSG_WAITALL) == _HELLO.pack(self._secret):
                self._peers.append(peer)
                self._selector.register(peer, selectors.EVENT_READ)
                return
        peer.close()

    def _still_there(self, peer: socket.socket) -> bool:
        """Whether an end that has something to read is well; one that left is not watched on."""
        try:
            well = peer.recv(1) == _BYE
        except OSError:
            well = False
        self._selector.unregister(peer)
        return well


@contextlib.contextmanager
def tied(
    host: str,
    leads: bool,
    agree: Callable[[int], int],
    leaving: tuple[type[BaseException], ...],
    lost: Callable[[], None],
) -> Iterator[Lifeline]:
    """Ties this process to process 0 while the block runs.

    Args:
      host: of process 0.
      leads: whether this is process 0.
      agree: gives every process the number (below 2^31) that process 0 passes to it.
      leaving: exceptions with which all processes leave the block: nothing is wrong then.
      lost: called in a thread when another process died; not once the block is left.

    Raises:
      OSError: process 0 cannot be reached.
    """
    listener, peers = None, []
    if leads:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    port = agree(listener.getsockname()[1] if listener else 0)
    secret = agree(secrets.randbits(31))
    if not leads:
        peer = socket.create_connection((host, port), _CONNECT_S)
        peer.settimeout(None)
        _probe(peer)
        peer.sendall(_HELLO.pack(secret))
        peers.append(peer)
    line = Lifeline(listener, peers, secret, lost)
    well = False
    try:
        yield line
        well = True
    except leaving:
        well = True
        raise
    finally:
        line.close(well)


def _probe(connection: socket.socket) -> None:
    for option, level, value in _PROBES:
        if option is not None:  # macOS lacks one of them
            connection.setsockopt(level, option, value)
