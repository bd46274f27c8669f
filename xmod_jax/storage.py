"""Files that are whole or not there: atomic writes, appended lines, and JSON of finite numbers.

A process may die at any instruction and a disk be full: whole files are replaced atomically, and a
line is appended whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import pathlib
import re
import socket
import urllib.parse
from collections.abc import Mapping
from typing import Any

from xmod_jax.errors import UserError

Path = str | os.PathLike[str]

# Of a file that is read whole; our own are a thousand times smaller.
_LARGEST = 1 << 28
# What file systems answer that cannot force a file or a folder to disk, such as some by FUSE.
_NOT_FORCED = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
# pathlib makes one slash of two.
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(.*)", re.DOTALL)


def local_path(path: str, told: str = "") -> str:
    """`path` where it is one of this machine; that of a ``file:///`` address as a plain path.

    Args:
      path: what a user gave as a file or folder.
      told: stands before it in the message.

    Raises:
      UserError: the address of an object store or another machine: files are replaced, locked and
        appended to here, which those do not do.
    """
    if not (found := _ADDRESS.match(path)):
        return path
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file" and (rest[:2] == "//" or rest[:1] != "/"):
        return urllib.parse.unquote("/" + rest.lstrip("/"))
    raise UserError(
        f"{told}{path}: {scheme}: is no folder of this machine: give a local or mounted one (a "
        f"store such as gs: or s3: through its FUSE mount), or ./{path} for a folder of that name"
    )


def encode(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """One JSON object and a line feed; ValueError for a number that is not finite."""
    return (json.dumps(value, allow_nan=False, indent=indent) + "\n").encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` so that a reader or a crash sees the old content or the new, never a part.

    Temporary file, fsync, rename; makes the folder if needed. What is no file, such as a device or
    a pipe, is written into and never replaced; a link stays one, and the file behind it is
    replaced.

    Raises:
      OSError: the disk; a file that was there stays as it was.
    """
    path = pathlib.Path(path)
    if path.is_symlink():
        path = pathlib.Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    # A name may be as long as file systems allow; that of the temporary file is not longer.
    temporary = path.with_name(f".{path.name[:40]}.{socket.gethostname()}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            _force(file.fileno())
        temporary.rename(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        # A failed write names no file by itself, a failed opening one that the user never gave.
        if isinstance(error, OSError) and error.filename in (None, os.fspath(temporary)):
            error.filename = os.fspath(path)
        raise
    sync(path.parent)  # the rename itself is on disk only once the folder is


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes one JSON object by `write_atomically`; ValueError for a number that is not finite."""
    write_atomically(path, encode(value, indent=1))


def parse_json(text: str | bytes) -> Any:
    """A JSON value whose numbers are finite, also as floats.

    Raises:
      ValueError: it is not that; also for a name twice in an object, lists in lists too deep for
        Python, and bytes that are not UTF-8.
    """
    try:
        return json.loads(
            text,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=_whole,
            object_pairs_hook=_object,
        )
    except RecursionError as error:
        raise ValueError("its values are nested too deep") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands there twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
      UserError: missing, too large to be one of ours, or not a JSON object of finite numbers.
      OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise UserError(f"{path}: larger than {_LARGEST >> 20} MiB, which no file of ours is")
        value = parse_json(content)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except ValueError as error:
        raise UserError(f"{path}: not a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one record as a line of a JSON-lines file, whole or not at all.

    A torn last line, left by a process that died, is removed first. When the disk is full the file
    is cut back to what it held.

    Raises:
      ValueError: a number that is not finite; nothing is written.
      OSError: the disk.
    """
    line = encode(record)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = _end_of_lines(descriptor)
        os.ftruncate(descriptor, end)
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(descriptor, line[written:], end + written)
        except OSError:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                os.ftruncate(descriptor, end)
            raise
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)


def _end_of_lines(descriptor: int) -> int:
    """Offset just after the last line feed of a file."""
    end = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - 4096)
        position = os.pread(descriptor, end - start, start).rfind(b"\n")
        if position >= 0:
            return start + position + 1
        end = start
    return 0


def sync(path: Path) -> None:
    """Forces a file's content, or a folder's names, to disk; nothing where there is none.

    Where the file system cannot do that, as some by FUSE, nothing is forced: its own order of
    writing is then all there is.

    Raises:
      OSError: the disk.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError:
        if os.path.isdir(path):  # some open no folder; of others it may not be read
            return
        raise
    try:
        _force(descriptor)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(descriptor)


def _force(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FORCED:
            raise
