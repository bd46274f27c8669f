"""Sums that keep float32 where the values around them are bfloat16, or an accelerator rounds them.

A bfloat16 has 8 bits: a running sum of equal terms stands still at the 256th.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

# Accelerators round the operands of a float32 product (to TF32, or bfloat16) unless told not to.
full_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def widened(x: jax.Array) -> jax.Array:
    """x in at least float32."""
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


def broadcast_as(factor: jax.Array, like: jax.Array) -> jax.Array:
    """`factor` at every place of `like`, in the dtype of that.

    Broadcast first and cast then, so that the gradient, a sum over those places, is formed in the
    dtype of `factor`; from a factor cast before it would be a sum in bfloat16.
    """
    return jnp.broadcast_to(factor, like.shape).astype(like.dtype)
