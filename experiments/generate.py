"""Continues prompts with the newest checkpoint of a run.

    python -m experiments.generate --checkpoint=RUN_DIR --prompt='def main('
    python -m experiments.generate --checkpoint=RUN_DIR --prompt_file=prompts.txt --format=json

A single prompt's text appears as it is generated. Several prompts run as one batch and are printed
in order once all are done; --format=json prints an object a line: prompt, text, tokens, stopped
(end, stop, repetition or length).
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from absl import flags

from experiments import cli, trained
from xmod_jax.config import MAX_SEED
from xmod_jax.errors import UserError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "file with a prompt in every line")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens",
    256,
    "tokens to generate at most; the caches hold as many",
    lower_bound=1,
    upper_bound=1 << 20,
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token", lower_bound=0)
_TOP_K = flags.DEFINE_integer("top_k", 0, "only the k likeliest tokens; 0 for all", lower_bound=0)
_TOP_P = flags.DEFINE_float("top_p", 1.0, "only the likeliest tokens of this probability together")
_SEED = flags.DEFINE_integer("seed", 0, "of the draws", lower_bound=0, upper_bound=MAX_SEED)
_STOP = flags.DEFINE_multi_string("stop", [], "end before this text; may be given several times")
_REPETITION = flags.DEFINE_integer(
    "stop_repetition", 0, "end when a piece comes this many times in a row; 0 for never"
)
_THRESHOLD = flags.DEFINE_enum(
    "threshold", "calibrated", ["calibrated", "paper"], "of the routers; paper: r >= 0.5"
)
_MAX_ROUTED = flags.DEFINE_integer(
    "max_routed", None, "most tokens a sparse layer may keep (default: no limit)", lower_bound=1
)
_VOCABULARY = flags.DEFINE_string(
    "vocabulary", None, "folder of GPT-2's vocabulary files (default: those that the run keeps)"
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "how to print")


def main() -> None:
    """Generates and prints."""
    prompts = _prompts()
    if not _CHECKPOINT.value:
        raise UserError("--checkpoint is missing: give a run directory")
    run = trained.find(_CHECKPOINT.value)
    # Only now: a mistake is told without loading what models need.
    from xmod_jax.inference.generate import Generator, Prompts, drawing_from
    from xmod_jax.inference.sampling import Sampling
    from xmod_jax.inference.text import Stop, Text, generate
    from xmod_jax.model import Threshold

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    stop = Stop(tuple(_STOP.value), _REPETITION.value)
    tokenizer = trained.tokenizer(run, _VOCABULARY.value)
    state = trained.load(run)
    model = state.model
    thresholds = model.thresholds() if _THRESHOLD.value == "paper" else state.thresholds
    # Training shows every document behind an end-of-text token, so a prompt starts behind one too.
    ids = [[tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
    model = drawing_from(model, tokenizer.vocab_size)
    generator = Generator(model, Threshold(thresholds), max_routed=_MAX_ROUTED.value)
    texts = [Text(tokenizer, stop) for _ in prompts]
    stream = _FORMAT.value == "text" and len(prompts) == 1
    pieces = generate(
        generator, Prompts.ragged(ids), texts, _MAX_TOKENS.value, sampling, _SEED.value
    )
    if stream:
        print(prompts[0], end="", flush=True)
    for new in pieces:
        if stream:
            print(new[0], end="", flush=True)
    if stream:
        print()
        return
    for prompt, text in zip(prompts, texts, strict=True):
        print(_entry(prompt, text))


def _prompts() -> list[str]:
    """The prompts of the flags, those of the file behind the others."""
    prompts = list(_PROMPT.value)
    if _PROMPT_FILE.value:
        path = pathlib.Path(_PROMPT_FILE.value)
        try:
            lines = path.read_text("utf-8-sig").splitlines()  # a byte order mark is no text
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text: {error}") from error
        prompts += [line for line in lines if line.strip()]
        if not prompts:
            raise UserError(f"{path}: no prompt in it: write one a line")
    if not prompts:
        raise UserError("no prompt: give --prompt=TEXT or --prompt_file=FILE")
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"a prompt is not UTF-8 text: {error}") from error
    return prompts


def _entry(prompt: str, text: Any) -> str:
    """A finished text as it is printed."""
    if _FORMAT.value == "json":
        fields = {
            "prompt": prompt,
            "text": text.text,
            "tokens": len(text.ids),
            "stopped": text.finished,
        }
        return json.dumps(fields, ensure_ascii=sys.stdout.encoding.lower() != "utf-8")
    return f"{prompt}{text.text}\n"


if __name__ == "__main__":
    cli.run(main)
