"""Plain, slow references of routing, written for reading; shared by the tests of this folder."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Problem(NamedTuple):
    """A random stage around a small causal block."""

    params: Any
    router_SD: jax.Array
    x_BLD: jax.Array
    positions_BL: jax.Array


def make_problem(seed: int, B: int, L: int, D: int, S: int, dtype=jnp.float64) -> Problem:
    keys = jax.random.split(jax.random.key(seed), 6)
    block = {
        "mix": jax.random.normal(keys[0], (S, D, D), dtype) / D**0.5,
        "key": jax.random.normal(keys[1], (S, D, D), dtype) / D**0.5,
        "out": jax.random.normal(keys[2], (S, D, D), dtype) / D**0.5,
    }
    gate_S = 1 + 0.3 * jax.random.normal(keys[3], (S,), dtype)
    router_SD = jax.random.normal(keys[4], (S, D), dtype) / D**0.5
    x_BLD = jax.random.normal(keys[5], (B, L, D), dtype)
    positions_BL = jnp.broadcast_to(jnp.arange(L, dtype=jnp.int32), (B, L))
    return Problem((block, gate_S), router_SD, x_BLD, positions_BL)


def toy_block(params: Any, rows_BCD: jax.Array, positions_BC: jax.Array) -> jax.Array:
    """Causal linear attention with a position-dependent decay, then a tanh: mixes rows."""
    score_BCC = jnp.einsum("bcd,de,bke->bck", rows_BCD, params["key"], rows_BCD)
    gap_BCC = (positions_BC[:, :, None] - positions_BC[:, None]).astype(rows_BCD.dtype)
    causal_CC = jnp.tril(jnp.ones((rows_BCD.shape[1],) * 2, rows_BCD.dtype))
    weight_BCC = jnp.tanh(score_BCC) * jnp.exp(-0.1 * jnp.abs(gap_BCC)) * causal_CC
    mixed_BCD = jnp.einsum("bck,bkd->bcd", weight_BCC, rows_BCD @ params["mix"])
    return jnp.tanh(mixed_BCD + rows_BCD @ params["out"])


def plain_stage(params, router_SD, x_BLD, positions_BL, count: int, tau: float, valid_BL=None):
    """The stage layer by layer, logits read from the whole stream, gradients by autodiff."""
    block, gate_S = params
    chosen_BL = jnp.zeros(x_BLD.shape[:2], x_BLD.dtype)
    valid_BL = jnp.ones(x_BLD.shape[:2], bool) if valid_BL is None else valid_BL
    losses, batch = [], jnp.arange(len(x_BLD))[:, None]
    for s in range(len(router_SD)):
        z_BL = x_BLD @ router_SD[s] - tau * chosen_BL
        order_BL = jnp.argsort(-jnp.where(valid_BL, z_BL, -jnp.inf), axis=-1, stable=True)
        idx_BC = jnp.sort(order_BL[:, :count], axis=-1)
        mask_BL = jnp.zeros_like(valid_BL).at[batch, idx_BC].set(True) & valid_BL
        rows_BCD = x_BLD[batch, idx_BC]
        layer = jax.tree.map(lambda leaf, s=s: leaf[s], block)
        update_BCD = toy_block(layer, rows_BCD, positions_BL[batch, idx_BC])
        score_BC = jax.nn.sigmoid(z_BL)[batch, idx_BC]
        weight_BC = gate_S[s] * score_BC * valid_BL[batch, idx_BC]
        x_BLD = x_BLD.at[batch, idx_BC].add(weight_BC[..., None] * update_BCD)
        bce_BL = -jnp.where(mask_BL, jax.nn.log_sigmoid(z_BL), jax.nn.log_sigmoid(-z_BL))
        losses.append(jnp.sum(bce_BL * valid_BL) / jnp.sum(valid_BL))
        chosen_BL = chosen_BL + mask_BL
    return x_BLD, jnp.stack(losses)
