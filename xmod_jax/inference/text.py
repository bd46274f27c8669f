"""Text from generated tokens as they come: whole characters only, and where to stop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from xmod_jax.data.tokenizer import Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.inference.batches import padded_length, padded_rows
from xmod_jax.inference.generate import Generator, Prompts
from xmod_jax.inference.sampling import Sampling

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to, and an invalid byte
_LONGEST_CYCLE = 64  # tokens of a piece whose repetition is noticed


@dataclasses.dataclass(frozen=True)
class Stop:
    """When a text ends before its last token.

    Attributes:
      strings: it ends before the first of these; one string is one stop string.
      repetition: it ends when its last tokens are one piece, up to 64 tokens long, this many times
        in a row; 0 for never.
    """

    strings: tuple[str, ...] | str = ()
    repetition: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.strings, str):
            object.__setattr__(self, "strings", (self.strings,))
        if not all(self.strings):
            raise UserError("a stop string must not be empty")
        if self.repetition < 0 or self.repetition == 1:
            raise UserError(f"repetition must be 0 or at least 2, got {self.repetition}")


class Text:
    """One generated text, token by token.

    Attributes:
      tokenizer: makes text of its tokens.
      ids: its tokens so far, without the end-of-text token.
      text: its text so far; what may still become a stop string or another character is held back.
      finished: why it ended: ``"end"``, ``"stop"``, ``"repetition"``, ``"length"``; None before.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Stop | None = None) -> None:
        self.tokenizer = tokenizer
        self._stop = stop or Stop()
        self._waiting: list[int] = []  # ids whose text is not whole yet
        self._taken = 0  # characters of their text that were taken already
        self._held = ""  # text that may be the start of a stop string
        self.ids: list[int] = []
        self.text = ""
        self.finished: str | None = None

    def add(self, token: int) -> str:
        """Takes the next token; returns the text that is sure now."""
        if self.finished:
            return ""
        if token == self.tokenizer.end_of_text:
            return self.finish("end")
        self.ids.append(token)
        self._waiting.append(token)
        piece = self._release(self._whole_text())
        if not self.finished and self._repeats():
            return piece + self.finish("repetition")
        return piece

    def finish(self, reason: str) -> str:
        """Ends the text unless it has ended; returns what was held back."""
        if self.finished:
            return ""
        rest = self.tokenizer.decode(self._waiting)[self._taken :]
        piece = self._release(rest)
        if not self.finished:
            self.finished = reason
            self.text += self._held
            piece += self._held
        return piece

    def _whole_text(self) -> str:
        """New text that no later token can change."""
        text = self.tokenizer.decode(self._waiting)
        whole = text.rstrip(_REPLACEMENT)
        piece = whole[self._taken :]
        if len(whole) == len(text):
            self._waiting, self._taken = [], 0
        else:
            self._taken = max(self._taken, len(whole))
        return piece

    def _release(self, piece: str) -> str:
        """What of the held and the new text cannot belong to a stop string; stops at one."""
        text = self._held + piece
        found = [at for at in map(text.find, self._stop.strings) if at >= 0]
        if found:
            text, self._held, self.finished = text[: min(found)], "", "stop"
        else:
            held = max((_overlap(text, string) for string in self._stop.strings), default=0)
            cut = len(text) - held
            text, self._held = text[:cut], text[cut:]
        self.text += text
        return text

    def _repeats(self) -> bool:
        times, ids = self._stop.repetition, self.ids
        if not times:
            return False
        longest = min(_LONGEST_CYCLE, len(ids) // times)
        return any(ids[-n * times : -n] == ids[-n * (times - 1) :] for n in range(1, longest + 1))


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that is a start of `string`, shorter than all of it."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)


def generate(
    generator: Generator,
    prompts: Prompts,
    texts: Sequence[Text],
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    name_B: np.ndarray | None = None,
) -> Iterator[list[str]]:
    """Fills one text for every prompt; yields what is new of each, token by token.

    The last yield is what the texts held back. Raises as `Generator.stream`.
    """
    stream = generator.stream(prompts, max_tokens, sampling, seed, name_B)
    stopped_B: np.ndarray | None = None
    while stopped_B is None or not stopped_B.all():
        try:
            token_B = next(stream) if stopped_B is None else stream.send(stopped_B)
        except StopIteration:
            break
        yield [text.add(int(token)) for text, token in zip(texts, token_B, strict=True)]
        stopped_B = np.array([text.finished is not None for text in texts])
    yield [text.finish("length") for text in texts]


def generate_padded(
    generator: Generator,
    ids: Sequence[Sequence[int]],
    texts: Sequence[Text],
    most_rows: int,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    name_B: np.ndarray | None = None,
) -> Iterator[list[str]]:
    """`generate` in one of a few shapes, so that batches of many prompts share their programs.

    Args:
      generator: as there, and so are the arguments that are not named here.
      ids: tokens of every prompt; they are padded to `padded_length` of the longest.
      most_rows: rows of a full batch; fewer prompts run in a power of two of them.
    """
    more = padded_rows(len(ids), most_rows) - len(ids)
    fillers = [Text(texts[0].tokenizer) for _ in range(more)]
    for filler in fillers:
        filler.finish("length")
    batch = Prompts.ragged([*ids, *[ids[0][:1]] * more])
    batch = batch.padded(padded_length(batch.tokens_BL.shape[1]))
    if name_B is not None:
        name_B = np.pad(name_B, (0, more))
    everything = [*texts, *fillers]
    for new in generate(generator, batch, everything, max_tokens, sampling, seed, name_B):
        yield new[: len(ids)]
