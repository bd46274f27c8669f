"""Files that are packed, whatever their names say."""

from __future__ import annotations

import gzip
import pathlib

import pytest

from tests.data.test_documents import packed, read, refused

TEXT = "ünpacked\nlines\n"
# What `zstd --long=31` makes of a text that it does not know the length of.
LONG_31 = bytes.fromhex("28b52ffd00a8") + b"\x6d\0\0\x28line\n\x01\0\x83\x13\x0f\x08"


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_a_byte_order_mark_is_no_text(tmp_path, ending, unit):
    path = packed(tmp_path / f"a.txt{ending}", ("\ufeff" + TEXT).encode())
    assert "".join(read(path, unit=unit)).replace("\n", "") == TEXT.replace("\n", "")
    path = packed(
        tmp_path / f"a.jsonl{ending}", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}\n'.encode()
    )
    assert read(path) == ["a", "b"]


def test_a_mark_elsewhere_in_a_text_is_kept(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a\ufeffb\n")
    assert read(path) == ["a\ufeffb\n"]


@pytest.mark.parametrize("content", ["", "\n", "x", "\ufeff", "\ufeff\n", "\n\n\nx", "ab\ncd"])
def test_files_shorter_than_a_mark_are_read_in_full(tmp_path, content):
    path = tmp_path / "a.txt"
    path.write_text(content)
    text = content.removeprefix("\ufeff")
    assert read(path) == [text]
    assert (
        read(path, unit="line")
        == text.split("\n")[: -1 if text.endswith("\n") or not text else None]
    )


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_an_empty_packed_file_is_a_cut_one(tmp_path, ending):
    for name in ("a.txt", "a.jsonl"):
        path = tmp_path / f"{name}.{ending}"
        path.touch()
        assert "cut: a packed file is never empty" in refused(path)


def test_packed_files_are_unpacked_whatever_their_names(tmp_path):
    path = tmp_path / "a.txt"
    for ending in (".gz", ".zst"):
        path.write_bytes(packed(tmp_path / f"b{ending}", TEXT.encode()).read_bytes())
        assert read(path) == [TEXT]


def test_names_of_packed_files_that_are_not_are_refused(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_text(TEXT)
    assert "not packed by gzip, as its name says" in refused(path)
    path.write_bytes(gzip.compress(gzip.compress(TEXT.encode())))
    assert "packed by gzip for no use" in refused(path)


def test_a_window_of_zstd_that_is_too_large_is_named(tmp_path):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(LONG_31)
    assert "a window of 2048 MB (--long); only 128 MB are read" in refused(path)


def test_long_lines_in_zstd_are_read_whole(tmp_path):
    lines = ["x" * 3_000_000, "", "y" * 100_000, "z"]
    path = packed(tmp_path / "a.txt.zst", "\n".join(lines).encode())
    assert read(path, unit="line") == lines


def test_a_text_that_continues_behind_a_cut_is_never_taken_for_whole(tmp_path):
    whole = packed(tmp_path / "a.txt.gz", TEXT.encode() * 999).read_bytes()
    for size in (1, 2, 5, len(whole) - 1):
        path = pathlib.Path(tmp_path / "b.txt.gz")
        path.write_bytes(whole[:size])
        assert any(word in refused(path) for word in ("damaged or cut", "not packed"))
