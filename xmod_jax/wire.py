"""Messages between the processes of a run: JSON objects, a line each, on a TCP connection."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from xmod_jax import storage

_SEND_S = 10  # for the other end to take a message
_LONGEST = 1 << 20  # bytes of a message; what is longer is none
_PROBES = (  # a node without power is noticed after 10 + 4 * 5 s
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (getattr(socket, "TCP_KEEPIDLE", None), socket.IPPROTO_TCP, 10),
    (getattr(socket, "TCP_KEEPINTVL", None), socket.IPPROTO_TCP, 5),
    (getattr(socket, "TCP_KEEPCNT", None), socket.IPPROTO_TCP, 4),
)

Message = dict[str, Any]


class Peer:
    """The connection to another process, which the kernel probes for an end that vanished.

    Attributes:
      since: when it was made, in seconds of `time.monotonic`.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Takes the connection over."""
        self.since = time.monotonic()
        self._connection, self._rest = connection, b""
        connection.settimeout(_SEND_S)
        for option, level, value in _PROBES:
            if option is not None:  # macOS lacks one of them
                connection.setsockopt(level, option, value)

    def fileno(self) -> int:
        """For `selectors`."""
        return self._connection.fileno()

    def say(self, **message: Any) -> None:
        """Sends a message; one that has gone is noticed where it is listened to."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> list[Message] | None:
        """The messages that have come whole, once there is something to read.

        None: the other end has closed, or what it says is no message.
        """
        try:
            data = self._connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > _LONGEST:
            return None
        try:
            messages = [storage.parse_json(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
