"""Generation: prompts in, tokens out, one compiled step a token.

The step for the next token is dispatched before the last one is read, so the device never waits for
the host. Buffers of routed tokens grow between steps, before they could overflow.

Shapes: B sequences, L longest prompt, T tokens of a chunk, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator as Stream
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xmod_jax.errors import UserError
from xmod_jax.inference import cache as caches
from xmod_jax.inference import sampling as sampler
from xmod_jax.inference.batches import NOT_FINITE
from xmod_jax.inference.cache import Cache
from xmod_jax.inference.decode import cast_once, decode_step, extend
from xmod_jax.inference.sampling import Sampling
from xmod_jax.model import Decoder, Threshold
from xmod_jax.training.compilation import jit

PREFILL_CHUNK = 256
_FEWEST_CHUNK = 16
_UNBOUNDED = 1 << 30
_GROWTH = 1.5  # of buffers that are full; every size compiles anew


class Prompts(NamedTuple):
    """Ragged prompts, left-aligned: tokens [B, L], zeros behind; int32 lengths [B]."""

    tokens_BL: np.ndarray
    length_B: np.ndarray

    @classmethod
    def ragged(cls, prompts: Sequence[Sequence[int] | np.ndarray]) -> Prompts:
        """From one array of ids for every prompt.

        Raises:
          UserError: no prompt, or an empty one: there is no token to go on from.
        """
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise UserError("every prompt needs at least one token")
        tokens_BL = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
        for row, prompt in zip(tokens_BL, prompts, strict=True):
            row[: len(prompt)] = prompt
        return cls(tokens_BL, np.array([len(prompt) for prompt in prompts], np.int32))

    def padded(self, tokens: int) -> Prompts:
        """The same prompts in rows of so many tokens, at least as many as the longest has."""
        more = tokens - self.tokens_BL.shape[1]
        return self._replace(tokens_BL=np.pad(self.tokens_BL, ((0, 0), (0, more))))

    @classmethod
    def masked(cls, tokens_BL: np.ndarray, valid_BL: np.ndarray) -> Prompts:
        """From a batch padded on the left, on the right or both, and its mask of real tokens."""
        pairs = zip(np.asarray(tokens_BL), np.asarray(valid_BL, bool), strict=True)
        return cls.ragged([tokens_L[valid_L] for tokens_L, valid_L in pairs])


def drawing_from(model: Decoder, vocab_size: int) -> Decoder:
    """The model with a head for the first ids alone: ids that no text has are never drawn.

    A vocabulary may be larger than the tokenizer's. `model` stays as it is.
    """
    limited = nnx.clone(model)
    limited.head = nnx.Param(model.head[...][:, :vocab_size])
    return limited


class Generator:
    """A model ready to generate; compiles once per batch size and size of the buffers."""

    def __init__(
        self,
        model: Decoder,
        route: Threshold | None = None,
        *,
        chunk: int = PREFILL_CHUNK,
        max_routed: int | None = None,
    ) -> None:
        """Prepares a model.

        Args:
          model: any architecture.
          route: thresholds of its sparse layers; None: the paper's r >= 0.5.
          chunk: most tokens of a prompt that run at a time.
          max_routed: most tokens of a sequence that a sparse layer may keep; None: all.
        """
        self.model = cast_once(model)  # here, not at every token
        self.route = route or Threshold(model.thresholds())
        self._chunk = chunk
        self._max_routed = _UNBOUNDED if max_routed is None else max_routed
        self._bounded = caches.keeps_routed_rows(model.config)
        self._extend = jit(_extend, donate_argnums=2)
        self._step = jit(_step, donate_argnums=2, static_argnums=4)
        self._resize = jit(caches.resize_routed, static_argnums=1)

    def prefill(self, prompts: Prompts, room: int, reserve: int = 1) -> tuple[Cache, jax.Array]:
        """Runs the prompts.

        Args:
          prompts: what the caches are filled with.
          room: how many more tokens the caches shall hold.
          reserve: how many of them a sparse layer's buffer holds at least, however they are routed.

        Returns:
          The caches, and float32 logits [B, V] of the token behind each prompt.

        Raises:
          UserError: a sparse layer gets more than `max_routed` tokens.
        """
        B, L = prompts.tokens_BL.shape
        config = self.model.config
        T = min(self._chunk, max(_FEWEST_CHUNK, 1 << (L - 1).bit_length()))
        tokens = max(L + room, T)  # a buffer holds at least one chunk
        planned = caches.routed_rows(L + room, config.hierarchy.sparsity)
        # A chunk's tokens may all be routed, so there is room for them while prompts are read.
        cache = caches.empty(config, B, tokens, planned + T)
        last_BD = jnp.zeros((B, config.backbone.d_model), config.compute.value)
        bound = 0
        for first in range(0, L, T):
            part_BT = np.zeros((B, T), np.int32)
            tokens_BT = prompts.tokens_BL[:, first : first + T]
            part_BT[:, : tokens_BT.shape[1]] = tokens_BT
            count_B = np.clip(prompts.length_B - first, 0, T).astype(np.int32)
            cache, bound = self._make_room(cache, bound, T)
            bound += T
            cache, last_BD = self._extend(self.model, self.route, cache, part_BT, count_B, last_BD)
        if self._bounded:
            need, rows = self._fullest(cache) + reserve, planned
            while rows < need:  # few sizes, since every one compiles anew
                rows = caches.round_up(int(_GROWTH * rows))
            cache = self._resize(cache, rows)
        return cache, self.model.logits(last_BD[:, None])[:, 0]

    def stream(
        self,
        prompts: Prompts,
        max_tokens: int,
        sampling: Sampling | None = None,
        seed: int = 0,
        name_B: np.ndarray | None = None,
    ) -> Stream[np.ndarray, np.ndarray | None, None]:
        """Yields the next tokens int32 [B] of all sequences, `max_tokens` times at most.

        ``send(stopped_B)`` (bool) in place of ``next`` says which sequences need no more tokens:
        they route nothing from then on, and what is yielded for them means nothing.

        Draws depend on `seed` and on a sequence's `name_B` (uint32; None: its place in the batch).

        Raises:
          UserError: a sparse layer gets more than `max_routed` tokens, or the logits of a sequence
            that needs more tokens are not finite.
        """
        sampling = sampling or Sampling()
        cache, logits_BV = self.prefill(prompts, max_tokens)
        places_B = np.arange(len(prompts.length_B), dtype=np.uint32)
        keys_B = sampler.keys(seed, places_B if name_B is None else name_B)
        token_B = sampler.sample(logits_BV, sampling, keys_B, cache.length_B)
        running_B = np.ones(len(prompts.length_B), bool)
        bound = _UNBOUNDED  # asked for at the first step
        for left in reversed(range(max_tokens)):
            now_B = token_B
            if left:
                cache, bound = self._make_room(cache, bound, 1)
                cache, token_B = self._step(
                    self.model, self.route, cache, now_B, sampling, keys_B, running_B
                )
                bound += 1
            told_B = np.asarray(now_B)
            if (told_B[running_B] < 0).any():
                raise UserError(NOT_FINITE)
            stopped_B = yield told_B
            if stopped_B is not None:
                running_B = ~np.asarray(stopped_B)

    def _make_room(self, cache: Cache, bound: int, more: int) -> tuple[Cache, int]:
        """Grows the buffers of routed tokens where `more` tokens could overflow them.

        `bound` says how full they are at most; only where that leaves no room is the device asked,
        and waited for. Returns the cache, and the bound as it is then known.
        """
        if not self._bounded:
            return cache, bound
        rows = caches.routed_size(cache)
        if bound + more <= min(rows, self._max_routed + more):
            return cache, bound
        bound = self._fullest(cache)
        if bound + more > rows:
            cache = self._resize(cache, caches.round_up(max(int(_GROWTH * rows), bound + more)))
        return cache, bound

    def _fullest(self, cache: Cache) -> int:
        """The most tokens that a sparse layer keeps of a sequence; refuses more than it may."""
        full = int(caches.fullest(cache))
        if full > self._max_routed:
            raise UserError(
                f"a sparse layer was given {full} tokens of a sequence, more than the "
                f"{self._max_routed} it may keep: allow more, or shorten the text"
            )
        return full


def _extend(model, route, cache, tokens_BT, count_B, last_BD):
    """One chunk of the prompts; the state of each sequence's last token so far, and the cache."""
    states_BTD, cache = extend(model, route, cache, tokens_BT, count_B)
    end_B11 = jnp.maximum(count_B - 1, 0)[:, None, None]
    end_BD = jnp.take_along_axis(states_BTD, end_B11, axis=1)[:, 0]
    return cache, jnp.where((count_B > 0)[:, None], end_BD, last_BD)


def _step(model, route, cache, token_B, sampling, keys_B, running_B):
    """One token of every running sequence, and the one drawn after it."""
    logits_BV, cache = decode_step(model, route, cache, token_B, running_B)
    return cache, sampler.sample(logits_BV, sampling, keys_B, cache.length_B)
