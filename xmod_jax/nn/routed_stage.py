"""The routed stage: sparse layers in a row, trained with top-k routing (SPEC 3).

Two savings over a plain scan, both exact (WORKSPACE.md: "only routed rows", "kept logits"):

* A sparse layer changes only its C selected rows, so the forward pass saves their OLD values, and
  the backward pass rebuilds the stream by writing them back: A*L*D saved values, not A*K*L*D.
* All S routers read the stream once, at the stage's start; later only changed rows are read again.
  In the backward pass the logits' gradients wait in [B, L, S] until their row changes.

Shapes: B batch, L context, C capacity, D width, S sparse layers of the stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn import routing

# (layer parameters, rows [B, C, D], row data [B, C, ...], score [B, C]) -> new rows [B, C, D]
RowUpdate = Callable[[Any, jax.Array, Any, jax.Array], jax.Array]


class StageOutput(NamedTuple):
    """What a routed stage returns.

    Attributes:
      x_BLD: the stream after the stage.
      alignment_S: alignment loss of each layer, differentiable.
      kth_S: smallest selected logit of each layer, mean over sequences; no gradient.
      agreement_S: share of tokens on which top-k and the 0.5 threshold agree; no gradient.
    """

    x_BLD: jax.Array
    alignment_S: jax.Array
    kth_S: jax.Array
    agreement_S: jax.Array


def gated_residual(block: Callable[[Any, jax.Array, Any], jax.Array]) -> RowUpdate:
    """The X-MoD update around any block: ``rows + gate * score * block(params, rows, positions)``.

    Args:
      block: ``block(params, rows_BCD, positions) -> residual_BCD``. It must be causal over its
        rows, which stand in position order, and must not close over traced values.

    Returns:
      A row update whose layer parameters are the pair ``(params, gate)``.
    """

    def update(params: Any, rows_BCD: jax.Array, positions: Any, score_BC: jax.Array) -> jax.Array:
        block_params, gate = params
        weight_BC = (gate * score_BC).astype(rows_BCD.dtype)
        return rows_BCD + weight_BC[..., None] * block(block_params, rows_BCD, positions)

    return update


def routed_stage(
    update: RowUpdate,
    params: Any,
    router_SD: jax.Array,
    x_BLD: jax.Array,
    positions: Any,
    *,
    sparsity: int,
    bias_scale: float = 1.0,
    valid_BL: jax.Array | None = None,
) -> StageOutput:
    """Runs S sparse layers under top-k routing of capacity ceil(L/K).

    Args:
      update: new values of a layer's rows; see `gated_residual`.
      params: parameters of all layers, every leaf [S, ...].
      router_SD: router vectors, at least float32.
      x_BLD: the residual stream.
      positions: pytree of [B, L, ...] arrays gathered with the rows (integer positions, or rotary
        phases); constants of the stage, without gradient.
      sparsity: K.
      bias_scale: tau of the token-choice bias ``tau * b_i``.
      valid_BL: bool; tokens that are False neither compete nor change nor count. None: all valid.

    Returns:
      `StageOutput`; its stream and alignment loss carry gradients to params, routers and x.
    """
    count = routing.capacity(x_BLD.shape[1], sparsity)
    return _stage(update, count, bias_scale, params, router_SD, x_BLD, positions, valid_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _stage(update, count, tau, params, router_SD, x_BLD, positions, valid_BL):
    return _stage_forward(update, count, tau, params, router_SD, x_BLD, positions, valid_BL)[0]


def read_logits(x_BLD: jax.Array, router_SD: jax.Array) -> jax.Array:
    """Router logits [B, L, S] of all layers, in the routers' precision."""
    return jnp.einsum("bld,sd->bls", x_BLD.astype(router_SD.dtype), router_SD)


def _apply(update, params, rows_BCD, positions_BC, z_BC, valid_BC):
    """New rows of one layer; rows of padding (selected only when nothing else is left) stay."""
    new_BCD = update(params, rows_BCD, positions_BC, jax.nn.sigmoid(z_BC)).astype(rows_BCD.dtype)
    return new_BCD if valid_BC is None else jnp.where(valid_BC[..., None], new_BCD, rows_BCD)


