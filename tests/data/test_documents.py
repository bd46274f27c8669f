"""Documents of files: what is read, and what is refused by file and place."""

from __future__ import annotations

import gzip
import json
import pathlib

import pyarrow
import pytest
from pyarrow import parquet

from xmod_jax.data import documents
from xmod_jax.data.documents import Documents, Reading, find
from xmod_jax.errors import UserError

TEXTS = ["one", "", "zwei ü", "drei\nvier", "\x00", "🙂" * 50]


def read(path: pathlib.Path, kind: str | None = None, **reading) -> list[str]:
    (source,) = find([str(path)], kind)
    return list(Documents(source, Reading(**reading)))


def refused(path: pathlib.Path, **reading) -> str:
    with pytest.raises(UserError) as error:
        read(path, **reading)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    return message


def packed(path: pathlib.Path, content: bytes) -> pathlib.Path:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    if path.suffix == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        content = sink.getvalue().to_pybytes()
    path.write_bytes(content)
    return path


def parquet_file(path: pathlib.Path, column, name: str = "text") -> pathlib.Path:
    table = pyarrow.table({"id": list(range(len(column))), name: column})
    parquet.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines_and_text_are_read_packed_or_not(tmp_path, ending):
    lines = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS)
    assert read(packed(tmp_path / f"a.jsonl{ending}", lines.encode())) == TEXTS
    text = "a\r\nb\n\n \nlast ü".encode()
    path = packed(tmp_path / f"a.txt{ending}", text)
    assert read(path) == [text.decode()]
    assert read(path, unit="line") == ["a", "b", "", " ", "last ü"]
    assert read(path, unit="paragraph") == ["a\nb", "last ü"]


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet_is_read_by_its_text_column(tmp_path, kind):
    path = parquet_file(tmp_path / "a.parquet", pyarrow.array(TEXTS, kind))
    assert read(path) == TEXTS
    path = parquet_file(tmp_path / "b.parquet", pyarrow.array(TEXTS, kind), "content")
    assert "no column 'text'; it has id, content; choose one with --field" in refused(path)
    assert read(path, field="content") == TEXTS


