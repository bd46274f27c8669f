"""Columns of parquet files: what holds text is read, the rest refused by its type."""

from __future__ import annotations

import pyarrow
import pytest
from pyarrow import parquet

from tests.data.test_documents import parquet_file, read, refused

TEXTS = ["one", "zwei ü", "one", "🙂" * 50]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(TEXTS).dictionary_encode(),
        pyarrow.array(TEXTS, pyarrow.large_string()).dictionary_encode(),
        pyarrow.array([text.encode() for text in TEXTS]).dictionary_encode(),
        pyarrow.array(TEXTS, pyarrow.string_view()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.binary_view()),
        pyarrow.array([text.encode() for text in TEXTS], pyarrow.large_binary()),
        pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(TEXTS)),
    ],
    ids=lambda column: str(column.type),
)
def test_every_type_that_holds_text_is_read(tmp_path, column):
    assert read(parquet_file(tmp_path / "a.parquet", column)) == TEXTS


def test_bytes_of_one_length_are_read_as_text(tmp_path):
    column = pyarrow.array([b"four", b"five"], pyarrow.binary(4))
    assert read(parquet_file(tmp_path / "a.parquet", column)) == ["four", "five"]


def test_nulls_of_dictionaries_and_of_null_columns_are_refused_or_left_out(tmp_path):
    path = parquet_file(tmp_path / "a.parquet", pyarrow.array(["a", None, "b"]).dictionary_encode())
    assert "row 2: no text (null); --skip_null leaves such rows out" in refused(path)
    assert read(path, skip_null=True) == ["a", "b"]
    path = parquet_file(tmp_path / "b.parquet", pyarrow.nulls(3))
    assert "row 1: no text (null)" in refused(path)
    assert read(path, skip_null=True) == []


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array([1, 2]),
        pyarrow.array([["a"], ["b"]]),
        pyarrow.array([{"a": "b"}]),
        pyarrow.array([1, 2]).dictionary_encode(),
        pyarrow.array([True, None]),
        pyarrow.ExtensionArray.from_storage(
            pyarrow.uuid(), pyarrow.array([b"0123456789abcdef"], pyarrow.binary(16))
        ),
    ],
    ids=lambda column: str(column.type),
)
def test_what_holds_no_text_is_refused_by_its_type(tmp_path, column):
    reason = refused(parquet_file(tmp_path / "a.parquet", column))
    assert "column 'text' is " in reason and ", not text" in reason


def test_two_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, ["text", "text", "body"]), path)
    assert "2 columns are called 'text'" in refused(path)
    assert read(path, field="body") == ["c"]


def test_names_that_are_no_utf8_are_opened(tmp_path):
    path = tmp_path / "\udcff.parquet"
    assert read(parquet_file(tmp_path / "a.parquet", pyarrow.array(TEXTS)).rename(path)) == TEXTS


def test_a_column_is_told_from_a_field_of_the_same_path(tmp_path):
    field = pyarrow.array([{"text": "wrong"}] * len(TEXTS))
    parquet.write_table(pyarrow.table({"meta": field, "meta.text": TEXTS}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", field="meta.text") == TEXTS
