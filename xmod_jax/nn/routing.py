"""Routing decisions: capacity, top-k selection, threshold compaction, the alignment loss (SPEC 3).

Everything is per sequence and of static shape. Shapes: B batch, L context, C capacity (rows of the
selection), D width. `z_BL` are biased router logits ``s_i - tau * b_i`` in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Selections are sorted, without repeats: the compiler need not guard against collisions.
_FEW_ROWS = 8  # bucket sizes are multiples of this
_INDEXED = {"indices_are_sorted": True, "unique_indices": True}


def capacity(context_length: int, sparsity: int) -> int:
    """C = ceil(L/K), never 0: tokens that a sparse layer updates under top-k routing."""
    return -(-context_length // sparsity)


class Selection(NamedTuple):
    """Chosen tokens of every sequence.

    Attributes:
      idx_BC: int32, positions in ascending order, so that a causal mask is right on the rows.
      mask_BL: bool, the same as a mask over tokens.
      kth_B: the smallest selected logit.
    """

    idx_BC: jax.Array
    mask_BL: jax.Array
    kth_B: jax.Array


def select_top_k(z_BL: jax.Array, count: int) -> Selection:
    """The `count` largest logits of each sequence; ties go to the earliest position."""
    value_BC, idx_BC = jax.lax.top_k(z_BL, count)
    idx_BC = jnp.sort(idx_BC, axis=-1)
    mask_BL = put_rows(jnp.zeros(z_BL.shape, bool), idx_BC, jnp.ones(idx_BC.shape, bool))
    return Selection(idx_BC, mask_BL, value_BC[:, -1])


def compact(mask_BL: jax.Array, count: int) -> jax.Array:
    """Positions of the first `count` selected tokens, ascending, padded with positions past L.

    Padding comes last and every padded entry differs, so `take_rows` clips it, causal attention
    hides it and `put_rows` drops it.
    """
    L = mask_BL.shape[1]
    rank_BL = jnp.cumsum(mask_BL, axis=-1, dtype=jnp.int32)
    slot_C = jnp.arange(1, count + 1, dtype=jnp.int32)
    idx_BC = jax.vmap(lambda rank_L: jnp.searchsorted(rank_L, slot_C))(rank_BL).astype(jnp.int32)
    return jnp.where(idx_BC < L, idx_BC, L + slot_C)


def take_rows(x: jax.Array, idx_BC: jax.Array) -> jax.Array:
    """x[b, idx[b, c]] for x of shape [B, L, ...]; positions past L are clipped."""
    return jax.vmap(lambda rows, idx: rows.at[idx].get(mode="clip", **_INDEXED))(x, idx_BC)


def put_rows(x: jax.Array, idx_BC: jax.Array, rows: jax.Array) -> jax.Array:
    """x with x[b, idx[b, c]] = rows[b, c]; positions past L are dropped."""
    return jax.vmap(lambda x, idx, new: x.at[idx].set(new, mode="drop", **_INDEXED))(
        x, idx_BC, rows
    )


def bucket_sizes(context_length: int, sparsity: int) -> tuple[int, ...]:
    """Row counts that threshold routing is compiled for, from 0 up to L.

    Around the trained load C = ceil(L/K) they are spaced by an eighth, since a calibrated router's
    count scatters around C and a coarse step would waste up to half of the work; then they double.
    Sizes a few rows apart are one: every size is compiled, and a few rows save nothing.
    """
    C = capacity(context_length, sparsity)
    sizes = [0, context_length, *(-(-eighths * C // 8) for eighths in (4, 6, 7, 8, 9, 10, 12))]
    size = 2 * C
    while size < context_length:
        sizes.append(size)
        size *= 2
    whole = (-(-size // _FEW_ROWS) * _FEW_ROWS for size in sizes)
    return tuple(sorted({min(size, context_length) for size in whole}))


def alignment_loss(z_BL: jax.Array, mask_BL: jax.Array, valid_BL: jax.Array | None) -> jax.Array:
    """Mean binary cross-entropy between the top-k mask and sigmoid(z), a scalar (SPEC 3).

    0 where no token is valid, as on a device whose sequences are padding.
    """
    loss_BL = jax.nn.softplus(z_BL) - z_BL * mask_BL
    if valid_BL is None:
        return jnp.mean(loss_BL)
    return jnp.sum(loss_BL, where=valid_BL) / jnp.maximum(jnp.sum(valid_BL), 1)
