"""Claims of a folder by one worker: a kernel lock that ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator

from xmod_jax.errors import UserError
from xmod_jax.storage import Path

LOCK = ".lock"
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
_LOOK_S = 1  # between tries to take a claim over


class RunClaimed(UserError):
    """Another worker holds the run."""


@contextlib.contextmanager
def claim(
    directory: Path,
    wait: bool = False,
    patience_s: float = 0,
    asked: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Holds a run for this worker while the block runs; no two workers can.

    Args:
      directory: what is held.
      wait: for another worker that holds it, instead of `RunClaimed`.
      patience_s: how long to wait for one on another machine: a file server keeps the lock of a
        machine that has gone for a while. One of this machine that holds it lives.
      asked: whether to wait no more.

    The claim is a kernel lock (flock) on ``.lock``: it ends with the process however that dies,
    also by kill -9, and a left-over lock file means nothing. A child made by fork alone shares the
    lock as long as it lives. On NFS Linux passes the lock to the server, so claims hold between
    nodes unless the mount says ``nolock`` or ``local_lock=flock``; there, give every node its own
    ``--shard``.

    Raises:
      RunClaimed: another worker holds it; names host and process.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + patience_s
    # Never unlinked: a worker could lock the removed file while another locks a new one.
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        while not _locked(file.fileno(), wait, directory):
            if time.monotonic() >= end or _is_here(directory) or asked():
                raise claimed(directory)
            time.sleep(_LOOK_S)
        file.truncate(0)
        file.write(f"{socket.gethostname()} process {os.getpid()}\n{_boot()}\n")
        file.flush()
        yield


def _locked(file: int, wait: bool, directory: pathlib.Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:  # such as ENOLCK or ENOTSUP
        raise UserError(
            f"{directory}: its file system has no locks (flock: {error.strerror}): mount it "
            "with them, or choose another folder"
        ) from error
    return True


def _boot() -> str:
    """What tells this machine, since it started, from all others; empty where nothing does."""
    try:
        return f"boot {_BOOT.read_text(encoding='ascii').strip()}"
    except OSError:
        return ""


def _is_here(directory: pathlib.Path) -> bool:
    """Whether the holder runs on this machine, whose kernel frees the locks of the dead."""
    _, boot = _holder(directory)
    return boot == _boot() != ""


def _holder(directory: pathlib.Path) -> tuple[str, str]:
    """Who holds a claim, and on which machine."""
    lines = (directory / LOCK).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[0].strip() if lines else "", lines[1].strip() if len(lines) > 1 else ""


def claimed(directory: Path) -> RunClaimed:
    """What a worker is told that finds the run in another's hands."""
    holder, _ = _holder(pathlib.Path(directory))
    return RunClaimed(
        f"{directory} is being trained by {holder or 'another worker'}: wait for it, or choose "
        "another run"
    )
