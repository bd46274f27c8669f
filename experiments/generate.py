"""Continues prompts with the newest checkpoint of a run.

    python -m experiments.generate --checkpoint=RUN_DIR --prompt='def main('
    python -m experiments.generate --checkpoint=RUN_DIR --prompt_file=prompts.txt --format=json

A single prompt's text appears as it is generated. Several prompts run in batches and are printed in
their order, batch by batch; --format=json prints an object a line: prompt, text, tokens, stopped
(end, stop, repetition or length).

What is drawn depends on --seed and on the prompt, not on its place or on the batch. A prompt that
is given again gets another sample: its second, its third and so on.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from experiments import cli, progress, trained
from xmod_jax.config import MAX_SEED
from xmod_jax.data.tokenizer import BYTES
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord

if TYPE_CHECKING:
    import numpy as np

    from xmod_jax.data.tokenizer import Tokenizer
    from xmod_jax.inference.generate import Generator
    from xmod_jax.inference.sampling import Sampling
    from xmod_jax.inference.text import Stop, Text

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times")
_PROMPT_FILE = flags.DEFINE_string(
    "prompt_file", None, "file with a prompt in every line; empty lines are left out"
)
_BATCH = flags.DEFINE_integer(
    "batch_size",
    None,
    "texts that run together at most (default: up to 64, as many as 1 GB of caches holds)",
    lower_bound=1,
)
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
    from xmod_jax.inference.generate import Generator, drawing_from
    from xmod_jax.inference.sampling import Sampling
    from xmod_jax.inference.text import Stop
    from xmod_jax.model import Threshold

    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    stop = Stop(tuple(_STOP.value), _REPETITION.value)
    tokenizer = trained.tokenizer(run, _VOCABULARY.value)
    state = trained.load(run)
    model = state.model
    thresholds = model.thresholds() if _THRESHOLD.value == "paper" else state.thresholds
    # Training shows every document behind an end-of-text token, so a prompt starts behind one too.
    ids = [[tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()] for prompt in prompts]
    rows = _rows(run, ids)
    doubts = _doubts(run, tokenizer, ids)
    progress.warn(doubts)
    model = drawing_from(model, tokenizer.vocab_size)
    generator = Generator(model, Threshold(thresholds), max_routed=_MAX_ROUTED.value)
    made = _Made(generator, tokenizer, sampling, stop, rows)
    if _FORMAT.value == "text" and len(prompts) == 1:
        _stream(made, prompts[0], ids[0])
        return
    _print_all(made, prompts, ids)
    progress.warn(doubts)  # what stood above the progress bar


class _Made(NamedTuple):
    """How texts are made; `rows` is the most of them that run together."""

    generator: Generator
    tokenizer: Tokenizer
    sampling: Sampling
    stop: Stop
    rows: int

    def texts(self, count: int) -> list[Text]:
        """As many empty ones."""
        from xmod_jax.inference.text import Text

        return [Text(self.tokenizer, self.stop) for _ in range(count)]

    def fill(
        self, ids: Sequence[list[int]], texts: Sequence[Text], name_B: np.ndarray
    ) -> Iterator[list[str]]:
        """Yields what is new of each text, token by token."""
        from xmod_jax.inference.text import generate_padded

        return generate_padded(
            self.generator,
            ids,
            texts,
            self.rows,
            _MAX_TOKENS.value,
            self.sampling,
            _SEED.value,
            name_B,
        )


def _stream(made: _Made, prompt: str, ids: list[int]) -> None:
    """One prompt, its text as it comes."""
    from xmod_jax.inference import sampling

    shown = prompt
    for (new,) in made.fill([ids], made.texts(1), sampling.names([prompt])):
        print(shown + new, end="", flush=True)
        shown = ""
    print()


def _print_all(made: _Made, prompts: Sequence[str], ids: Sequence[list[int]]) -> None:
    """Batch by batch, each printed as it ends; progress on stderr.

    Raises:
      UserError: a batch cannot be made; those before it are printed.
    """
    from xmod_jax.inference import sampling

    name_B = sampling.names(prompts)
    before = 0  # tokens of finished batches
    with progress.steps("generating", "tokens") as tell:
        for first in range(0, len(prompts), made.rows):
            part = slice(first, first + made.rows)
            texts = made.texts(len(ids[part]))
            later = (len(prompts) - first - len(texts)) * _MAX_TOKENS.value
            try:
                for _ in made.fill(ids[part], texts, name_B[part]):
                    done = sum(len(text.ids) for text in texts)
                    most = sum(
                        len(text.ids) if text.finished else _MAX_TOKENS.value for text in texts
                    )
                    tell(before + done, before + most + later)
            except UserError as error:
                raise UserError(f"prompts {first + 1} to {first + len(texts)}: {error}") from error
            before += sum(len(text.ids) for text in texts)
            for prompt, text in zip(prompts[part], texts, strict=True):
                print(_entry(prompt, text))
            sys.stdout.flush()  # nothing of it is lost if a later batch fails


def _rows(run: RunRecord, ids: Sequence[list[int]]) -> int:
    """How many texts run together.

    Raises:
      UserError: their caches are more than the memory.
    """
    from xmod_jax.inference import batches

    tokens = max(map(len, ids)) + _MAX_TOKENS.value
    rows = _BATCH.value or batches.rows_that_fit(run.config.model, tokens)
    together = min(rows, len(ids))
    need = together * batches.sequence_bytes(run.config.model, tokens)
    if need > batches.memory():
        raise UserError(
            f"{together} texts of {tokens} tokens need {need / 1e9:.3g} GB of caches, there are "
            f"{batches.memory() / 1e9:.3g} GB: lower --max_tokens"
            + (" or --batch_size" if _BATCH.value else "")
        )
    return rows


def _doubts(run: RunRecord, tokenizer: Tokenizer, ids: Sequence[list[int]]) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    trained_with = run.config.train.context_length
    beyond = sum(len(prompt) + _MAX_TOKENS.value > trained_with for prompt in ids)
    if beyond:
        found.append(
            f"{beyond} of {len(ids)} prompts with --max_tokens={_MAX_TOKENS.value} may go beyond "
            f"the {trained_with} tokens that the model was trained with, where it is not reliable"
        )
    if _TOP_K.value > tokenizer.vocab_size:
        found.append(f"--top_k={_TOP_K.value} keeps all {tokenizer.vocab_size} tokens")
    if _TEMPERATURE.value == 0 and (_TOP_K.value or _TOP_P.value < 1):
        found.append("--top_k and --top_p change nothing at --temperature=0")
    if _VOCABULARY.value and tokenizer.name == BYTES:
        found.append(f"--vocabulary is not used: the tokenizer of the run is {tokenizer.name}")
    return found


def _prompts() -> list[str]:
    """The prompts of the flags, those of the file behind the others."""
    prompts = list(_PROMPT.value)
    if _PROMPT_FILE.value is not None:
        prompts += _lines(pathlib.Path(_PROMPT_FILE.value))
    if not prompts:
        raise UserError("no prompt: give --prompt=TEXT or --prompt_file=FILE")
    for flag, texts in (("prompt", prompts), ("stop", _STOP.value)):
        for place, text in enumerate(texts, 1):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UserError(f"--{flag}, number {place}: not UTF-8 text: {error}") from error
    return prompts


def _lines(path: pathlib.Path) -> list[str]:
    """The prompts of a file.

    Raises:
      UserError: it is not text, or holds none.
    """
    try:
        text = path.read_text("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    if 5 * text.count("\0") > 2 * len(text):  # UTF-16 of most scripts has half of them
        raise UserError(f"{path}: not UTF-8 text: mostly null characters (UTF-16? save as UTF-8)")
    # Not `splitlines`, for which a line also ends at a form feed and at other characters of a text.
    prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise UserError(f"{path}: no prompt in it: write one a line")
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