def _stage_forward(update, count, tau, params, router_SD, x_BLD, positions, valid_BL):
    S = router_SD.shape[0]

    def layer(carry, item):
        x_BLD, logits_BLS, chosen_BL = carry
        s, params = item
        z_BL = lax.dynamic_index_in_dim(logits_BLS, s, 2, keepdims=False) - tau * chosen_BL
        pick = routing.select_top_k(_compete(z_BL, valid_BL), count)
        idx_BC, mask_BL = pick.idx_BC, _and(pick.mask_BL, valid_BL)
        rows_BCD, z_BC, positions_BC, valid_BC = _take((x_BLD, z_BL, positions, valid_BL), idx_BC)
        new_BCD = _apply(update, params, rows_BCD, positions_BC, z_BC, valid_BC)
        x_BLD = routing.put_rows(x_BLD, idx_BC, new_BCD)
        if S > 1:
            logits_BLS = routing.put_rows(logits_BLS, idx_BC, read_logits(new_BCD, router_SD))
        aux = (
            routing.alignment_loss(z_BL, mask_BL, valid_BL),
            jnp.mean(pick.kth_B),
            jnp.mean(mask_BL == (z_BL >= 0), where=valid_BL),
        )
        return (x_BLD, logits_BLS, chosen_BL + mask_BL), (aux, (idx_BC, rows_BCD, z_BL))

    start = (x_BLD, read_logits(x_BLD, router_SD), jnp.zeros(x_BLD.shape[:2], router_SD.dtype))
    (x_BLD, _, _), (aux, saved) = lax.scan(layer, start, (jnp.arange(S), params))
    return StageOutput(x_BLD, *aux), (params, router_SD, x_BLD, positions, valid_BL, saved)


def _stage_backward(update, count, tau, residuals, bars):
    """Walks the layers in reverse; see the module's head.

    `g_BLS` holds d loss / d logits of the layers walked so far, for the CURRENT version of each
    row. When a row's version ends (the layer that wrote it is reached), its logits' gradients flow
    to that version and to the routers, and start again from zero for the version before.
    """
    params, router_SD, x_BLD, positions, valid_BL, saved = residuals
    S, wide = router_SD.shape[0], router_SD.dtype

    def layer(carry, item):
        dx_BLD, x_BLD, g_BLS, dw_SD = carry
        s, params, (idx_BC, rows_BCD, z_BL), dalign = item
        dnew_BCD, g_BCS, z_BC, positions_BC, valid_BC = _take(
            (dx_BLD, g_BLS, z_BL, positions, valid_BL), idx_BC
        )
        new_BCD, pull = jax.vjp(
            lambda params, rows, z: _apply(update, params, rows, positions_BC, z, valid_BC),
            params,
            rows_BCD,
            z_BC,
        )
        if S > 1:
            dw_SD += jnp.einsum("bcs,bcd->sd", g_BCS, new_BCD.astype(wide))
            dnew_BCD += jnp.einsum("bcs,sd->bcd", g_BCS, router_SD).astype(dnew_BCD.dtype)
            g_BLS = routing.put_rows(g_BLS, idx_BC, jnp.zeros_like(g_BCS))
        dparams, drows_BCD, dz_BC = pull(dnew_BCD)
        dz_BL = _alignment_gradient(z_BL, idx_BC, valid_BL, valid_BC) * dalign
        dz_BL = jax.vmap(lambda dz, idx, new: dz.at[idx].add(new))(dz_BL, idx_BC, dz_BC)
        g_BLS = lax.dynamic_update_index_in_dim(g_BLS, dz_BL, s, 2)
        dx_BLD = routing.put_rows(dx_BLD, idx_BC, drows_BCD)
        x_BLD = routing.put_rows(x_BLD, idx_BC, rows_BCD)
        return (dx_BLD, x_BLD, g_BLS, dw_SD), dparams

    start = (bars.x_BLD, x_BLD, jnp.zeros((*x_BLD.shape[:2], S), wide), jnp.zeros_like(router_SD))
    items = (jnp.arange(S), params, saved, bars.alignment_S)
    (dx_BLD, x_BLD, g_BLS, dw_SD), dparams = lax.scan(layer, start, items, reverse=True)
    dw_SD += jnp.einsum("bls,bld->sd", g_BLS, x_BLD.astype(wide))
    dx_BLD += jnp.einsum("bls,sd->bld", g_BLS, router_SD).astype(dx_BLD.dtype)
    return dparams, dw_SD, dx_BLD, None, None


_stage.defvjp(_stage_forward, _stage_backward)


def _alignment_gradient(z_BL, idx_BC, valid_BL, valid_BC):
    """d `routing.alignment_loss` / d z."""
    ones_BC = jnp.ones(idx_BC.shape, bool) if valid_BC is None else valid_BC
    mask_BL = routing.put_rows(jnp.zeros(z_BL.shape, bool), idx_BC, ones_BC)
    dz_BL = jax.nn.sigmoid(z_BL) - mask_BL
    if valid_BL is None:
        return dz_BL / z_BL.size
    return jnp.where(valid_BL, dz_BL, 0) / jnp.sum(valid_BL)


def _compete(z_BL, valid_BL):
    """Logits with padding ranked below every real token."""
    return z_BL if valid_BL is None else jnp.where(valid_BL, z_BL, -jnp.inf)


def _and(mask_BL, valid_BL):
    return mask_BL if valid_BL is None else mask_BL & valid_BL


def _take(tree: Any, idx_BC: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: routing.take_rows(leaf, idx_BC), tree)
