"""Log-likelihoods of texts behind contexts, in batches of few shapes, under threshold routing.

What is scored is cut into windows of the context length; windows of like length run together,
padded to one of a few lengths and to a power of two of rows, so that few programs are compiled. To
which length a window is padded depends on it alone, not on its neighbours.

Shapes: B windows, L inputs of a window.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xmod_jax.errors import UserError
from xmod_jax.inference.batches import NOT_FINITE, padded_length, padded_rows
from xmod_jax.model import Decoder, Threshold
from xmod_jax.training.compilation import jit
from xmod_jax.training.loss import token_losses


class Score(NamedTuple):
    """What a model makes of a continuation.

    Attributes:
      log_likelihood: of its tokens together, in nats.
      greedy: whether each of them is the likeliest one.
    """

    log_likelihood: float
    greedy: bool


class Window(NamedTuple):
    """Tokens that run together.

    Attributes:
      tokens: inputs and, one further, targets.
      scored: how many of the targets count, the last ones.
    """

    tokens: Sequence[int]
    scored: int


def windows(context: Sequence[int], continuation: Sequence[int], length: int) -> list[Window]:
    """The windows that score every token of a continuation once, with all the context they hold.

    A context that is too long loses its first tokens. A continuation longer than a window takes
    several, of which the last reaches back over the one before.

    Args:
      context: at least one token.
      continuation: what is scored.
      length: most inputs of a window.
    """
    if len(continuation) <= length:
        tokens = [*context, *continuation][-(length + 1) :]
        return [Window(tokens, len(continuation))] if continuation else []
    parts = [Window([context[-1], *continuation[:length]], length)]
    for first in range(length, len(continuation), length):
        end = min(first + length, len(continuation))
        parts.append(Window(continuation[end - length - 1 : end], end - first))
    return parts


class Scorer:
    """A model ready to score; compiles once for each length and number of rows."""

    def __init__(self, model: Decoder, route: Threshold, length: int, batch_size: int) -> None:
        """Prepares a model.

        Args:
          model: any architecture.
          route: thresholds of its sparse layers.
          length: most inputs of a window, in tokens.
          batch_size: most windows that run together.
        """
        if length < 1 or batch_size < 1:
            raise UserError(f"window and batch size must be at least 1: {length}, {batch_size}")
        self.length = length
        self._model, self._route, self._rows = model, route, batch_size
        self._run = jit(_token_losses)

    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Score]:
        """Scores of (context, continuation) pairs of token ids, in their order.

        A context has at least one token; an empty continuation is certain. `progress` is told
        after every batch how many windows are done, and of how many.

        Raises:
          UserError: the model's logits are not finite.
        """
        totals = [Score(0.0, True) for _ in pairs]
        alike: dict[int, list[tuple[int, Window]]] = collections.defaultdict(list)
        for index, (context, continuation) in enumerate(pairs):
            for window in windows(context, continuation, self.length):
                size = padded_length(len(window.tokens) - 1, self.length)
                alike[size].append((index, window))
        done, total = 0, sum(map(len, alike.values()))
        for size, entries in sorted(alike.items(), reverse=True):
            for first in range(0, len(entries), self._rows):
                batch = entries[first : first + self._rows]
                scores = self._batch([window for _, window in batch], size)
                for (index, _), score in zip(batch, scores, strict=True):
                    sum_so_far, greedy = totals[index]
                    totals[index] = Score(
                        sum_so_far + score.log_likelihood, greedy and score.greedy
                    )
                done += len(batch)
                progress(done, total)
        return totals

    def _batch(self, batch: Sequence[Window], size: int) -> list[Score]:
        """Scores of windows that are padded to `size` inputs."""
        tokens_BL1 = np.zeros((padded_rows(len(batch), self._rows), size + 1), np.int32)
        length_B = np.zeros(len(tokens_BL1), np.int32)
        for row, window in enumerate(batch):
            tokens_BL1[row, : len(window.tokens)] = window.tokens
            length_B[row] = len(window.tokens) - 1
        loss_BL, hit_BL = jax.device_get(self._run(self._model, self._route, tokens_BL1, length_B))
        scores = []
        for row, window in enumerate(batch):
            part = slice(length_B[row] - window.scored, length_B[row])
            total = -float(np.sum(loss_BL[row, part], dtype=np.float64))
            if not math.isfinite(total):
                raise UserError(NOT_FINITE)
            scores.append(Score(total, bool(hit_BL[row, part].all())))
        return scores


def _token_losses(model: Decoder, route: Threshold, tokens_BL1: jax.Array, length_B: jax.Array):
    """Negative log-likelihood of every target [B, L], and whether it is the likeliest token."""
    inputs_BL, targets_BL = tokens_BL1[:, :-1], tokens_BL1[:, 1:]
    valid_BL = jnp.arange(inputs_BL.shape[1]) < length_B[:, None]
    states_BLD, _ = model(inputs_BL, route, valid_BL)
    loss_BL, likeliest_BL = token_losses(states_BLD, model.whole_head(), targets_BL)
    return loss_BL, likeliest_BL == targets_BL
