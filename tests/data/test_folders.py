"""Which files of the inputs are data: each once, of one kind, and what is left out is told."""

from __future__ import annotations

import gzip
import json
import os
import pathlib

import pyarrow
import pytest

from tests.data.test_documents import parquet_file
from xmod_jax.data import documents
from xmod_jax.errors import UserError

LINES = '{"text": "a"}\n{"text": "b"}\n'
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def made(folder: pathlib.Path, *names: str) -> pathlib.Path:
    """Files with what their names say."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet_file(path, pyarrow.array(["a", "b"]))
        elif name.endswith(".png"):
            path.write_bytes(PNG)
        else:
            path.write_text(LINES if name.endswith((".jsonl", ".json")) else f"text of {name}")
    return folder


def found(*inputs: object, kind: str | None = None) -> tuple[dict[str, str], list[str]]:
    """Names and kinds of the sources, and the warnings."""
    warnings: list[str] = []
    sources = documents.find([str(given) for given in inputs], kind, warnings.append)
    return {pathlib.Path(s.path).name: s.kind for s in sources}, warnings


def refused(*inputs: object, kind: str | None = None) -> str:
    with pytest.raises(UserError) as error:
        found(*inputs, kind=kind)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("data", ["train.parquet", "train.jsonl", "train.txt"])
def test_a_card_beside_the_data_is_left_out_and_named(tmp_path, data):
    folder = made(tmp_path, data, "README.md", "LICENSE", "dataset_infos.json")
    names, (warning,) = found(folder)
    assert list(names) == [data]
    assert "3 files left out" in warning
    assert all(name in warning for name in ("README.md", "LICENSE", "dataset_infos.json"))
    names, _ = found(folder / "README.md")
    assert names == {"README.md": "text"}


def test_a_folder_of_nothing_but_cards_is_read(tmp_path):
    assert found(made(tmp_path, "README.md", "LICENSE"))[0].keys() == {"README.md", "LICENSE"}


def test_data_of_several_kinds_is_refused_until_one_is_chosen(tmp_path):
    folder = made(tmp_path, "a.jsonl", "b.txt", "c.parquet")
    reason = refused(folder)
    assert "data of several kinds" in reason and "choose one by --source" in reason
    assert all(name in reason for name in ("a.jsonl", "b.txt", "c.parquet"))
    for kind, name in (("jsonl", "a.jsonl"), ("text", "b.txt"), ("parquet", "c.parquet")):
        names, (warning,) = found(folder, kind=kind)
        assert names == {name: kind} and "2 files left out" in warning


def test_what_is_not_read_is_refused_in_a_folder_and_left_out_of_a_chosen_kind(tmp_path):
    folder = made(tmp_path, "a.parquet", "thumbnail.png")
    assert "thumbnail.png: a PNG image" in refused(folder) and "--source" in refused(folder)
    names, (warning,) = found(folder, kind="parquet")
    assert names == {"a.parquet": "parquet"} and "thumbnail.png" in warning


@pytest.mark.parametrize("name", ["b.parquet", "b.jsonl", "b.txt"])
def test_data_that_is_not_what_its_name_says_is_never_left_out(tmp_path, name):
    kind = {"b.parquet": "parquet", "b.jsonl": "jsonl", "b.txt": "text"}[name]
    folder = made(tmp_path, f"a.{name[2:]}")
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    for chosen in (None, kind):
        assert f"{name}" in refused(folder, kind=chosen)
        assert "a Git LFS pointer" in refused(folder, kind=chosen)


def test_what_programs_leave_is_no_data(tmp_path):
    left = ("_temporary/0.parquet", "_delta_log/0.json", "__pycache__/a.png")
    folder = made(tmp_path, "part-0.parquet", *left)
    for name in ("_SUCCESS", "_metadata", "_common_metadata", "_started_12", "_committed_12"):
        (folder / name).write_bytes(b"PAR1" if "metadata" in name else b"")
    assert found(folder) == ({"part-0.parquet": "parquet"}, [])
    lines = made(tmp_path / "lines", "part-0.json")
    (lines / "_SUCCESS").touch()
    assert found(lines) == ({"part-0.json": "jsonl"}, [])


def test_an_underscore_hides_parquet_but_no_text(tmp_path):
    names, (warning,) = found(made(tmp_path / "p", "a.parquet", "_b.parquet"))
    assert list(names) == ["a.parquet"] and "_b.parquet" in warning
    assert found(made(tmp_path / "t", "a.py", "__init__.py"))[0].keys() == {"a.py", "__init__.py"}


def test_a_file_is_one_file_by_whatever_name(tmp_path, monkeypatch):
    folder = made(tmp_path / "texts", "a.txt", "b.txt")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    os.link(folder / "a.txt", folder / "hard.txt")
    (tmp_path / "again").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    given = [folder, folder / "b.txt", "./texts/../texts/b.txt", "again/b.txt", "again"]
    names, (warning,) = found(*given)
    assert sorted(names) == ["a.txt", "b.txt"]
    assert warning.startswith("9 given more than once and read once")
    assert "link.txt is" in warning or "hard.txt is" in warning


def test_parquet_is_read_whatever_its_name(tmp_path):
    path = made(tmp_path, "a.parquet") / "a.parquet"
    path = path.rename(tmp_path / "a.txt")
    assert found(path)[0] == {"a.txt": "parquet"}
    assert "parquet, not plain text: leave --source out" in refused(path, kind="text")


@pytest.mark.parametrize("content", ["", "text", "<!DOCTYPE html><html></html>"])
def test_what_is_called_parquet_and_is_none_is_refused(tmp_path, content):
    path = tmp_path / "a.parquet"
    path.write_text(content)
    assert "not parquet, as its name says" in refused(path)


def test_a_pipe_is_refused_without_being_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "can be read but once" in refused(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "doubt"),
    [
        ("a.csv", "text,label\nx,1\n", "1 file .csv is read as plain text"),
        ("a.txt", json.dumps({"text": "x"}) + "\n", "looks like JSON lines"),
        ("a.txt", "one\rtwo\r", "carriage returns for line ends"),
        ("a.txt", "\n<!DOCTYPE html>\n<html><body>Not found</body></html>", "like a web page"),
    ],
)
def test_text_that_is_perhaps_not_meant_so_is_read_with_a_warning(tmp_path, name, content, doubt):
    (tmp_path / name).write_text(content)
    names, (warning,) = found(tmp_path)
    assert names == {name: "text"} and doubt in warning and name in warning
    assert found(tmp_path, kind="text")[1] == []


def test_a_file_beside_what_it_is_packed_from_is_told(tmp_path):
    folder = made(tmp_path, "a.jsonl", "b.jsonl")
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    names, (warning,) = found(folder)
    assert names.keys() == {"a.jsonl", "a.jsonl.gz", "b.jsonl"}
    assert "perhaps the same data twice" in warning and "a.jsonl.gz" in warning
    assert "b.jsonl" not in warning


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("train-0.jsonl", "test-0.jsonl", "validation-0.jsonl"), "2 files named"),
        (("train/0.jsonl", "dev/0.jsonl"), "1 file named"),
        (("test-0.jsonl", "tested.jsonl"), ""),
        (("training.jsonl", "latest.jsonl"), ""),
    ],
)
def test_splits_to_measure_on_beside_those_to_train_on_are_told(tmp_path, names, told):
    _, warnings = found(made(tmp_path / "data", *names))
    assert [told in warning for warning in warnings] == [True] * bool(told)


def test_texts_of_several_endings_are_counted(tmp_path):
    _, (warning,) = found(made(tmp_path, "a.txt", "b.txt", "c.log"))
    assert "2 .txt, 1 .log" in warning


def test_a_split_named_twice_is_read_once(monkeypatch):
    monkeypatch.setattr(documents, "_tfds_source", lambda name, split: range(3))
    names, (warning,) = found("set", "set[train]", "set[test]", kind="tfds")
    assert list(names) == ["set[train]", "set[test]"] and "set[train]" in warning
