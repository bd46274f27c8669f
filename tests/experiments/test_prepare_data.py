"""`python -m experiments.prepare_data`: refusals in one line, warnings at once and at the end."""

from __future__ import annotations

import pathlib

import pytest

from tests.data.corpora import corpus, prepared
from tests.experiments.commands import run_command


def _text(tmp_path: pathlib.Path) -> list[str]:
    corpus(tmp_path / "texts", files=1)
    return [f"--input={tmp_path}/texts"]


def _file(name: str, content: bytes):
    def made(tmp_path: pathlib.Path) -> list[str]:
        (tmp_path / name).write_bytes(content)
        return [f"--input={tmp_path / name}"]

    return made


def _flag(*flags: str):
    return lambda tmp_path: [*_text(tmp_path), *flags]


def _prepared(tmp_path: pathlib.Path) -> list[str]:
    return [f"--input={prepared(tmp_path)}"]


def _units_is_a_file(tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("{}")
    (tmp_path / "out" / "units").touch()
    return _text(tmp_path)


def _settings_are_binary(tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_bytes(b"\0\xff")
    (tmp_path / "out" / "manifest.json").write_bytes(b"\0\xff")
    return _text(tmp_path)


def _output_is_a_broken_link(tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "out").symlink_to(tmp_path / "gone" / "away")
    return _text(tmp_path)


def _lock_is_a_folder(tmp_path: pathlib.Path) -> list[str]:
    (tmp_path / "out" / ".lock").mkdir(parents=True)
    return _text(tmp_path)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_file("a.jsonl", b"\xef\xbb\xbf{}\n"), "line 1: no key 'text'"),
        (_file("a.jsonl.gz", b""), "cut: a packed file is never empty"),
        (_file("a.txt", "text\n".encode("utf-16") * 99), "text in UTF-16"),
        (_file("a.txt", b"PK\x03\x04\x14\0\0\0"), "a ZIP archive"),
        (_file("a.jsonl", b'{"text": "a", "text": "b"}\n'), "stands there twice"),
        (_file("a.txt", b""), "no document to train on"),
        (_file("a.txt", b"\xef\xbb\xbf"), "no document to train on"),
        (_file("a.parquet", b"PAR1\x15\0"), "cannot be read as parquet"),
        (_prepared, "is prepared already: train on it with --data="),
        (_units_is_a_file, "units"),
        (_settings_are_binary, "settings.json: not a JSON object"),
        (_output_is_a_broken_link, "out: "),
        (_lock_is_a_folder, ".lock"),
        (_flag("--source=tfds"), "TFDS"),
        (_flag("--source=parquet"), "no parquet files in it"),
        (_flag("--heldout_share=nan"), "--heldout_share=nan is not a finite number"),
        (_flag("--workers=0"), "workers"),
        (_flag("--tokenizer=gpt2", "--vocabulary=/nowhere"), "/nowhere/vocab.bpe: no such file"),
        (_flag("--documents=file", "--source=jsonl"), "not JSON"),
        (_flag("--input="), "--input= is empty"),
        (_flag("--input=/dev/null"), "can be read but once"),
        (_flag("--output=out\udcff"), "a name that is not UTF-8"),
        (_flag("--output=/dev/null/out"), "/dev/null"),
        (_flag("--output=" + "a" * 300), "File name too long"),
        (_flag("--verify"), "out: not prepared"),
    ],
)
def test_what_a_user_gives_never_ends_in_a_traceback(tmp_path, make, reason):
    arguments = [f"--output={tmp_path / 'out'}", "--tokenizer=bytes", *make(tmp_path)]
    done = run_command("prepare_data", *arguments)
    assert done.returncode == 2, done.stderr
    *warnings, error = done.stderr.strip().splitlines()
    assert reason in error and error.startswith("error: ")
    assert all(line.startswith("warning: ") for line in warnings)


def test_warnings_are_counted_and_repeated_at_the_end(tmp_path):
    corpus(tmp_path / "texts", files=1)
    (tmp_path / "texts" / "README.md").write_text("card")
    (tmp_path / "texts" / "1.txt").write_bytes(b"a stray \0 in a line\n\xff\n")
    flags = ["--documents=line", "--replace_invalid", "--field=body", "--tokenizer=bytes"]
    flags.append("--heldout_share=0.2")
    done = run_command(
        "prepare_data", f"--input={tmp_path}/texts", f"--output={tmp_path}/out", *flags
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    count = lines.index("warnings: 4")
    assert lines[:count] == lines[count + 1 : -2]
    for line, told in zip(
        lines[count + 1 :],
        ("README.md", "--field=body does nothing", "hold NUL", "1 of 402 documents were mended"),
        strict=True,
    ):
        assert line.startswith("warning: ") and told in line


def test_a_large_file_that_is_one_document_is_told(tmp_path):
    (tmp_path / "book.txt").write_text("A line of a book.\n" * 100_000)
    flags = [f"--input={tmp_path}/book.txt", f"--output={tmp_path}/out", "--tokenizer=bytes"]
    done = run_command("prepare_data", *flags)
    assert "1 of 1 files are one document each and larger than 1 MB" in done.stderr
