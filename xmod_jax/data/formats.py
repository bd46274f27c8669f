"""What a file is, told by its first bytes, since a name can say anything."""

from __future__ import annotations

import codecs
import re

HEAD = 1 << 14  # bytes that are looked at
BYTE_ORDER_MARK = codecs.BOM_UTF8
GZIP, ZSTD = "gzip", "zstd"

_SKIPPED_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # what some packers write before zstd's
_PARQUET = b"PAR1"
_UNPACK = "unpack it and give what is in it"
_KNOWN = (
    (b"PK\x03\x04", f"a ZIP archive: {_UNPACK}"),
    (b"PK\x05\x06", f"an empty ZIP archive: {_UNPACK}"),
    (b"\xfd7zXZ\0", "packed by xz: unpack it (unxz)"),
    (b"BZh91AY&SY", "packed by bzip2: unpack it (bunzip2)"),
    (b"7z\xbc\xaf\x27\x1c", f"a 7z archive: {_UNPACK}"),
    (b"Rar!\x1a\x07", f"a RAR archive: {_UNPACK}"),
    (b"\x04\x22\x4d\x18", "packed by lz4: unpack it (unlz4)"),
    (b"\x1f\x9d", "packed by compress: unpack it (uncompress)"),
    (b"\xff\x06\0\0sNaPpY", "packed by snappy: unpack it"),
    (b"%PDF-", "a PDF document: give its text"),
    (b"SQLite format 3\0", "an SQLite database: export its text"),
    (b"ARROW1\0\0", "an Arrow or Feather file: write it as parquet"),
    (b"\xff\xff\xff\xff", "an Arrow stream, or binary data: write it as parquet"),
    (b"Obj\x01", "an Avro file: write it as parquet"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file: export its text"),
    (b"\x93NUMPY", "a NumPy array: export its text"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF89a", "a GIF image"),
    (b"\x7fELF", "a program"),
    (
        b"version https://git-lfs.github.com/spec/",
        "a Git LFS pointer: fetch it (git lfs pull)",
    ),
)
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_TAR = (257, b"ustar")
_WIDE = (  # longer marks first: UTF-32's begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\b\x1b")) + b"\x7f"
_TEXT_ONLY = "only text in UTF-8, JSON lines and parquet are read"


def packing(head: bytes) -> str | None:
    """GZIP or ZSTD for a file packed by it, None for any other."""
    if head.startswith(b"\x1f\x8b"):
        return GZIP
    if head.startswith(b"\x28\xb5\x2f\xfd") or _SKIPPED_FRAME.match(head):
        return ZSTD
    return None


def is_parquet(head: bytes) -> bool:
    """Whether a file that begins so is parquet."""
    return head.startswith(_PARQUET) and head[4:5] < b" "  # a text may begin with these letters


def foreign(head: bytes) -> str | None:
    """What a file that begins so is, and what to do, where it is no text in UTF-8; else None.

    Text in an encoding that resembles UTF-8 for long, such as Latin-1, passes: where it differs is
    found as it is read.
    """
    for magic, what in _KNOWN:
        if head.startswith(magic):
            return what
    start, magic = _TAR
    if head[start:].startswith(magic):
        return f"a tar archive: {_UNPACK}"
    if _PICKLE.match(head):
        return "a pickle of Python: write its text as JSON lines"
    for mark, encoding in _WIDE:
        if head.startswith(mark):
            return _recode(encoding)
    return _wide(head) or _binary(head)


def _recode(encoding: str) -> str:
    return f"text in {encoding}: make it UTF-8 (iconv -f {encoding} -t UTF-8)"


def _wide(head: bytes) -> str | None:
    """UTF-32 or UTF-16 without its mark: the NULs of most letters stand at the same places."""
    if head.count(0) < 2:
        return None
    fours, twos = [_nulls(head, 4, i) for i in range(4)], [_nulls(head, 2, i) for i in range(2)]
    for order, uppers in (("LE", (2, 3)), ("BE", (0, 1))):
        if min(fours[i] for i in uppers) > 0.9 and min(fours) < 0.1:
            return _recode(f"UTF-32{order}")
    for order, upper in (("LE", 1), ("BE", 0)):
        if twos[upper] > 0.3 and twos[1 - upper] < 0.05:
            return _recode(f"UTF-16{order}")
    return None


def _nulls(head: bytes, step: int, start: int) -> float:
    """Share of NULs among every `step`-th byte."""
    part = head[start::step]
    return part.count(0) / max(len(part), 1)


def _binary(head: bytes) -> str | None:
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if head.count(0) > max(len(head) / 100, 1) or controls > max(len(head) / 10, 1):
        return f"binary data: {_TEXT_ONLY}"
    text = head.decode(errors="replace")
    invalid = text.count("\ufffd") - head.count("\ufffd".encode())
    if invalid > max(len(text) * 0.3, 1):
        return f"binary data, or text of another encoding than UTF-8: {_TEXT_ONLY} (see iconv)"
    return None
