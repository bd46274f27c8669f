"""Keeps JAX's connection to process 0 from breaking when that process dies.

JAX aborts a process (status 134, a C++ stack) in the moment in which its connection to the
coordination service, which lives in process 0, breaks; nothing can be said or done any more. So
the other processes connect to a relay of their own, whose near end stays open when the far one
breaks. What became of process 0 the lifeline tells, at once, and the process ends in good order.
"""

from __future__ import annotations

import contextlib
import socket
import threading

_CONNECT_S = 30


class Relay:
    """Carries every connection to a port of this machine on to ``(host, port)``."""

    def __init__(self, host: str, port: int) -> None:
        """Listens, in threads that live as long as the process."""
        self._to = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True, name="relay").start()

    def _serve(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._to, _CONNECT_S)
            except OSError:
                near.close()  # JAX comes again by itself until its own time is over
                continue
            far.settimeout(None)
            for source, sink, ends in ((near, far, True), (far, near, False)):
                carry = threading.Thread(target=_carry, args=(source, sink, ends), daemon=True)
                carry.start()


def _carry(source: socket.socket, sink: socket.socket, ends: bool) -> None:
    """Copies until either end breaks; `ends`: then tells the other one."""
    with contextlib.suppress(OSError):
        for end in (source, sink):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := source.recv(1 << 16):
            sink.sendall(data)
    if ends:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
