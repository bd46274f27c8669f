"""What first bytes tell of a file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import sqlite3
import tarfile
import zipfile

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, ipc

from xmod_jax.data import formats

TEXT = "".join(f"Line {i} of a text, naïve and long.\n" for i in range(300))
CHINESE = "这是一个测试文件。里面有很多中文字。\n" * 300
TABLE = pyarrow.table({"text": ["a", "b"]})


def _zip() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.txt", TEXT)
    return sink.getvalue()


def _tar() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return sink.getvalue()


def _sqlite() -> bytes:
    base = sqlite3.connect(":memory:")
    base.execute("create table texts(text)")
    return base.serialize()


def _numpy() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.arange(9))
    return sink.getvalue()


def _feather() -> bytes:
    sink = io.BytesIO()
    feather.write_feather(TABLE, sink)
    return sink.getvalue()


def _stream() -> bytes:
    sink = io.BytesIO()
    with ipc.new_stream(sink, TABLE.schema) as stream:
        stream.write_table(TABLE)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (_zip(), "a ZIP archive"),
        (_tar(), "a tar archive"),
        (lzma.compress(b"text"), "packed by xz"),
        (bz2.compress(b"text"), "packed by bzip2"),
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7z archive"),
        (b"Rar!\x1a\x07\x01\x00", "a RAR archive"),
        (b"%PDF-1.7\n%\xe2\xe3\n", "a PDF"),
        (_sqlite(), "an SQLite database"),
        (_feather(), "an Arrow or Feather file"),
        (_stream(), "an Arrow stream"),
        (_numpy(), "a NumPy array"),
        (pickle.dumps({"text": TEXT}), "a pickle"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a PNG image"),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", "a JPEG image"),
        (b"\x7fELF\2\1\1\0", "a program"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (TEXT.encode("utf-16"), "text in UTF-16: make it UTF-8 (iconv -f UTF-16 "),
        (TEXT.encode("utf-16-le"), "text in UTF-16LE"),
        (TEXT.encode("utf-16-be"), "text in UTF-16BE"),
        (TEXT.encode("utf-32"), "text in UTF-32:"),
        (TEXT.encode("utf-32-le"), "text in UTF-32LE"),
        (TEXT.encode("utf-32-be"), "text in UTF-32BE"),
        (CHINESE.encode("utf-16-le"), "binary data"),
        (CHINESE.encode("gbk"), "text of another encoding"),
        (("Привет мир, это текст\n" * 99).encode("koi8-r"), "text of another encoding"),
        (bytes(5000), "binary data"),
        (random.Random(0).randbytes(5000), "binary data"),
        (random.Random(0).randbytes(12), "binary data"),
    ],
)
def test_what_is_no_utf8_text_is_told_by_its_first_bytes(content, what):
    assert what in (formats.foreign(content[: formats.HEAD]) or "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TEXT,
        CHINESE,
        "🙂" * 999,
        "BZhang wrote GIF8 and PAR1",
        "PAR1 is the name of this text",
        "%PD and MZ",
        TEXT + "one stray \0 in a log\n" + TEXT,
        "\x1b[1mbold\x1b[0m and \x08 backspaces\f",
        "\ufffd was put here by another program \ufffd\ufffd" * 9,
    ],
)
def test_text_is_text_also_where_it_is_cut_within_a_character(text):
    content = text.encode()
    for cut in range(4):
        head = content[: len(content) - cut] if cut else content
        assert formats.foreign(head) is None
        assert formats.packing(head) is None and not formats.is_parquet(head)


def test_packed_files_are_told_by_their_first_bytes():
    assert formats.packing(gzip.compress(b"")) == formats.GZIP
    assert formats.packing(b"\x28\xb5\x2f\xfd\x04") == formats.ZSTD
    assert formats.packing(b"\x50\x2a\x4d\x18\x04\0\0\0") == formats.ZSTD
