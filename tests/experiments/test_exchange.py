"""`python -m experiments.exchange`: a folder becomes a run that is used, and goes back."""

from __future__ import annotations

import functools
import json

import pytest

from tests.exchange import folders
from tests.experiments.commands import refusal, run_command
from xmod_jax.records import RunRecord, Status

_run = functools.partial(run_command, "exchange")


@pytest.mark.slow
def test_a_folder_becomes_a_run_and_a_folder_again(tmp_path):
    folders.make(tmp_path / "theirs", folders.CONFIG | {"vocab_size": 300}, shards=2)
    run, back = tmp_path / "run", tmp_path / "back"
    done = _run(f"--checkpoint={run}", f"--import_hf={tmp_path / 'theirs'}")
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has 300 token ids, --data=embedded 257" in done.stderr
    record = RunRecord.load(run)
    assert record.status is Status.UNFINISHED and record.config.start is not None
    assert record.config.start.directory == str(tmp_path / "theirs")

    said = run_command(
        "generate", f"--checkpoint={run}", "--prompt=a", "--max_tokens=5", "--format=json"
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["tokens"] <= 5

    done = _run(f"--checkpoint={run}", f"--export_hf={back}", "--max_shard_gb=1e-5")
    assert done.returncode == 0, done.stderr
    assert (back / "model.safetensors.index.json").exists()
    again = _run(f"--checkpoint={tmp_path / 'again'}", f"--import_hf={back}")
    assert again.returncode == 0, again.stderr
    start = RunRecord.load(tmp_path / "again").config.start
    assert start is not None and start.hash == record.config.start.hash
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "run", "back", "again"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--checkpoint is missing"),
        (("--checkpoint=x",), "give one of --import_hf=FOLDER and --export_hf=FOLDER"),
        (("--checkpoint=x", "--import_hf=nowhere"), "nowhere: no such folder"),
        (("--checkpoint=tests", "--import_hf=nowhere"), "tests is not empty"),
        (("--checkpoint=nowhere", "--export_hf=x"), "nowhere: not a run directory"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    assert message in refusal("exchange", *arguments)
