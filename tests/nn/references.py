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


def stream_block(params: Any, rows_BCD, positions_BC, score_BC, x_BLD, positions_BL):
    """Rows read every token at or before their own position, their own row included."""
    score_BCL = jnp.einsum("bcd,de,ble->bcl", rows_BCD, params["key"], x_BLD)
    see_BCL = positions_BL[:, None] <= positions_BC[..., None]
    mixed_BCD = jnp.einsum("bcl,bld->bcd", jnp.tanh(score_BCL) * see_BCL, x_BLD @ params["mix"])
    return rows_BCD + score_BC[..., None] * jnp.tanh(mixed_BCD + rows_BCD @ params["out"])


def plain_stages(problem: Problem, leads_PDD, anchors_NDD, P: int, count: int, tau: float, x_BLD):
    """Stages of P intervals with leads, anchors and `stream_block`, gradients by autodiff.

    Parameters and routers have leading axes [N, S].
    """
    params, router_NSD, positions_BL = problem.params, problem.router_SD, problem.positions_BL
    batch, losses = jnp.arange(len(x_BLD))[:, None], []
    N, S = router_NSD.shape[:2]
    for n in range(N):
        for s in range(S):
            if s % (S // P) == 0:
                x_BLD = x_BLD + jnp.tanh(x_BLD @ leads_PDD[n, s // (S // P)])
                chosen_BL = jnp.zeros(x_BLD.shape[:2], x_BLD.dtype)
            z_BL = x_BLD @ router_NSD[n, s] - tau * chosen_BL
            idx_BC = jnp.sort(jnp.argsort(-z_BL, axis=-1, stable=True)[:, :count], axis=-1)
            mask_BL = jnp.zeros(z_BL.shape, bool).at[batch, idx_BC].set(True)
            layer = jax.tree.map(lambda leaf, n=n, s=s: leaf[n, s], params)
            score_BC, position_BC = jax.nn.sigmoid(z_BL)[batch, idx_BC], positions_BL[batch, idx_BC]
            rows = stream_block(
                layer, x_BLD[batch, idx_BC], position_BC, score_BC, x_BLD, positions_BL
            )
            x_BLD = x_BLD.at[batch, idx_BC].set(rows)
            bce_BL = -jnp.where(mask_BL, jax.nn.log_sigmoid(z_BL), jax.nn.log_sigmoid(-z_BL))
            losses.append(jnp.mean(bce_BL))
            chosen_BL = chosen_BL + mask_BL
        x_BLD = x_BLD + jnp.tanh(x_BLD @ anchors_NDD[n])
    return x_BLD, jnp.stack(losses).reshape(N, S)
