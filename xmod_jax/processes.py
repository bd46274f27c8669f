"""Several processes that train one run: who they are, how they meet, what they agree on.

Process 0 leads: it holds the run's claim and writes its records. The others take the same steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from xmod_jax import agreement, rendezvous, slurm
from xmod_jax.agreement import Hello, Judge
from xmod_jax.errors import UserError
from xmod_jax.lifeline import Lifeline
from xmod_jax.relay import Relay
from xmod_jax.rendezvous import Place

REQUEUE = 75  # EX_TEMPFAIL: come back later

_SILENCE_S = 60  # after which JAX aborts all processes, should one hang
_GRACE_S = 5  # for the main thread to hear of a lost process by itself
_LAST_WORD_S = 10  # for one that cannot go on to say with what status it ends
_PATIENCE_S = 300  # for all processes to come
# What Gloo, NCCL and JAX's coordination say when the other end has gone.
_LOST = re.compile(r"gloo|nccl|coordination|heartbeat|connection|peer", re.IGNORECASE)
_STOPPED = -1  # what process 0 tells the others when it cannot go on
_NO_FAULT = (None, 0, REQUEUE)  # what one may end with whom the others need not follow
_VARIABLES = ("XMOD_COORDINATOR", "XMOD_PROCESS_COUNT", "XMOD_PROCESS_INDEX")
_NEVER = lambda: False  # asked to leave

# The one that this process trains with others on: it meets them once.
_line: Lifeline | None = None


class ProcessLost(Exception):
    """Other processes of the run are gone or never came; this one cannot go on.

    Attributes:
      status: what it ends with: that of the one which ended first, or 75 for another try.
    """

    def __init__(self, message: str, status: int = REQUEUE) -> None:
        super().__init__(message)
        self.status = status


class LeavingTogether(Exception):
    """Raised by every process of a run at the same point: none of them is lost."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run, and which of them this is.

    Attributes:
      count: number of processes.
      index: of this one; 0 leads.
      coordinator: ``host:port`` where they meet; process 0 listens there.
      local_devices: accelerators of its node that this process takes; None: all that it sees.
      place: where they meet, should there be more to say than `coordinator` does.
    """

    count: int = 1
    index: int = 0
    coordinator: str | None = None
    local_devices: tuple[int, ...] | None = None
    place: Place | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"{self.count} processes cannot train: --process_count is at least 1")
        if not 0 <= self.index < self.count:
            raise UserError(
                f"process index {self.index} is not below {self.count} processes: they are 0 to "
                f"{self.count - 1}"
            )
        if self.count > 1:
            self._place()

    @classmethod
    def find(
        cls,
        coordinator: str | None = None,
        count: int | None = None,
        index: int | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Processes:
        """Those that the arguments name, each in place of its variable: XMOD_COORDINATOR,
        XMOD_PROCESS_COUNT, XMOD_PROCESS_INDEX; without any of these the tasks of a Slurm step; else
        this process alone.

        Raises:
          UserError: some of the three given, but not all; or values that do not fit together.
        """
        given = [
            environment.get(name) or None if value is None else value
            for name, value in zip(_VARIABLES, (coordinator, count, index), strict=True)
        ]
        if any(value is not None for value in given):
            missing = [n for n, value in zip(_VARIABLES, given, strict=True) if value is None]
            if missing:
                flags = ", ".join(f"--{n.removeprefix('XMOD_').lower()}" for n in missing)
                raise UserError(f"processes: {flags} ({', '.join(missing)}) missing beside others")
            total, number = map(_whole, _VARIABLES[1:], given[1:])
            return cls(total, number, str(given[0]))
        if (step := slurm.step(environment)) is None:
            return cls()
        place = Place(step.host, step.ports, step.name)
        return cls(step.count, step.index, str(place), step.local_devices, place)

    def _place(self) -> Place:
        """Where the processes meet."""
        if self.place is not None:
            return self.place
        place = Place.parse(self.coordinator or "")
        if place is None:
            raise UserError(
                f"{self.count} processes need a coordinator host:port to meet at, such as "
                f"node1:29400 or [::1]:29400, not {self.coordinator!r}"
            )
        return place

    @property
    def leads(self) -> bool:
        """Whether this process writes what the run leaves behind."""
        return self.index == 0

    @contextlib.contextmanager
    def meeting(
        self,
        abandon: Callable[[ProcessLost], object],
        what: Mapping[str, str] | None = None,
        asked: Callable[[], bool] = _NEVER,
        patience_s: float = _PATIENCE_S,
    ) -> Iterator[None]:
        """Connects the processes while the block runs; before JAX touches a device.

        Args:
          abandon: ends this process with the message and status of its argument; called in a
            thread.
          what: what this process was started with, by label; must be equal in all of them.
          asked: whether this process was asked to leave; while it waits for the others.
          patience_s: how long it waits for them.

        Raises:
          UserError: the processes were started differently, or cannot meet there.
          ProcessLost: another process or its node died, ended, or did not come in time. Where the
            main thread is in a wait that does not hear of it, `abandon` is called instead, half a
            minute later at the latest.
        """
        if self.count == 1:
            yield
            return
        global _line
        left, well = threading.Event(), False

        def on_loss() -> None:
            # Mostly the main thread hears of it by itself, and ends in good order.
            if left.wait(_GRACE_S):
                if not well or line.status in _NO_FAULT:
                    return
                time.sleep(_GRACE_S)  # it may be about to end with the same status
            abandon(self._lost(line))

        line = _line = self._connect(what or {}, asked, patience_s, on_loss)
        try:
            yield
        except LeavingTogether:
            well = True
            raise
        except UserError:
            # A mistake that all of them find is this process's own, though another left first.
            raise
        except Exception as error:
            # What breaks in JAX is heard there a little before the other's last word is here.
            broken = _LOST.search(str(error)) and line.lost.wait(_GRACE_S)
            if isinstance(error, ProcessLost) or not (broken or line.lost.is_set()):
                raise
            raise self._lost(line) from error
        else:
            well = True
        finally:
            if well:
                line.leave()
            left.set()

    def _lost(self, line: Lifeline) -> ProcessLost:
        if line.status is not None and line.status not in _NO_FAULT:
            return ProcessLost(
                f"process {self.index}: process {line.who} ended with status {line.status}: its "
                "message says why",
                line.status,
            )
        return ProcessLost(
            f"process {self.index}: another process of the run was lost: start all of them "
            "again, and the run resumes from its last checkpoint"
        )

    def _connect(
        self,
        what: Mapping[str, str],
        asked: Callable[[], bool],
        patience_s: float,
        on_loss: Callable[[], None],
    ) -> Lifeline:
        """Meets the others, then has JAX connect to them."""
        place, me = self._place(), Hello(self.index, self.count, what)
        try:
            if self.leads:
                door = rendezvous.open_door(place, me, asked, patience_s)
                try:
                    peers = rendezvous.lead(door, me, asked, patience_s)
                except BaseException:
                    door.close()
                    raise
                port = _free_port()
                token = secrets.token_hex(8)
                for peer in peers.values():
                    peer.say(met=True, port=port, token=token)
            else:
                door = None
                leader, met = rendezvous.follow(place, me, asked, patience_s)
                peers, token = {0: leader}, str(met["token"])
                # JAX would abort this process as soon as process 0 has gone.
                port = Relay(place.host, met["port"]).port
        except rendezvous.NotMet as error:
            raise ProcessLost(str(error)) from error
        line = Lifeline(me, door, peers, token, on_loss, asked)
        try:
            self._initialize(port)
        except RuntimeError as error:
            raise ProcessLost(
                f"process {self.index}: JAX could not connect the processes "
                f"({str(error).splitlines()[0][:200]}): start all of them again"
            ) from error
        return line

    def _initialize(self, port: int) -> None:
        """Has JAX connect the processes; its coordination service, or a relay to it, is local."""
        import jax

        # On CPU processes talk through Gloo, which JAX does not choose by itself.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # It would take SIGTERM for itself, and tell no one (training/preemption.py).
        jax.config.update("jax_enable_preemption_service", False)
        # A site's proxy knows nothing of this machine's own ports.
        os.environ["no_grpc_proxy"] = "127.0.0.1"  # noqa: SIM112
        jax.config.update("jax_check_proxy_envs", False)
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            self.count,
            self.index,
            local_device_ids=None if self.local_devices is None else list(self.local_devices),
            # Slurm's would give every process the one device of its number on the node.
            cluster_detection_method="deactivate",
            initialization_timeout=_SILENCE_S,
            heartbeat_timeout_seconds=_SILENCE_S,
            shutdown_timeout_seconds=_SILENCE_S,
        )

    def agree(self, what: Mapping[str, str]) -> None:
        """Refuses values, by label, that are not equal in all processes; waits for all of them.

        Raises:
          UserError: in every process; names the first label that differs, its values and whose
            they are.
          ProcessLost: another process has gone meanwhile, or this one was asked to leave.
        """
        if self.count > 1:
            self._judged(what, agreement.differing)

    def _judged(self, what: Mapping[str, str], judge: Judge) -> None:
        assert _line is not None, "only processes that have met can compare anything"
        if line := _line.compare(what, judge):
            raise UserError(line)
        if _line.lost.is_set():
            raise self._lost(_line)
        if _line.asked():
            raise ProcessLost(f"process {self.index} was asked to leave before training began")

    def share(self, folder: pathlib.Path) -> None:
        """Refuses a folder that is not one and the same for all processes; makes it.

        Process 0 writes a file that the others must see, and removes it.

        Raises:
          UserError: in every process.
          OSError: the folder cannot be made or written to.
          ProcessLost: as `agree`.
        """
        if self.count == 1:
            return
        assert _line is not None
        token = folder / f".{_line.token}"
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            if self.leads:
                folder.mkdir(parents=True, exist_ok=True)
                token.touch(exist_ok=False)
            self.agree({})  # the file is there
            seen = self.leads or agreement.seen(token, lambda: _line.lost.is_set() or _line.asked())
            missed = "" if seen else socket.gethostname()
            self._judged({"missed": missed}, functools.partial(agreement.unshared, folder))
        except UserError:
            if self.leads:
                token.unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
            raise
        finally:
            if self.leads:
                token.unlink(missing_ok=True)

    def from_leader(self, decide: Callable[[], int | None]) -> int:
        """What process 0 decides, in every process; alone it is a plain call.

        Args:
          decide: called in process 0 only; gives a number of at least 0, None being 0.

        Raises:
          ProcessLost: in the others, when `decide` failed in process 0, where its error is raised.
        """
        if self.count == 1:
            return decide() or 0
        value = _STOPPED
        try:
            if self.leads:
                value = decide() or 0
        finally:
            value = _broadcast(value)
        if value == _STOPPED:
            raise self._stopped()
        return value

    def _stopped(self) -> ProcessLost:
        """Process 0 has an error: it says at its end which status that is worth."""
        if _line is not None and _line.lost.wait(_LAST_WORD_S):
            return self._lost(_line)
        return ProcessLost("process 0 cannot go on: its message says why", 2)

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process; waits for all of them."""
        return flag if self.count == 1 else bool(self.vote(flag))

    def vote(self, flag: bool) -> Any:
        """`any` as an array whose value is there once every process has voted."""
        if self.count == 1:
            return flag
        return _ballot()(flag)


ALONE = Processes()


@functools.cache
def _ballot() -> Callable[[bool], Any]:
    """One program for all votes: whether any process's flag is up."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("all",))
    count = jax.jit(lambda votes: votes.any(), out_shardings=NamedSharding(mesh, P()))
    parts = NamedSharding(mesh, P("all"))

    def vote(flag: bool) -> Any:
        mine = lambda index: np.full(mesh.size, flag)[index]
        return count(jax.make_array_from_callback((mesh.size,), parts, mine))

    return vote


def _broadcast(value: int) -> int:
    import numpy as np
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _free_port() -> int:
    """A port of this machine that nobody has, for a moment at least."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def end_with(status: int) -> bool:
    """Tells the others of the run that this process ends with a status; False when it is alone."""
    if _line is None:
        return False
    _line.end(status)
    return True


def _whole(name: str, value: Any) -> int:
    if not re.fullmatch(r"-?[0-9]{1,9}", str(value)):
        raise UserError(f"processes: {name}: {value!r} is not a whole number")
    return int(value)
