"""lm-evaluation-harness's model `xmod`: a run's newest checkpoint, under threshold routing.

Importing this module registers it. Every text stands behind an end-of-text token, as in training;
a text that is too long for the window loses its first tokens, that one first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from experiments import harness_requests, progress, trained
from experiments.harness_requests import Outcomes, Wish
from xmod_jax.data.tokenizer import Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.inference import sampling
from xmod_jax.inference.batches import padded_length
from xmod_jax.inference.generate import Generator, drawing_from
from xmod_jax.inference.scoring import Score, Scorer
from xmod_jax.inference.text import Text, generate_padded
from xmod_jax.model import Decoder, Threshold

NAME = harness_requests.MODEL


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
        self.tasks: Sequence[Any] = ()  # of the evaluation, where it says so: checked at its start
        self.outcomes = Outcomes(length)
        self._said: set[str] = set()
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

    def get_model_info(self) -> dict[str, Any]:
        """What the harness adds to the configuration in its results."""
        return {"window": self.max_length, "outcomes": self.outcomes.record()}

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of continuations behind contexts.

        An empty continuation is scored as the end of the text.
        """
        self._check()
        encoded = []
        for request in requests:
            context, continuation = request.args
            whole = context + continuation
            context_ids, ids, apart = self._encode(context, continuation)
            encoded.append(((context, continuation), context_ids, ids))
            self.outcomes.add(
                _task_of(request),
                context_cut=len(context_ids) > max(1, self.max_length + 1 - len(ids)),
                text_in_parts=len(ids) > self.max_length,
                joined=bool(apart and context and continuation),
                shifted=not apart and self._tokens.decode([*context_ids, *ids]) != whole,
                empty=ids == [self.eot_token_id],
            )
        self._say()
        return self._loglikelihood_tokens(encoded)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        return self._encode(context, continuation)[:2]

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int], bool]:
        """Tokens of a context and of a continuation, and whether they were encoded apart.

        As the harness does it, the whole text is cut behind as many tokens as the context alone
        has. Where none is left, since the context's end and the continuation are one token, each is
        encoded by itself, as the harness does for models with an encoder: the sum over no token
        would be 0, the best score there is.
        """
        if context:
            context_ids, ids = super()._encode_pair(context, continuation)
            if ids:
                return context_ids, ids, False
        end = len(context.rstrip())  # blanks belong to the continuation, as they do there
        ids = self.tok_encode(context[end:] + continuation)
        return self.tok_encode(context[:end]), ids or [self.eot_token_id], True

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [([self.eot_token_id, *context], tokens) for _, context, tokens in requests]
        scores = [(total, greedy) for total, greedy in self._score(pairs)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of whole texts, every token scored once."""
        self._check()
        texts = [request.args[0] for request in requests]
        pairs = [([self.eot_token_id], self.tok_encode(text)) for text in texts]
        for request, (_, ids) in zip(requests, pairs, strict=True):
            self.outcomes.add(_task_of(request), text_in_parts=len(ids) > self.max_length)
        self._say()
        scores = self._score(pairs)
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score.log_likelihood)
        return [score.log_likelihood for score in scores]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Score]:
        with progress.steps("scoring", "windows") as tell:
            return self._scorer.score(pairs, tell)

    def _check(self) -> None:
        """Refuses, at the first request, what the others of the evaluation cannot have."""
        harness_requests.check(self.tasks, self.max_length)
        self.tasks = ()

    def _say(self) -> None:
        """Tells at once what became of requests; whoever prints the results may repeat it."""
        fresh = [line for line in self.outcomes.lines() if line not in self._said]
        progress.warn(fresh)
        self._said.update(fresh)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts behind contexts, each up to the first of its own stop strings.

        Draws depend on the context, and on how many equal requests came before: neither on the
        batch nor on the order of the others.
        """
        self._check()
        wishes = [Wish.read(request.args[1], self.max_length) for request in requests]
        prompts = []
        for request, wish in zip(requests, wishes, strict=True):
            ids = self.tok_encode(request.args[0])
            room = self.max_length - wish.max_tokens
            prompts.append([self.eot_token_id, *ids][-room:])
            self.outcomes.add(_task_of(request), context_cut=len(ids) > room)
        self._say()
        names_N = sampling.names([request.args[0] for request in requests])
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        for index, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
            alike[padded_length(len(prompt)), wish.sampling, wish.max_tokens].append(index)
        texts = [Text(self._tokens, wish.stop) for wish in wishes]
        done = 0
        with progress.steps("generating", "texts") as tell:
            for (_, drawing, most), indices in alike.items():
                for first in range(0, len(indices), self.batch_size):
                    batch = indices[first : first + self.batch_size]
                    for _ in generate_padded(
                        self._generator,
                        [prompts[index] for index in batch],
                        [texts[index] for index in batch],
                        self.batch_size,
                        most,
                        drawing,
                        name_B=names_N[batch],
                    ):
                        pass
                    done += len(batch)
                    tell(done, len(requests))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text.text)
        return [text.text for text in texts]


def _task_of(request: Any) -> str | None:
    """The name of the task that asks."""
    return getattr(request, "task_name", None)
