"""lm-evaluation-harness's model `xmod`: a run's newest checkpoint, under threshold routing.

Importing this module registers it. Every text stands behind an end-of-text token, as in training;
a text that is too long for the window loses its first tokens, that one first.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from experiments import trained
from xmod_jax.data.tokenizer import Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.inference.generate import Generator, Prompts, drawing_from
from xmod_jax.inference.sampling import Sampling
from xmod_jax.inference.scoring import Scorer, padded_length, power_of_two
from xmod_jax.inference.text import Stop, Text, generate
from xmod_jax.model import Decoder, Threshold

NAME = "xmod"
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

        A stop string need not be in a list; an empty one is none. Draws are made only under
        ``do_sample``, as the harness has it.

        Raises:
          UserError: an option that is not known, or more tokens than leave room for a prompt.
        """
        known = {"until", "do_sample", *_MAX_TOKENS, *_DRAWN}
        for name, value in options.items():
            if name not in known and (name not in _NEUTRAL or value not in (None, _NEUTRAL[name])):
                raise UserError(f"generation_kwargs: {name}={value} is not known to model {NAME}")
        said = [options[name] for name in _MAX_TOKENS if options.get(name) is not None]
        most = int(said[0]) if said else min(_MAX_GEN_TOKS, max(1, length // 2))
        if not 0 < most < length:
            raise UserError(
                f"a task asks for {most} tokens, the window of {length} leaves no room for its "
                "prompt: change max_gen_toks of the task, or --max_length"
            )
        until = options.get("until") or ()
        strings = (until,) if isinstance(until, str) else tuple(until)
        sampling = Sampling()
        if options.get("do_sample"):
            drawn = {name: options[name] for name in _DRAWN if options.get(name) is not None}
            sampling = Sampling(**({"temperature": 1.0} | drawn))
        return cls(sampling, most, Stop(tuple(filter(None, strings))))


@register_model(NAME)
class XmodLM(TemplateLM):
    """A trained model as lm-evaluation-harness calls it."""

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        threshold: str = "calibrated",
        vocabulary: str | None = None,
    ) -> None:
        """Loads a run's newest checkpoint.

        Args:
          pretrained: its run directory.
          batch_size: most texts that run together.
          max_batch_size: of no use here; the harness passes it.
          device: likewise; JAX chooses.
          max_length: most tokens of a window; None: the context length of training.
          threshold: of the routers: ``"calibrated"``, or ``"paper"`` for r >= 0.5.
          vocabulary: folder of GPT-2's vocabulary files.

        Raises:
          UserError: not a run, no checkpoint, or a value that cannot be.
        """
        super().__init__()
        run = trained.find(pretrained)
        if threshold not in ("calibrated", "paper"):
            raise UserError(f"threshold is calibrated or paper, not {threshold}")
        if not str(batch_size).isdigit():
            raise UserError(f"batch_size must be a number, it is {batch_size}")
        tokenizer = trained.tokenizer(run, vocabulary)
        state = trained.load(run)
        model = state.model
        route = Threshold(model.thresholds() if threshold == "paper" else state.thresholds)
        length = max_length or run.config.train.context_length
        self._setup(model, route, tokenizer, int(length), int(batch_size))

    def _setup(
        self, model: Decoder, route: Threshold, tokenizer: Tokenizer, length: int, batch_size: int
    ) -> None:
        self.batch_size, self.max_length = batch_size, length
        self._tokens = tokenizer
        self._scorer = Scorer(model, route, length, batch_size)
        self._generator = Generator(drawing_from(model, tokenizer.vocab_size), route)

    @classmethod
    def of(
        cls,
        model: Decoder,
        route: Threshold,
        tokenizer: Tokenizer,
        length: int,
        batch_size: int = 1,
    ) -> XmodLM:
        """The adapter around a model in memory."""
        made = cls.__new__(cls)
        TemplateLM.__init__(made)
        made._setup(model, route, tokenizer, length, batch_size)
        return made

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end_of_text

    @property
    def tokenizer_name(self) -> str:
        return self._tokens.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return [int(token) for token in self._tokens.encode(string)]

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of continuations behind contexts."""
        encoded = []
        for context, continuation in (request.args for request in requests):
            pair = (
                self._encode_pair(context, continuation)
                if context
                else ([], self.tok_encode(continuation))
            )
            encoded.append(((context, continuation), *pair))
        return self._loglikelihood_tokens(encoded)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [([self.eot_token_id, *context], tokens) for _, context, tokens in requests]
        scores = [(total, greedy) for total, greedy in self._scorer.score(pairs)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, every token scored once."""
        texts = [request.args[0] for request in requests]
        pairs = [([self.eot_token_id], self.tok_encode(text)) for text in texts]
        scores = self._scorer.score(pairs)
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score.log_likelihood)
        return [score.log_likelihood for score in scores]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts behind contexts, each up to the first of its own stop strings.

        Draws depend on the context, and on how many equal requests came before: neither on the
        batch nor on the order of the others.
        """
        wishes = [Wish.read(request.args[1], self.max_length) for request in requests]
        prompts, names = [], []
        seen: collections.Counter[str] = collections.Counter()
        for request, wish in zip(requests, wishes, strict=True):
            context = request.args[0]
            room = self.max_length - wish.max_tokens
            prompts.append([self.eot_token_id, *self.tok_encode(context)][-room:])
            names.append(zlib.crc32(f"{seen[context]} {context}".encode()))
            seen[context] += 1
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for index, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
            size = padded_length(len(prompt), self.max_length)
            alike[size, wish.sampling, wish.max_tokens].append(index)
        texts: dict[int, str] = {}
        for (size, sampling, most), indices in alike.items():
            for first in range(0, len(indices), self.batch_size):
                batch = indices[first : first + self.batch_size]
                stops = [wishes[index].stop for index in batch]
                ids = [prompts[index] for index in batch]
                name_B = np.array([names[index] for index in batch], np.uint32)
                made = self._generate(ids, size, most, sampling, stops, name_B)
                texts.update(zip(batch, made, strict=True))
        for index, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[index])
        return [texts[index] for index in range(len(requests))]

    def _generate(
        self,
        prompts: Sequence[list[int]],
        size: int,
        most: int,
        sampling: Sampling,
        stops: Sequence[Stop],
        name_B: np.ndarray,
    ) -> list[str]:
        """Texts of one batch, padded to `size` tokens of a prompt and a power of two of rows."""
        more = power_of_two(len(prompts)) - len(prompts)
        batch = Prompts.ragged([*prompts, *[[self.eot_token_id]] * more])
        width = ((0, 0), (0, size - batch.tokens_BL.shape[1]))
        batch = batch._replace(tokens_BL=np.pad(batch.tokens_BL, width))
        texts = [Text(self._tokens, stop) for stop in (*stops, *[Stop()] * more)]
        for text in texts[len(prompts) :]:
            text.finish("length")
        name_B = np.pad(name_B, (0, more))
        for _ in generate(self._generator, batch, texts, most, sampling, 0, name_B):
            pass
        return [text.text for text in texts[: len(prompts)]]
