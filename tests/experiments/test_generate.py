"""`python -m experiments.generate`: text, JSON lines, and refusals in one line."""

from __future__ import annotations

import functools
import json
import random
import re
import shutil

import jax.numpy as jnp
import pytest

from tests.experiments.commands import refusal, run_command
from tests.experiments.many import run_many
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
    """Two prompts from a file with a byte order mark, greedily: the objects printed."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\ufeffdef main(\n\nNaïve text that is longer than the other\n")
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


FLAGS = [
    # arguments, status, and what the last line of stderr, or all of stdout, holds
    (("--prompt=a", "--top_p=0"), 2, "top_p must be above 0"),
    (("--prompt=a", "--top_p=1e-60"), 0, "a"),
    (("--prompt=a", "--temperature=1e-40"), 2, "temperature must be at least 0"),
    (("--prompt=a", "--temperature=1e300"), 2, "temperature must be at least 0"),
    (("--prompt=a", "--top_k=-1"), 2, "top_k"),
    (("--prompt=a", "--top_k=300"), 0, "--top_k=300 keeps all 257 tokens"),
    (("--prompt=a", "--temperature=0", "--top_k=3"), 0, "change nothing at --temperature=0"),
    (("--prompt=a", "--max_tokens=0"), 2, "max_tokens"),
    (("--prompt=a", "--batch_size=0"), 2, "batch_size"),
    (("--prompt=a", "--stop_repetition=1"), 2, "repetition must be"),
    (("--prompt=a", "--stop="), 2, "stop string must not be empty"),
    (("--prompt=a", "--stop=\udcff"), 2, "--stop, number 1: not UTF-8 text"),
    (("--prompt=a", "--prompt=b\udcff"), 2, "--prompt, number 2: not UTF-8 text"),
    (("--prompt=",), 0, ""),
    (("--prompt=abcdefgh", "--max_routed=1"), 2, "more than the 1 it may keep"),
    (("--prompt=a", "--vocabulary=nowhere"), 2, "nowhere/vocab.bpe: no such file"),
    (("--prompt=a longer prompt than the window",), 0, "1 of 1 prompts with --max_tokens=2 may go"),
    (("--prompt_file=FOLDER",), 2, "Is a directory"),
    (("--prompt_file=FOLDER/empty",), 2, "no prompt in it"),
    (("--prompt=a", "--prompt_file=FOLDER/blank"), 2, "no prompt in it"),
    (("--prompt_file=FOLDER/latin",), 2, "not UTF-8 text"),
    (("--prompt_file=FOLDER/null",), 0, "a\0b"),
    (("--prompt_file=FOLDER/utf16",), 2, "save as UTF-8"),
]


PROMPTS = ["a", "b", "a", "longer than sixteen tokens", "c"]
MOVED = [3, 4, 0, 1, 2]
FITTING = ["ab", "cd", "ef", "gh"]


@pytest.fixture(scope="module")
def said(saved, tmp_path_factory):
    """What command lines led to, by name, all in one process: those of the table by their place."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "empty").touch()
    (folder / "blank").write_text("\n  \n\t\n")
    (folder / "latin").write_bytes(b"caf\xe9\n")
    (folder / "null").write_bytes(b"a\0b")
    (folder / "utf16").write_bytes("one\ntwo\n".encode("utf-16-le"))
    (folder / "lines").write_bytes("one\x0ctwo\u2028three\r\n\r\nfour \x85".encode())
    (folder / "long").write_text("\n".join([*FITTING, "more tokens than a cache may keep"]))
    few, asked = ("--max_tokens=2",), ("--max_tokens=12", "--format=json", "--temperature=1")
    lines: dict[int | str, tuple[str, ...]] = {
        place: (*few, *arguments) for place, (arguments, _, _) in enumerate(FLAGS)
    }
    lines |= {
        "lines": (*few, "--format=json", "--prompt_file=FOLDER/lines"),
        "together": (*asked, *(f"--prompt={prompt}" for prompt in PROMPTS)),
        "moved": (*asked, "--batch_size=2", *(f"--prompt={PROMPTS[i]}" for i in MOVED)),
        "alone": (*asked, "--prompt=a"),
        "reseeded": (*asked, "--prompt=a", "--seed=1"),
        "full": (
            *few,
            "--format=json",
            "--batch_size=2",
            "--max_routed=8",
            "--prompt_file=FOLDER/long",
        ),
    }
    told = run_many(
        "generate",
        [
            [f"--checkpoint={saved}", *(part.replace("FOLDER", str(folder)) for part in line)]
            for line in lines.values()
        ],
    )
    return dict(zip(lines, told, strict=True))


def _fields(said, name):
    return [json.loads(line)[name] for line in said.stdout.split("\n")[:-1]]


def test_flags_and_files_of_any_kind_end_in_a_text_or_in_one_line(said):
    for place, (arguments, status, text) in enumerate(FLAGS):
        found = said[place]
        assert found.status == status, (arguments, found)
        assert "Traceback" not in found.stderr
        assert text in (found.last if status else found.stdout + found.stderr), (arguments, found)


def test_a_line_of_a_prompt_file_ends_at_a_line_break_alone(said):
    """Not at a form feed, nor at what else Unicode calls the end of a line."""
    assert _fields(said["lines"], "prompt") == ["one\x0ctwo\u2028three", "four \x85"]


def test_draws_follow_the_seed_and_the_prompt_not_its_place_or_batch(said):
    together = _fields(said["together"], "text")
    assert together[0] != together[2]  # a second sample of the same prompt
    assert _fields(said["moved"], "text") == [together[i] for i in MOVED]
    assert _fields(said["alone"], "text") == together[:1]
    assert _fields(said["reseeded"], "text") != together[:1]


def test_batches_are_printed_as_they_end_with_the_time_that_is_left(said):
    """The third batch cannot be made: its prompt fills a sparse layer's cache."""
    full = said["full"]
    assert full.status == 2 and "prompts 5 to 5: a sparse layer was given" in full.last
    assert _fields(full, "prompt") == FITTING
    assert re.search(r"generating +\d+%\|.*\| \d+/\d+ tokens, \S+ left", full.stderr)


def test_a_model_that_predicts_nothing_finite_gives_one_line_and_no_text(tmp_path):
    config = small.run()
    records.prepare(tmp_path, config)
    state = initial_state(config)
    # Finite itself, so that it can be read, but its logits are not.
    state.model.head[...] = jnp.full_like(state.model.head[...], 3e38)
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(state, {})
    arguments = [f"--checkpoint={tmp_path}", "--prompt=a", "--max_tokens=2"]
    for said in run_many("generate", [arguments, [*arguments, "--prompt=b", "--temperature=0"]]):
        assert said.status == 2 and "logits are not finite" in said.last
        assert said.stdout == ""


def test_a_vocabulary_is_looked_for_before_the_checkpoint_is_read(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    for path in (tmp_path / "run" / records.CHECKPOINTS).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    told = refusal(
        "generate", "--prompt=a", f"--checkpoint={tmp_path / 'run'}", "--vocabulary=nowhere"
    )
    assert "nowhere" in told and "vocab.bpe" in told
