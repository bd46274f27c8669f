"""What the processes of a run say of themselves, and one line for what differs that should not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from xmod_jax.wire import Message

SEEN_S = 10  # for a file of one node to be seen on all others

# What is wrong with the values of all processes, by their numbers, in one line; None: nothing.
Judge = Callable[[Mapping[int, Mapping[str, str]]], str | None]


@dataclasses.dataclass(frozen=True)
class Hello:
    """What a process says of itself.

    Attributes:
      index: its number.
      count: how many it believes that there are.
      what: what it was started with, by label; equal in all of them.
      host: the machine that it runs on.
    """

    index: int
    count: int
    what: Mapping[str, str] = dataclasses.field(default_factory=dict)
    host: str = dataclasses.field(default_factory=socket.gethostname)

    @classmethod
    def read(cls, message: Message) -> Hello | None:
        """That of a message; None for one that is none."""
        said = message.get("hello")
        if not isinstance(said, dict):
            return None
        index, count = (said.get(name) for name in ("index", "count"))
        what, host = said.get("what"), said.get("host")
        if not (_is_number(index) and _is_number(count)):
            return None
        if not (isinstance(what, dict) and isinstance(host, str)):
            return None
        if not all(isinstance(value, str) for value in what.values()):
            return None
        return cls(index, count, what, host)


def _is_number(value: Any) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def difference(hellos: Sequence[Hello]) -> str | None:
    """One line that says in what processes differ that should not, or None."""
    if line := _differs("--process_count", {h.index: str(h.count) for h in hellos}):
        return line
    seen: dict[int, Hello] = {}
    for hello in hellos:
        if (other := seen.setdefault(hello.index, hello)) is not hello:
            return (
                f"two processes were started as process {hello.index} (on {other.host} and "
                f"{hello.host}): give each a --process_index of its own"
            )
    return differing({hello.index: hello.what for hello in hellos})


def differing(whats: Mapping[int, Mapping[str, str]]) -> str | None:
    """One line for the first label whose values differ between processes, or None."""
    for label in dict.fromkeys(label for what in whats.values() for label in what):
        values = {index: what.get(label, "not given") for index, what in whats.items()}
        if line := _differs(label, values):
            return line
    return None


def _differs(label: str, values: Mapping[int, str]) -> str | None:
    holders: dict[str, list[int]] = {}
    for index, value in sorted(values.items()):
        holders.setdefault(value, []).append(index)
    if len(holders) < 2:
        return None
    parts = [f"{value} in {named(who)}" for value, who in holders.items()]
    return (
        f"the processes of the run were started differently: {label} is {', '.join(parts)}: start "
        "all of them with the same command and code"
    )


def named(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"process {indices[0]}"
    shown = [str(index) for index in indices[:8]] + ["..."] * (len(indices) > 8)
    return f"processes {', '.join(shown)}"


def seen(path: pathlib.Path, stop: Callable[[], bool]) -> bool:
    """Whether a file that another node has made comes into sight in time."""
    end = time.monotonic() + SEEN_S
    while not path.exists():
        if time.monotonic() > end or stop():
            return False
        time.sleep(0.1)
        # A network file system keeps in mind what was not there, until a folder is listed anew.
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
    return True


def unshared(folder: pathlib.Path, whats: Mapping[int, Mapping[str, str]]) -> str | None:
    """One line for the processes that did not see process 0's file in its folder, or None."""
    missed = {index: what["missed"] for index, what in whats.items() if what["missed"]}
    if not missed:
        return None
    who = ", ".join(f"process {index} on {host}" for index, host in sorted(missed.items()))
    return (
        f"{folder} of process 0 on {socket.gethostname()} is not the folder of {who}: choose one "
        "on a file system that all of them share"
    )
