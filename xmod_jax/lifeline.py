"""How the processes of a run notice at once that one of them died, or ended and with what status.

JAX notices after a minute of silence, and then aborts the others. Here every process keeps its
connection to process 0, over which they met (`xmod_jax.rendezvous`): it breaks as soon as either
end dies, and one that ends in good order says so first. Process 0 passes on what it hears.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping

from xmod_jax.agreement import Hello, Judge, difference
from xmod_jax.rendezvous import Asked, Door, ready
from xmod_jax.wire import Message, Peer

_HOUR_S = 3600  # nothing is looked at meanwhile that does not wake the thread


class Lifeline:
    """The connections of one process: to process 0, or, in process 0, to all others.

    Attributes:
      lost: set once another process died or ended early.
      status: what that one ended with; None: it died without a word.
      who: its number.
    """

    def __init__(
        self,
        me: Hello,
        door: Door | None,
        peers: Mapping[int, Peer],
        token: str,
        on_loss: Callable[[], None],
        asked: Asked,
    ) -> None:
        """Starts to watch.

        Args:
          me: what this process said of itself.
          door: where latecomers are told that all have met; in process 0 only.
          peers: connections to the others, by number.
          token: known to the run's processes alone.
          on_loss: called once, in a thread, when another process died or ended early.
          asked: whether this process was asked to leave.
        """
        self.token, self.asked = token, asked
        self.lost = threading.Event()
        self.status: int | None = None
        self.who = 0
        self._me, self._door, self._on_loss = me, door, on_loss
        self._peers = dict(peers)
        self._left: set[int] = set()  # those that said that they go on without the others
        self._compared: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="lifeline")
        self._thread.start()

    def compare(self, what: Mapping[str, str], judge: Judge) -> str | None:
        """What process 0's judge says of the values of all, for which it waits.

        None as well when meanwhile a process is lost (`lost`), or this one was `asked` to leave.
        """
        if self._door is None:
            self._tell(compare=dict(what))
            answer = self._next()
            return answer[1]["verdict"] if answer else None
        whats = {0: what}
        while len(whats) <= len(self._peers):
            if (said := self._next()) is None:
                return None
            whats[said[0]] = said[1]["compare"]
        line = judge(whats)
        self._tell(verdict=line)
        return line

    def _next(self) -> tuple[int, Message] | None:
        """The next word of a comparison; None once a process is lost or this one asked to leave."""
        while True:
            try:
                return self._compared.get(timeout=0.1)
            except queue.Empty:
                if self.lost.is_set() or self.asked():
                    return None

    def leave(self) -> None:
        """All is well: whatever becomes of this process, the others need not follow."""
        self._tell(left=True)

    def end(self, status: int) -> None:
        """Tells the others that this process ends with a status that ends them as well."""
        self._tell(end=status, who=self._me.index)

    def _tell(self, **message: object) -> None:
        for peer in list(self._peers.values()):
            peer.say(**message)

    def close(self) -> None:
        """Stops watching and closes the connections."""
        self._wake.send(b".")
        self._thread.join()
        for end in (*self._peers.values(), self._door, self._wake, self._woken):
            if end is not None:
                end.close()

    def _watch(self) -> None:
        watched = dict(self._peers)
        while True:
            door = self._door.watched() if self._door else []
            # A guest that says nothing is sent away in time only where somebody looks.
            able = ready([self._woken, *door, *watched.values()], 1 if len(door) > 1 else _HOUR_S)
            if self._woken in able:
                return
            if self._door:
                for guest, hello, _ in self._door.received(able):
                    self._send_away(guest, hello)
            for index, peer in list(watched.items()):
                if peer in able and not self._heard(index, peer):
                    del watched[index]

    def _send_away(self, guest: Peer, hello: Hello) -> None:
        """Tells a latecomer; one that only replaces a lost process comes again by itself."""
        if hello.index and (line := difference([self._me, hello])):
            guest.say(refused=line)
        guest.say(
            taken=f"the run of {self._me.count} processes at {self._me.host} has met and goes on "
            f"without this process {hello.index}: another one was started with that number"
        )
        guest.close()

    def _heard(self, index: int, peer: Peer) -> bool:
        """Takes in what a peer says; False when there is nothing more to come."""
        messages = peer.hear()
        for message in messages or ():
            if "left" in message:
                self._left.add(index)
            elif type(message.get("end")) is int:
                self._lose(int(message.get("who", index)), message["end"])
            else:
                self._compared.put((index, message))
        if messages is None and index not in self._left:
            self._lose(index, None)
        return messages is not None

    def _lose(self, who: int, status: int | None) -> None:
        if self.lost.is_set():
            return
        self.who, self.status = who, status
        self.lost.set()
        threading.Thread(target=self._on_loss, daemon=True, name="loss").start()