def test_a_folder_gives_its_files_by_name_and_no_hidden_ones(tmp_path):
    for name in ("b.txt", "a/c.txt", ".hidden", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find([str(tmp_path)], None)
    names = [pathlib.Path(source.path).name for source in found]
    assert names == ["c.txt", "b.txt", "d.md"]
    assert {source.kind for source in found} == {"text"}


def test_missing_and_empty_inputs_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        find([str(tmp_path / "none")], None)
    with pytest.raises(UserError, match="no data files in it"):
        find([str(tmp_path)], None)


def test_nulls_are_refused_or_counted(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", pyarrow.array(["one", None, "two"]))
    assert "row 2: no text (null); --skip_null leaves such rows out" in refused(path)
    counting = Documents(find([str(path)], None)[0], Reading(skip_null=True))
    assert list(counting) == ["one", "two"] and counting.null == 1
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": null}\n')
    assert "line 3: no text (null)" in refused(lines)


def test_invalid_utf8_is_refused_or_replaced_and_counted(tmp_path):
    binary = pyarrow.array([b"ok", b"b\xffd"], pyarrow.binary())
    path = parquet_file(tmp_path / "a.parquet", binary)
    assert "row 2: not UTF-8" in refused(path)
    string = pyarrow.Array.from_buffers(pyarrow.string(), 2, binary.buffers())
    path = parquet_file(tmp_path / "b.parquet", string)
    assert "row 2: not UTF-8" in refused(path)
    assert read(path, replace_invalid=True) == ["ok", "b\ufffdd"]
    text = tmp_path / "a.txt"
    text.write_bytes(b"fine\nbad \xe2\x82\n")
    assert "line 2: not UTF-8" in refused(text, unit="line")
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "\\ud800"}\n')
    assert "line 1: not UTF-8" in refused(lines)
    mended = Documents(find([str(lines)], None)[0], Reading(replace_invalid=True))
    assert "\ufffd" in next(iter(mended)) and mended.invalid == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "cut', "line 1: not JSON"),
        ('["text"]', "line 1: no key 'text'; choose one with --field"),
        ('{"body": "x"}', "line 1: no key 'text'"),
        ('{"text": 3}', "line 1: 'text' is not text"),
    ],
)
def test_wrong_json_lines_are_refused(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    assert reason in refused(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet"])
def test_cut_and_empty_files_are_refused_by_name(tmp_path, name):
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet_file(path, pyarrow.array(TEXTS * 100))
    else:
        packed(path, "".join(f"line {i}\n" for i in range(9999)).encode())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut" in refused(path, unit="line") or name.endswith("parquet")
    path.write_bytes(b"")
    if name.endswith("parquet"):
        refused(path)


def test_a_document_larger_than_memory_allows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_DOCUMENT", 100)
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 300 + "\n")
    for unit in documents.UNITS:
        assert "split it: see --documents" in refused(path, unit=unit)


def test_the_share_that_has_been_read_ends_at_one(tmp_path):
    path = packed(tmp_path / "a.txt.gz", b"line\n" * 50_000)
    reading = Documents(find([str(path)], None)[0], Reading(unit="line"))
    shares = [reading.done for _ in reading]
    assert shares == sorted(shares) and reading.done == 1.0


def test_a_folder_is_read_through_its_links(tmp_path):
    names = ("texts/a.txt", "elsewhere/b.txt", "c.txt", "elsewhere/.hidden.txt", "texts/.c/d.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    texts = tmp_path / "texts"
    (texts / "link.txt").symlink_to(tmp_path / "c.txt")
    (texts / "more").symlink_to(tmp_path / "elsewhere")
    found = [pathlib.Path(source.path).relative_to(texts) for source in find([str(texts)], None)]
    assert list(map(str, found)) == ["a.txt", "link.txt", "more/b.txt"]


def test_links_that_lead_nowhere_or_back_are_refused(tmp_path):
    for name, target, why in (
        ("broken.txt", tmp_path / "gone", "broken link"),
        ("round", tmp_path / "texts", "a folder that it is in"),
    ):
        texts = tmp_path / "texts"
        texts.mkdir(exist_ok=True)
        (texts / "a.txt").write_text("a")
        (texts / name).symlink_to(target)
        with pytest.raises(UserError, match=why) as refusal:
            find([str(texts)], None)
        assert name in str(refusal.value)
        (texts / name).unlink()


def test_a_value_nested_too_deep_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ' + "[" * 100_000 + "\n")
    assert "line 1: not JSON" in refused(path)


def test_a_key_that_a_line_names_twice_is_refused_where_it_is_the_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "id": 2, "text": "a", "meta": {"text": 1, "text": 2}}\n')
    assert read(path) == ["a"]
    path.write_text('{"text": "a"}\n{"text": "b", "te\\u0078t": "c"}\n')
    assert "line 2: 'text' stands there twice" in refused(path)


def test_documents_that_hold_nul_characters_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\u0000"}\n{"text": "b"}\n')
    reading = Documents(find([str(path)], None)[0], Reading())
    assert list(reading) == ["a\0", "b"] and reading.nul == 1


def test_the_place_of_the_newest_document_is_known(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", pyarrow.array(["one", None, "two"]))
    reading = Documents(find([str(path)], None)[0], Reading(skip_null=True))
    assert [(text, reading.place) for text in reading] == [("one", "row 1"), ("two", "row 3")]


def test_text_of_another_encoding_is_refused_with_the_way_to_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Une ligne en français, déjà vue.\n" * 99, encoding="latin-1")
    assert "make it UTF-8 if it is of another encoding" in refused(path)


def test_byte_order_marks_of_joined_files_are_no_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\n\ntwo\n".encode("utf-8-sig") + "\nthree\n".encode("utf-8-sig"))
    assert read(path, unit="line") == ["one", "", "two", "", "three"]
    assert read(path, unit="paragraph") == ["one", "two", "three"]
