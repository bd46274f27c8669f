"""Files that are whole or not there: atomic writes, appended lines, and JSON of finite numbers.

A process may die at any instruction and a disk be full: whole files are replaced atomically, and a
line is appended whole or not at all.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import Any

from xmod_jax.errors import UserError

Path = str | os.PathLike[str]


def encode(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    """One JSON object and a line feed; ValueError for a number that is not finite."""
    return (json.dumps(value, allow_nan=False, indent=indent) + "\n").encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces `path` so that a reader or a crash sees the old content or the new, never a part.

    Temporary file, fsync, rename; makes the folder if needed. What is no file, such as a device or
    a pipe, is written into and never replaced.

    Raises:
      OSError: the disk; a file that was there stays as it was.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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
      ValueError: it is not that; also for lists in lists too deep for Python, and bytes not UTF-8.
    """
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("its values are nested too deep") from error


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _whole(text: str) -> int:
    _finite(text)
    return int(text)


def read_json(path: Path) -> dict[str, Any]:
    """Reads one JSON object.

    Raises:
      UserError: missing, or not a JSON object of finite numbers.
    """
    try:
        value = parse_json(pathlib.Path(path).read_bytes())
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
        except OSError as error:
            os.ftruncate(descriptor, end)
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
    """Forces a file's content, or a folder's names, to disk; nothing where there is none."""
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
