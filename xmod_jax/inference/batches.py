"""How texts run together: as many as memory holds, in few shapes, so that few programs compile."""

from __future__ import annotations

import math
import os

import jax

from xmod_jax.config import ModelConfig
from xmod_jax.inference import cache as caches

# What decoding and scoring say of a model that predicts nothing.
NOT_FINITE = (
    "the model's logits are not finite: its parameters are damaged or have diverged: take another "
    "checkpoint, or train again"
)

CACHE_BYTES = 1 << 30  # of the caches and logits of one batch, where the user names no size
_MOST_ROWS = 64  # more make no token cheaper, and nothing is shown before a batch ends
_SHORTEST = 16  # length that shorter texts are padded to
_LOGITS = 4 * 6  # bytes of a token of the vocabulary: float32 logits, sorted and drawn from


def padded_length(inputs: int, longest: int | None = None) -> int:
    """The length that so many inputs are padded to: 16, 24, 32, 48, 64, ... up to the longest."""
    size = _SHORTEST
    while size < inputs:
        # From a power of two to three halves of it, from there to the next one.
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if longest is None else min(size, max(longest, inputs))


def padded_rows(rows: int, most: int) -> int:
    """The next power of two, or `most` where that is less."""
    return min(1 << (rows - 1).bit_length(), max(rows, most))


def sequence_bytes(config: ModelConfig, tokens: int) -> int:
    """Bytes that decoding one sequence of so many tokens takes: its caches and its logits."""
    routed = caches.routed_rows(tokens, config.hierarchy.sparsity)
    shapes = jax.eval_shape(lambda: caches.empty(config, 1, tokens, routed))
    kept = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    return kept + _LOGITS * config.backbone.vocab_size


def rows_that_fit(config: ModelConfig, tokens: int) -> int:
    """How many sequences of so many tokens run together: a power of two, 64 at most."""
    fit = min(_MOST_ROWS, CACHE_BYTES // sequence_bytes(config, tokens))
    return 1 << max(0, fit.bit_length() - 1)


def memory() -> int:
    """Bytes of the device that decodes: of an accelerator if there is one, else of the machine."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
