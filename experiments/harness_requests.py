"""What tasks of lm-evaluation-harness ask of the model: read, checked, and what became of it.

Nothing here needs the harness itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from xmod_jax.errors import UserError
from xmod_jax.inference.sampling import Sampling
from xmod_jax.inference.text import Stop

MODEL = "xmod"  # what the harness calls ours
_MAX_GEN_TOKS = 256  # where a task does not say, as in the harness's own models
_MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWN = ("temperature", "top_k", "top_p")
# Options that change nothing at these values, and are not known at others.
_NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "min_p": 0.0}


@dataclasses.dataclass(frozen=True)
class Wish:
    """How a request wants its text.

    Attributes:
      sampling: how tokens are chosen.
      max_tokens: how many at most.
      stop: what ends it.
    """

    sampling: Sampling
    max_tokens: int
    stop: Stop

    @classmethod
    def read(cls, options: dict[str, Any], length: int) -> Wish:
        """From a task's generation_kwargs; `length` is that of the window.

        A stop string need not be in a list; an empty one is none. As the harness has it, tokens are
        drawn under ``do_sample``, or, where that is not said, at a temperature above 0.

        Raises:
          UserError: an option that is not known or has no such value, or more tokens than leave
            room for a prompt.
        """
        if not isinstance(options, dict):
            raise UserError(f"generation_kwargs is no mapping of options: {options!r}")
        known = {"until", "do_sample", *_MAX_TOKENS, *_DRAWN}
        for name, value in options.items():
            if name not in known and (name not in _NEUTRAL or value not in (None, _NEUTRAL[name])):
                raise UserError(f"generation_kwargs: {name}={value} is not known to model {MODEL}")
        said = {name: value for name, value in options.items() if value is not None}
        return cls(_sampling(said), _most_tokens(said, length), _stop(said))


def _sampling(said: dict[str, Any]) -> Sampling:
    for name in ("temperature", "top_p"):
        value = said.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"generation_kwargs: {name}={value!r} is not a number")
    draws = said.get("do_sample", said.get("temperature", 0.0) > 0)
    if not isinstance(draws, bool):
        raise UserError(f"generation_kwargs: do_sample={draws!r} is neither true nor false")
    drawn = {name: said[name] for name in _DRAWN if name in said}
    if "top_k" in drawn:
        drawn["top_k"] = _whole("top_k", drawn["top_k"])
    wished = Sampling(**({"temperature": 1.0} | drawn))
    return wished if draws else Sampling()


def _most_tokens(said: dict[str, Any], length: int) -> int:
    named = [name for name in _MAX_TOKENS if name in said]
    most = min(_MAX_GEN_TOKS, max(1, length // 2))
    if named:
        most = _whole(named[0], said[named[0]])
    if most < 1:
        raise UserError(f"generation_kwargs: {named[0]}={most} is less than 1 token")
    if most >= length:
        raise UserError(
            f"it asks for {most} tokens, the window of {length} leaves no room for its "
            "prompt: change max_gen_toks of the task, or --max_length"
        )
    return most


def _whole(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool) or (isinstance(value, float) and number != value):
        raise UserError(f"generation_kwargs: {name}={value!r} is not a whole number")
    return number


def _stop(said: dict[str, Any]) -> Stop:
    until = said.get("until", ())
    strings = (until,) if isinstance(until, str) else until
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise UserError(f"generation_kwargs: until={until!r} is neither a text nor a list of texts")
    return Stop(tuple(filter(None, strings)))


def check(tasks: Iterable[Any], length: int) -> None:
    """Refuses what cannot be answered in any request of any task, before the first is run.

    Args:
      tasks: the harness's, their requests built.
      length: of the window.

    Raises:
      UserError: options of generation that cannot be, or text that is not UTF-8.
    """
    for task in tasks:
        for request in task.instances:
            where = f"task {task.task_name}, question {request.doc_id}"
            texts = [text for text in request.args if isinstance(text, str)]
            try:
                for text in texts:
                    text.encode()
                if request.request_type == "generate_until":
                    Wish.read(request.args[1], length)
            except UnicodeEncodeError as error:
                raise UserError(f"{where}: not UTF-8 text: {error}") from error
            except UserError as error:
                raise UserError(f"{where}: {error}") from error


# What may become of a request: as results name it, and in words.
_WORDS = {
    "context_cut": "the window of {length} tokens does not hold the context, its beginning is cut",
    "text_in_parts": "the text is longer than the window of {length} tokens, it is scored in parts",
    "joined": "the tokenizer joins the continuation with the end of its context, it is scored as "
    "tokens of its own",
    "shifted": "the tokenizer joins the continuation with the end of its context, what stands "
    "behind as many tokens as the context has is scored, as the harness does it",
    "empty": "the continuation is empty, it is scored as the end of the text",
}


class Outcomes:
    """What became of requests that a reader of their results should know, counted by task."""

    def __init__(self, length: int) -> None:
        """Starts with none; `length` is that of the window."""
        self._length = length
        self._requests: collections.Counter[str] = collections.Counter()
        self._counts: dict[str, collections.Counter[str]] = {}

    def add(self, task: str | None, **kinds: bool) -> None:
        """Counts one request of a task, and which of the kinds above it is of."""
        name = task or "no task"
        self._requests[name] += 1
        counts = self._counts.setdefault(name, collections.Counter())
        counts.update(kind for kind, holds in kinds.items() if holds)

    def lines(self) -> list[str]:
        """A line for each task and kind."""
        return [
            f"{task}: {count} of {self._requests[task]} requests: "
            + _WORDS[kind].format(length=self._length)
            for task, counts in self._counts.items()
            for kind, count in counts.items()
        ]

    def record(self) -> dict[str, dict[str, int]]:
        """By task the number of requests, and of those of every kind; ready for JSON."""
        return {
            task: {"requests": count} | {kind: self._counts[task][kind] for kind in _WORDS}
            for task, count in self._requests.items()
        }
