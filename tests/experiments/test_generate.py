"""`python -m experiments.generate`: text, JSON lines, and refusals in one line."""

from __future__ import annotations

import functools
import json
import random
import shutil

import pytest

from tests.experiments.commands import refusal, run_command
from tests.training import small
from xmod_jax import records
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import initial_state

COMMON = ("--max_tokens=20", "--temperature=0")
_run = functools.partial(run_command, "generate")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of an X-MoD run with a checkpoint of its start."""
    directory = tmp_path_factory.mktemp("sweep") / "xmod_a1k4"
    config = small.run()
    records.prepare(directory, config)
    with Checkpoints(directory, config) as checkpoints:
        checkpoints.save(initial_state(config), {})
    return directory


def _batch(saved, tmp_path):
    """Two prompts from a file, greedily: the objects printed."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main(\n\nNaïve text that is longer than the other\n")
    done = _run(*COMMON, f"--checkpoint={saved}", f"--prompt_file={prompts}", "--format=json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_batch_from_a_file_is_an_object_a_line(saved, tmp_path):
    first, second = _batch(saved, tmp_path)
    assert set(first) == {"prompt", "text", "tokens", "stopped"}
    assert (first["prompt"], second["prompt"][:6]) == ("def main(", "Naïve ")
    assert first["stopped"] in ("length", "end") and first["tokens"] <= 20


@pytest.mark.slow
def test_a_batch_gives_what_its_prompts_give_alone(saved, tmp_path):
    alone = _run(*COMMON, f"--checkpoint={saved}", "--prompt=def main(", "--threshold=calibrated")
    assert alone.returncode == 0, alone.stderr
    first, _ = _batch(saved, tmp_path)
    assert alone.stdout == first["prompt"] + first["text"] + "\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "no prompt"),
        (("--prompt=a",), "--checkpoint is missing"),
        (("--prompt=a", "--checkpoint=nowhere"), "nowhere: not a run directory"),
        (("--prompt_file=nowhere",), "nowhere: No such file or directory"),
        (("--prompt=a", "--temperature=-1"), "temperature"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    assert message in refusal("generate", *arguments)


@pytest.mark.parametrize(
    ("where", "noise"),
    [("", False), ("state/d", True), ("state/ocdbt.process_0/d", False), ("meta/metadata", True)],
)
def test_a_damaged_checkpoint_is_one_line_and_stays(saved, tmp_path, where, noise):
    directory = tmp_path / "run"
    shutil.copytree(saved, directory)
    place = directory / records.CHECKPOINTS / "0" / where
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            damaged = (
                random.Random(0).randbytes(len(content)) if noise else content[: len(content) // 3]
            )
            path.write_bytes(damaged)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    told = refusal("generate", "--prompt=a", f"--checkpoint={directory}")
    assert "no checkpoint can be read" in told and str(directory) in told
    assert before == {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
