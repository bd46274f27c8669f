"""The next token from the logits: greedy, temperature, top-k, top-p.

Shapes: B sequences, V vocabulary.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xmod_jax.errors import UserError

_COLDEST, _HOTTEST = 1e-6, 1e6  # logits divided by less may not fit float32; by more all are equal


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: divides the logits; 0 takes the largest (greedy), else at least 1e-6.
      top_k: only the k most likely tokens; 0 for all.
      top_p: of those only the fewest likeliest that hold this probability together; 1 for all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or _COLDEST <= self.temperature <= _HOTTEST):
            raise UserError(
                f"temperature must be at least 0: 0 for the likeliest token, or {_COLDEST:g} to "
                f"{_HOTTEST:g}, got {self.temperature}"
            )
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")


def names(texts: Sequence[str]) -> np.ndarray:
    """What tells the draws of prompts apart, uint32 [B]: their text alone, wherever they stand.

    Of equal prompts the second, the third and so on get names of their own: they are more samples.
    """
    seen: collections.Counter[str] = collections.Counter()
    name_B = np.zeros(len(texts), np.uint32)
    for place, text in enumerate(texts):
        name_B[place] = zlib.crc32(f"{seen[text]} {text}".encode())
        seen[text] += 1
    return name_B


def keys(seed: int, name_B: np.ndarray) -> jax.Array:
    """A random key for every sequence [B]: its draws do not depend on its neighbours.

    `name_B`, uint32, tells the sequences of a seed apart.
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.asarray(name_B))


def sample(
    logits_BV: jax.Array, sampling: Sampling, keys_B: jax.Array, position_B: jax.Array
) -> jax.Array:
    """int32 tokens [B]; -1 where a sequence's logits are not all finite.

    Args:
      logits_BV: at least float32.
      sampling: how; static under `jax.jit`.
      keys_B: from `keys`.
      position_B: int32, where the token will stand: every position draws anew, and the same again
        if decoding starts over.
    """
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        kept_BV = filtered(logits_BV / sampling.temperature, sampling)
        drawn = jax.vmap(
            lambda key, n, logits: jax.random.categorical(jax.random.fold_in(key, n), logits)
        )
        token_B = drawn(keys_B, position_B, kept_BV)
    finite_B = jnp.all(jnp.isfinite(logits_BV), axis=-1)
    return jnp.where(finite_B, token_B, -1).astype(jnp.int32)


def filtered(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """The logits, -inf where top-k or top-p leave a token out; ties go to the lower id."""
    V = logits_BV.shape[-1]
    if sampling.top_k in (0, V) and sampling.top_p == 1:
        return logits_BV
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True, stable=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    if 0 < sampling.top_k < V:
        sorted_BV = jnp.where(jnp.arange(V) < sampling.top_k, sorted_BV, -jnp.inf)
    p_BV = jax.nn.softmax(sorted_BV, axis=-1)
    # What stands before a token decides, so that the likeliest one always stays; it does so too
    # where top_p is 0 in float32.
    before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
    kept_BV = (before_BV < sampling.top_p) | (jnp.arange(V) == 0)
    sorted_BV = jnp.where(kept_BV, sorted_BV, -jnp.inf)
    place_BV = jnp.argsort(order_BV, axis=-1)
    return jnp.take_along_axis(sorted_BV, place_BV, axis=-1)
