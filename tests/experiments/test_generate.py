"""`python -m experiments.generate`: text, JSON lines, and refusals in one line."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from tests.experiments.commands import run_command
from tests.training import small
from xmod_jax import records
from xmod_jax.training import loop

_run = functools.partial(run_command, "generate")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a trained X-MoD run."""
    directory = tmp_path_factory.mktemp("sweep") / "xmod_a1k4"
    config = dataclasses.replace(small.run(steps=2, eval_every=0), name="xmod_a1k4")
    with records.claim(directory):
        loop.train(config, directory, lambda progress: None)
    return directory


def test_a_batch_gives_what_its_prompts_give_alone(trained, tmp_path):
    common = (f"--checkpoint={trained}", "--max_tokens=20", "--temperature=0")
    alone = _run(*common, "--prompt=def main(")
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout.startswith("def main(") and len(alone.stdout) > len("def main(\n")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main(\n\nNaïve text that is longer than the other\n")
    batch = _run(*common, f"--prompt_file={prompts}", "--format=json", "--threshold=calibrated")
    assert batch.returncode == 0, batch.stderr
    first, second = map(json.loads, batch.stdout.splitlines())
    assert first["prompt"] + first["text"] == alone.stdout.removesuffix("\n")
    assert second["prompt"].startswith("Naïve")
    assert {first["stopped"], second["stopped"]} <= {"length", "end"}
    assert first["tokens"] <= 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "no prompt"),
        (("--prompt=a",), "--checkpoint is missing"),
        (("--prompt=a", "--checkpoint=nowhere"), "nowhere: not a run directory"),
        (("--prompt_file=nowhere",), "nowhere: No such file or directory"),
        (("--prompt=a", "--temperature=-1"), "temperature"),
        (("--prompt=a", "--top_p=0"), "top_p"),
        (("--prompt=a", "--stop="), "a stop string must not be empty"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, trained):
    wants_run = any("top_p" in argument or "stop" in argument for argument in arguments)
    refused = _run(*arguments, *[f"--checkpoint={trained}"] * wants_run)
    assert refused.returncode == 2
    assert message in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
