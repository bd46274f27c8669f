"""Runs made of an imported checkpoint: what comes along with the weights, and goes out again."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import pytest

from tests.exchange import folders
from tests.training import small
from xmod_jax import records
from xmod_jax.config import Compute, DataConfig, RunConfig, Start
from xmod_jax.data.tokenizer import ByteTokenizer
from xmod_jax.errors import UserError
from xmod_jax.exchange import imported, tokenizers
from xmod_jax.records import RunRecord
from xmod_jax.training import start

CONFIG = folders.CONFIG | {"vocab_size": 300, "bos_token_id": 280, "eos_token_id": [281, 282]}
FILES = {
    "tokenizer.json": b'{"version":  "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b'{"eos_token_id": [281, 282], "temperature": 0.6}',
}


def _make_run(folder: pathlib.Path, directory: pathlib.Path) -> imported.Imported:
    return imported.make_run(folder, directory, DataConfig(), Compute.FLOAT32)


def _started(directory: pathlib.Path, source: pathlib.Path) -> RunRecord:
    """A run that started from another one, as far as its record says."""
    began = Start(str(source), RunRecord.load(source).hash)
    return _recorded(directory, dataclasses.replace(small.run("dense"), start=began))


def _recorded(directory: pathlib.Path, run: RunConfig) -> RunRecord:
    records.prepare(directory, run)
    return RunRecord.load(directory)


def _accompanying(run: RunRecord) -> imported.Accompanying:
    return imported.accompanying(run, ByteTokenizer())


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Hugging Face folder with a tokenizer, and notes and directory of the run made of it."""
    above = tmp_path_factory.mktemp("imported")
    folders.make(above / "theirs", CONFIG)
    for name, content in FILES.items():
        (above / "theirs" / name).write_bytes(content)
    notes = _make_run(above / "theirs", above / "run").notes
    return above / "theirs", above / "run", notes


def test_ids_and_files_of_the_source_stay_with_an_imported_run(theirs, tmp_path):
    folder, directory, notes = theirs
    assert len(notes) == 2
    assert "own tokenizer (chat_template.jinja) is not read, only kept" in notes[0]
    assert "the checkpoint has 300 token ids, --data=embedded 257" in notes[1]
    shutil.copytree(directory, tmp_path / "moved")
    beside, told = _accompanying(RunRecord.load(tmp_path / "moved"))
    assert (beside.config["bos_token_id"], beside.config["eos_token_id"]) == (280, [281, 282])
    assert beside.files == FILES | {"config.json": (folder / "config.json").read_bytes()}
    assert told == ()


def test_a_run_that_started_from_an_import_finds_them_over_any_number_of_runs(theirs, tmp_path):
    _, directory, _ = theirs
    _started(tmp_path / "first", directory)
    second = _started(tmp_path / "second", tmp_path / "first")
    beside, (note,) = _accompanying(second)
    assert beside.config["eos_token_id"] == [281, 282] and FILES.items() <= beside.files.items()
    assert f"those of {directory}, where the run started; it was trained on tokens of bytes" in note


def test_a_run_takes_along_what_belongs_to_the_weights_it_starts_from(theirs, tmp_path):
    _, directory, _ = theirs
    shutil.copytree(directory, tmp_path / "source")
    run = _started(tmp_path / "run", tmp_path / "source")
    start.carry(run.config, run.directory)
    shutil.rmtree(tmp_path / "source")
    beside, (note,) = _accompanying(run)
    assert beside.config["eos_token_id"] == [281, 282] and FILES.items() <= beside.files.items()
    assert f"those of {tmp_path / 'source'}, where the run started" in note


def test_a_start_that_is_gone_or_another_run_is_told_and_our_own_ids_are_written(theirs, tmp_path):
    _, directory, _ = theirs
    shutil.copytree(directory, tmp_path / "source")
    run = _started(tmp_path / "run", tmp_path / "source")
    stored = json.loads((tmp_path / "source/config.json").read_bytes())
    (tmp_path / "source/config.json").write_text(json.dumps(stored | {"hash": "other"}))
    for _ in range(2):
        beside, (note,) = _accompanying(run)
        assert "source, where it started, is not there any more" in note
        assert beside.config == {"bos_token_id": 256, "eos_token_id": 256}
        shutil.rmtree(tmp_path / "source", ignore_errors=True)


def test_an_import_that_kept_nothing_gets_no_ids_at_all(theirs, tmp_path):
    shutil.copytree(theirs[1], tmp_path / "old")
    shutil.rmtree(tmp_path / "old" / records.SOURCE)
    beside, (note,) = _accompanying(RunRecord.load(tmp_path / "old"))
    assert (beside.config, beside.files) == ({}, {})
    assert "old kept neither special ids nor tokenizer files" in note


def test_a_run_of_our_own_gets_the_ids_and_files_of_its_tokenizer(tmp_path):
    run = _recorded(tmp_path / "run", small.run("dense"))
    beside, notes = _accompanying(run)
    assert notes == () and beside.config == {"bos_token_id": 256, "eos_token_id": 256}
    assert json.loads(beside.files["generation_config.json"]) == beside.config
    own = tokenizers.own_files(ByteTokenizer(), 16)
    assert own.items() <= beside.files.items() and "tokenizer.json" in own


def test_what_was_kept_and_is_damaged_is_one_line(theirs, tmp_path):
    shutil.copytree(theirs[1], tmp_path / "run")
    (tmp_path / "run" / records.SOURCE / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"huggingface/config\.json: not a JSON object"):
        _accompanying(RunRecord.load(tmp_path / "run"))


def test_a_mistake_leaves_no_run_directory(theirs, tmp_path):
    folder, directory, _ = theirs
    shutil.copytree(folder, tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json: not a JSON object"):
        _make_run(tmp_path / "theirs", tmp_path / "run")
    (tmp_path / "theirs/config.json").write_text(json.dumps(CONFIG | {"vocab_size": 200}))
    with pytest.raises(UserError, match=r"--data=embedded has 257 token ids, .* only 200"):
        _make_run(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(UserError, match="is not empty"):
        _make_run(folder, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
