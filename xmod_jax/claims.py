"""Claims of a folder by one worker: a kernel lock that ends with the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from xmod_jax.errors import UserError
from xmod_jax.storage import Path

LOCK = ".lock"


class RunClaimed(UserError):
    """Another worker holds the run."""


@contextlib.contextmanager
def claim(directory: Path, wait: bool = False) -> Iterator[None]:
    """Holds a run for this worker while the block runs; no two workers can.

    Args:
      directory: what is held.
      wait: for another worker that holds it, instead of `RunClaimed`.

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
    # Never unlinked: a worker could lock the removed file while another locks a new one.
    with (directory / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise claimed(directory) from error
        except OSError as error:  # such as ENOLCK or ENOTSUP
            raise UserError(
                f"{directory}: its file system has no locks (flock: {error.strerror}): mount it "
                "with them, or choose another folder"
            ) from error
        file.truncate(0)
        file.write(f"{socket.gethostname()} process {os.getpid()}\n")
        file.flush()
        yield


def claimed(directory: Path) -> RunClaimed:
    """What a worker is told that finds the run in another's hands."""
    holder = (pathlib.Path(directory) / LOCK).read_text(encoding="utf-8").strip()
    return RunClaimed(
        f"{directory} is being trained by {holder or 'another worker'}: wait for it, or choose "
        "another run"
    )
