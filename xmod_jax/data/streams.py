"""Files as streams of bytes, unpacked where they are packed (gzip, zstd)."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from xmod_jax.data import formats
from xmod_jax.errors import UserError

_ENDINGS = {".gz": formats.GZIP, ".zst": formats.ZSTD}
_WINDOW_MB = 128  # largest window of zstd that pyarrow unpacks


@contextlib.contextmanager
def opened(path: str, told: Callable[[float], None] = lambda _: None) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked, without a byte order mark at their beginning.

    Args:
      path: the file.
      told: called with the share of the file that has been read.

    Raises:
      UserError: it is damaged or cut, also while it is read, or not packed as its name says.
    """
    with open(path, "rb") as raw:
        head = raw.read(18)
        raw.seek(0)
        packing = formats.packing(head)
        _check_name(path, packing, head)
        stream: Any = raw
        if packing == formats.GZIP:
            stream = gzip.GzipFile(fileobj=raw)
        elif packing == formats.ZSTD:
            stream = _zstd(raw)
        try:
            watched = _Watched(stream, raw, told)
            watched.skip(formats.BYTE_ORDER_MARK)
            yield watched  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            if "too much memory" in str(error):
                raise UserError(f"{path}: {_window(head)}") from error
            raise UserError(f"{path}: damaged or cut: {error}") from error


def unpacked_name(path: str) -> str:
    """The name of what a packed file holds, in small letters."""
    name = os.path.basename(path).lower()
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def head(path: str) -> bytes:
    """The first `formats.HEAD` unpacked bytes of a file, fewer of a shorter one.

    Raises:
      UserError: as `opened`.
    """
    with opened(path) as stream:
        return stream.read(formats.HEAD)


def _check_name(path: str, packing: str | None, head: bytes) -> None:
    """Refuses a file whose name says that it is packed where it is not."""
    named = _ENDINGS.get(os.path.splitext(path)[1].lower())
    if named is None or packing is not None:
        return
    if not head:
        raise UserError(f"{path}: cut: a packed file is never empty: get it again")
    raise UserError(f"{path}: not packed by {named}, as its name says: it is damaged, or rename it")


def _zstd(raw: IO[bytes]) -> Any:
    import pyarrow

    packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return io.BufferedReader(packed, 1 << 16)


def _window(head: bytes) -> str:
    """What is wrong with a file of zstd whose window is too large; `head` holds its header."""
    advice = f"only {_WINDOW_MB} MB are read: unpack it (zstd -d --long=31) or pack it anew"
    single_segment = len(head) < 6 or head[4] & 0x20
    if single_segment or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return f"zstd with a larger window than is read (--long); {advice}"
    exponent, mantissa = head[5] >> 3, head[5] & 7
    window = (1 << (10 + exponent)) * (8 + mantissa) // 8
    return f"zstd with a window of {window >> 20} MB (--long); {advice}"


class _Watched:
    """A stream that tells how much of its file has been read."""

    def __init__(self, stream: Any, raw: IO[bytes], told: Callable[[float], None]) -> None:
        self._stream, self._raw, self._told = stream, raw, told
        self._size = max(os.fstat(raw.fileno()).st_size, 1)
        self._begun = b""  # what was read to look for a mark

    def skip(self, mark: bytes) -> None:
        """Skips `mark` at the beginning."""
        begun = self._stream.read(len(mark))
        self._begun = b"" if begun == mark else begun

    def read(self, size: int) -> bytes:
        begun, self._begun = self._begun[:size], self._begun[size:]
        return self._tell(begun + self._stream.read(size - len(begun)))

    def readline(self, limit: int) -> bytes:
        begun, self._begun = self._begun, b""
        end = begun.find(b"\n") + 1
        if end:
            begun, self._begun = begun[:end], begun[end:]
            return begun
        return self._tell(begun + self._stream.readline(limit - len(begun)))

    def _tell(self, content: bytes) -> bytes:
        self._told(self._raw.tell() / self._size)
        return content
