"""Routed stages: sparse layers in a row, then a dense anchor, under top-k routing (SPEC 1, 3).

Two savings over a plain scan, both exact (WORKSPACE.md: "only routed rows", "kept logits"):

* A sparse layer changes only its C selected rows, so the forward pass saves their OLD values, and
  the backward pass rebuilds the stream by writing them back: A*L*D saved values, not A*K*L*D.
* All S routers read the stream once, at the stage's start; later only changed rows are read again.
  In the backward pass the logits' gradients wait in [B, L, S] until their row changes.

Parameters stay in their stacks: a layer's are sliced where they are used, and its gradients are
written into the stack of gradients in place. Scanning over stages of stacks would copy a whole
stage of parameters, forward and backward.

Shapes: B batch, L context, C capacity, D width, N stages, S sparse layers of a stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn import routing
from xmod_jax.nn.precision import broadcast_as, full_einsum
from xmod_jax.nn.stacks import add, at, fresh, without_constants, write
from xmod_jax.nn.stage_arguments import (
    alike,
    as_varying,
    check_dense,
    check_function,
    check_rows,
    check_stage,
    varying_axes,
)
from xmod_jax.nn.surroundings import Layers, closures_as_params, without_explicit_axes

# (layer parameters, rows [B, C, D], row data [B, C, ...], score [B, C]) -> new rows [B, C, D];
# with `reads_stream` also the whole stream [B, L, D] and its data [B, L, ...]; with `keeps` it
# returns more, see `routed_stages`.
RowUpdate = Callable[..., Any]


class Dense(NamedTuple):
    """A layer that changes every token: a stage's anchor, or its lead.

    Attributes:
      forward: ``(params, x_BLD, positions) -> (y_BLD, saved)``.
      backward: ``(params, x_BLD, positions, saved, dy_BLD) -> (dparams, dx_BLD)``.
    """

    forward: Callable[..., tuple[jax.Array, Any]]
    backward: Callable[..., tuple[Any, jax.Array]]


class StageOutput(NamedTuple):
    """What routed stages return; a leading axis of stages [N] where there are several.

    Attributes:
      x_BLD: the stream after the last stage.
      alignment_S: alignment loss of each layer, differentiable.
      kth_S: smallest selected logit of each layer, mean over sequences that have a valid token; no
        gradient.
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
        rows, which stand in position order.

    Returns:
      A row update whose layer parameters are the pair ``(params, gate)``; gates of all layers [S].

    Raises:
      ValueError: `block` is no function; while tracing, its residual is not of the rows' shape, the
        parameters are no such pair, or a layer's gate is not one number.
    """
    check_function("block", block)

    def update(params: Any, rows_BCD: jax.Array, positions: Any, score_BC: jax.Array) -> jax.Array:
        if not isinstance(params, Sequence) or len(params) != 2:
            raise ValueError(
                f"params must be the pair (params of the block, gates), got {type(params).__name__}"
            )
        block_params, gate = params
        if getattr(gate, "shape", ()) != ():
            raise ValueError(f"gate must be one number a layer, [S], got {[*gate.shape]} a layer")
        weight_BC1 = (gate * score_BC)[..., None]
        residual_BCD = block(block_params, rows_BCD, positions)
        check_rows("block", residual_BCD, rows_BCD)
        return rows_BCD + broadcast_as(weight_BC1, rows_BCD) * residual_BCD

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
    """Runs the S sparse layers of one stage under top-k routing of capacity ceil(L/K).

    Args:
      update: new values of a layer's rows; see `gated_residual`. Every layer gets a copy of the
        traced values that it closes over; inside `jax.shard_map` it must close over none.
      params: parameters of all layers, every leaf [S, ...]; leaves that are not floating, a
        layer's random key for instance, are constants.
      router_SD: router vectors, at least float32.
      x_BLD: the residual stream, of any floating dtype.
      positions: pytree of [B, L, ...] arrays gathered with the rows (integer positions, or rotary
        phases); constants of the stage, without gradient.
      sparsity: K.
      bias_scale: tau of the token-choice bias ``tau * b_i``.
      valid_BL: bool; tokens that are False neither compete nor change nor count. None: all valid.

    Returns:
      `StageOutput`; its stream and alignment loss carry gradients to params, routers and x.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; names it.
    """
    arguments = (params, router_SD, x_BLD, positions, sparsity, bias_scale, valid_BL)
    sparsity, bias_scale = check_stage(*arguments, "S")
    options: dict[str, Any] = {"sparsity": sparsity, "bias_scale": bias_scale}
    count = routing.capacity(x_BLD.shape[1], sparsity)

    def run(x_BLD: jax.Array, rest: Any) -> tuple[jax.Array, ...]:
        params, router_SD, positions, valid_BL = rest
        layers = closures_as_params(Layers(update, params), router_SD, x_BLD, positions, count)
        params, router_NSD = jax.tree.map(lambda leaf: leaf[None], (layers.params, router_SD))
        out = routed_stages(
            layers.update, params, router_NSD, x_BLD, positions, valid_BL=valid_BL, **options
        )
        return out.x_BLD, *(field[0] for field in out[1:])

    rest = params, router_SD, positions, valid_BL
    found = without_explicit_axes(run, x_BLD, rest, len(StageOutput._fields))
    return StageOutput(*found)


def routed_stages(
    update: RowUpdate,
    params: Any,
    router_NSD: jax.Array,
    x_BLD: jax.Array,
    positions: Any,
    *,
    sparsity: int,
    bias_scale: float = 1.0,
    valid_BL: jax.Array | None = None,
    anchor: Dense | None = None,
    anchor_params: Any = None,
    lead: Dense | None = None,
    lead_params: Any = None,
    reads_stream: bool = False,
    keeps: bool = False,
    into: Any = None,
) -> StageOutput:
    """Runs N equal stages: `routed_stage` and then `anchor`, if there is one, in each.

    Args:
      params: parameters of all sparse layers, every leaf [N, S, ...].
      router_NSD: router vectors, at least float32.
      anchor: the dense layer after each stage.
      anchor_params: its parameters, every leaf [N, ...].
      lead: a layer for every token before each interval, an equal share of a stage's sparse layers
        (Routed-FFN: attention). The token-choice bias starts again behind it.
      lead_params: its parameters, every leaf [N, P, ...] for P intervals; P divides S.
      reads_stream: whether `update` also takes the whole stream and its data, with gradient.
      keeps: whether `update` returns ``(rows, kept)`` and takes `kept` as a keyword in the backward
        pass, which need not compute again what that holds.
      into: sums like ``(params, (anchor_params, lead_params))``, which the gradients of these are
        added to and then include: micro-batches so need one set of gradients, not two.

    The other arguments and the result are those of `routed_stage`.
    """
    check_function("update", update)
    sparsity, tau = check_stage(
        params, router_NSD, x_BLD, positions, sparsity, bias_scale, valid_BL, "NS"
    )
    check_dense("anchor", anchor, anchor_params, router_NSD.shape[:1], "N")
    check_dense("lead", lead, lead_params, router_NSD.shape[:2], "NP")
    count = routing.capacity(x_BLD.shape[1], sparsity)
    static = _Static(update, count, tau, anchor, lead, reads_stream, keeps)
    dense_params = anchor_params, lead_params
    arguments = (params, router_NSD, dense_params, x_BLD, positions, valid_BL, into)
    return _stages(static, *alike(arguments))


class _Static(NamedTuple):
    update: RowUpdate
    capacity: int
    tau: float
    anchor: Dense | None
    lead: Dense | None
    reads_stream: bool
    keeps: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stages(static, params, router_NSD, dense_params, x_BLD, positions, valid_BL, into):
    arguments = (params, router_NSD, dense_params, x_BLD, positions, valid_BL, into)
    return _stages_forward(static, *arguments)[0]


def read_logits(x_BLD: jax.Array, router_SD: jax.Array) -> jax.Array:
    """Router logits [B, L, S] of all layers, in the routers' precision."""
    return full_einsum("bld,sd->bls", x_BLD.astype(router_SD.dtype), router_SD)


def _apply(static, kept, params, rows_BCD, positions_BC, z_BC, valid_BC, *stream):
    """New rows of one layer, and what its backward pass is given as `kept` (None: nothing).

    Rows of padding (selected only when nothing else is left) stay.
    """
    given = {} if kept is None else {"kept": kept}
    out = static.update(params, rows_BCD, positions_BC, jax.nn.sigmoid(z_BC), *stream, **given)
    new_BCD, kept = out if static.keeps else (out, None)
    check_rows("update", new_BCD, rows_BCD)
    new_BCD = new_BCD.astype(rows_BCD.dtype)
    if valid_BC is not None:
        new_BCD = jnp.where(valid_BC[..., None], new_BCD, rows_BCD)
    return new_BCD, kept


def intervals(router_SD: jax.Array, lead_params: Any) -> jax.Array:
    """Routers of a stage by interval [P, S/P, D]: as many as it has leads, one without."""
    leaves = jax.tree.leaves(lead_params)
    count = leaves[0].shape[1] if leaves else 1
    return router_SD.reshape(count, -1, router_SD.shape[-1])


def _stages_forward(static, params, router_NSD, dense_params, x_BLD, positions, valid_BL, into):
    anchor_params, lead_params = dense_params

    def interval(n, x_BLD, p, router_SD):
        lead_saved = None
        if static.lead is not None:
            lead_params_n = at(lead_params, n, p)
            y_BLD, lead_saved = static.lead.forward(lead_params_n, x_BLD, positions)
            lead_saved = x_BLD, lead_saved
            x_BLD = y_BLD
        index = (n, p * len(router_SD))
        x_BLD, aux, layers = _sparse_forward(
            static, params, index, router_SD, x_BLD, positions, valid_BL
        )
        return x_BLD, (aux, (layers, lead_saved))

    def stage(x_BLD, n):
        router_PSD = intervals(router_NSD[n], lead_params)
        body = functools.partial(interval, n)
        x_BLD, (aux, sparse) = _scan_intervals(body, x_BLD, router_PSD)
        aux = jax.tree.map(lambda leaf: leaf.reshape(-1), aux)
        if static.anchor is None:
            return x_BLD, (aux, (x_BLD, sparse, None))
        y_BLD, saved = static.anchor.forward(at(anchor_params, n), x_BLD, positions)
        return y_BLD, (aux, (x_BLD, sparse, saved))

    x_BLD, (aux, saved) = lax.scan(stage, x_BLD, jnp.arange(len(router_NSD)))
    residuals = (params, router_NSD, dense_params, positions, valid_BL, into, saved)
    return StageOutput(x_BLD, *aux), residuals


def _scan_intervals(body, carry, router_PSD, *items, reverse=False):
    """``body(carry, p, routers, *items)`` over the intervals; no loop around a single one."""
    P = len(router_PSD)
    if P == 1:
        first = jax.tree.map(lambda leaf: leaf[0], (router_PSD, *items))
        carry, out = body(carry, 0, *first)
        return carry, jax.tree.map(lambda leaf: leaf[None], out)
    step = lambda carry, item: body(carry, *item)
    return lax.scan(step, carry, (jnp.arange(P), router_PSD, *items), reverse=reverse)


def _sparse_forward(static, params, index, router_SD, x_BLD, positions, valid_BL):
    """Sparse layers of one interval: the stream, auxiliaries, and what the way back needs."""
    S, (n, first) = len(router_SD), index

    def layer(carry, s):
        x_BLD, logits_BLS, chosen_BL = carry
        z_BL = lax.dynamic_index_in_dim(logits_BLS, s, 2, keepdims=False) - static.tau * chosen_BL
        pick = routing.select_top_k(_compete(z_BL, valid_BL), static.capacity)
        idx_BC, mask_BL = pick.idx_BC, _and(pick.mask_BL, valid_BL)
        rows_BCD, z_BC, positions_BC, valid_BC = _take((x_BLD, z_BL, positions, valid_BL), idx_BC)
        stream = (x_BLD, positions) if static.reads_stream else ()
        layer_params = at(params, n, first + s)
        new_BCD, kept = _apply(
            static, None, layer_params, rows_BCD, positions_BC, z_BC, valid_BC, *stream
        )
        x_BLD = routing.put_rows(x_BLD, idx_BC, new_BCD)
        if S > 1:
            logits_BLS = routing.put_rows(logits_BLS, idx_BC, read_logits(new_BCD, router_SD))
        aux = (
            routing.alignment_loss(z_BL, mask_BL, valid_BL),
            _smallest(pick.kth_B, z_BC, valid_BC),
            jnp.mean(mask_BL == (z_BL >= 0), where=valid_BL),
        )
        return (x_BLD, logits_BLS, chosen_BL + mask_BL), (aux, (idx_BC, rows_BCD, z_BL, kept))

    zeros_BL = jnp.zeros(x_BLD.shape[:2], router_SD.dtype)
    start = (x_BLD, read_logits(x_BLD, router_SD), as_varying(zeros_BL, varying_axes(x_BLD)))
    (x_BLD, _, _), (aux, saved) = lax.scan(layer, start, jnp.arange(S))
    return x_BLD, aux, saved


def _stages_backward(static, residuals, bars):
    params, router_NSD, dense_params, positions, valid_BL, into, saved = residuals
    anchor_params, lead_params = dense_params
    put, sums = (add, into) if into else (write, fresh((params, dense_params)))
    dparams, (danchors, dleads) = sums

    def interval(n, carry, p, router_SD, sparse, dalign_S):
        dx_BLD, x_BLD, dparams, dleads = carry
        layers, lead_saved = sparse
        arguments = (params, (n, p * len(router_SD)), router_SD, x_BLD, positions, valid_BL)
        dx_BLD, dparams, dw_SD = _sparse_backward(
            static, *arguments, layers, dalign_S, (dx_BLD, dparams), put
        )
        if static.lead is not None:
            x_BLD, lead_saved = lead_saved
            dlead, dx_BLD = static.lead.backward(
                at(lead_params, n, p), x_BLD, positions, lead_saved, dx_BLD
            )
            dleads = put(dleads, dlead, n, p)
        return (dx_BLD, x_BLD, dparams, dleads), dw_SD

    def stage(carry, item):
        dx_BLD, dparams, danchors, dleads = carry
        n, (x_BLD, sparse, anchor_saved), dalign_S = item
        if static.anchor is not None:
            danchor, dx_BLD = static.anchor.backward(
                at(anchor_params, n), x_BLD, positions, anchor_saved, dx_BLD
            )
            danchors = put(danchors, danchor, n)
        router_PSD = intervals(router_NSD[n], lead_params)
        items = (sparse, dalign_S.reshape(router_PSD.shape[:2]))
        carry = (dx_BLD, x_BLD, dparams, dleads)
        body = functools.partial(interval, n)
        carry, dw_PSD = _scan_intervals(body, carry, router_PSD, *items, reverse=True)
        dx_BLD, _, dparams, dleads = carry
        return (dx_BLD, dparams, danchors, dleads), dw_PSD.reshape(router_NSD.shape[1:])

    start = (bars.x_BLD, dparams, danchors, dleads)
    items = (jnp.arange(len(router_NSD)), saved, bars.alignment_S)
    carry, dw_NSD = lax.scan(stage, start, items, reverse=True)
    dx_BLD, dparams, *ddense = carry
    gradients = without_constants((dparams, tuple(ddense)), (params, dense_params))
    return gradients[0], dw_NSD, gradients[1], dx_BLD, None, None, None


def _sparse_backward(
    static, params, index, router_SD, x_BLD, positions, valid_BL, layers, dalign_S, gradients, put
):
    """Walks the sparse layers of an interval in reverse; see the module's head.

    `g_BLS` holds d loss / d logits of the layers walked so far, for the CURRENT version of each
    row. When a row's version ends (the layer that wrote it is reached), its logits' gradients flow
    to that version and to the routers, and start again from zero for the version before.
    """
    S, wide, (n, first) = len(router_SD), router_SD.dtype, index
    dx_BLD, dparams = gradients

    def layer(carry, item):
        dx_BLD, x_BLD, g_BLS, dw_SD, dparams = carry
        s, (idx_BC, rows_BCD, z_BL, kept), dalign = item
        dnew_BCD, g_BCS, z_BC, positions_BC, valid_BC = _take(
            (dx_BLD, g_BLS, z_BL, positions, valid_BL), idx_BC
        )
        x_BLD = routing.put_rows(x_BLD, idx_BC, rows_BCD)
        # The stream's positions are constants, as those of the rows.
        stream, beside = ((x_BLD,), (positions,)) if static.reads_stream else ((), ())
        apply = lambda layer, rows, z, *stream: _apply(
            static, kept, layer, rows, positions_BC, z, valid_BC, *stream, *beside
        )[0]
        layer_params = at(params, n, first + s)
        new_BCD, pull = jax.vjp(apply, layer_params, rows_BCD, z_BC, *stream)
        if S > 1:
            dw_SD += full_einsum("bcs,bcd->sd", g_BCS, new_BCD.astype(wide))
            dnew_BCD += full_einsum("bcs,sd->bcd", g_BCS, router_SD).astype(dnew_BCD.dtype)
            g_BLS = routing.put_rows(g_BLS, idx_BC, jnp.zeros_like(g_BCS))
        dlayer, drows_BCD, dz_BC, *dstream = pull(dnew_BCD)
        dz_BL = _alignment_gradient(z_BL, idx_BC, valid_BL, valid_BC) * dalign
        dz_BL = jax.vmap(lambda dz, idx, new: dz.at[idx].add(new))(dz_BL, idx_BC, dz_BC)
        g_BLS = lax.dynamic_update_index_in_dim(g_BLS, dz_BL, s, 2)
        dx_BLD = routing.put_rows(dx_BLD, idx_BC, drows_BCD)
        if dstream:
            dx_BLD += dstream[0]
        return (dx_BLD, x_BLD, g_BLS, dw_SD, put(dparams, dlayer, n, first + s)), None

    zeros = jnp.zeros((*x_BLD.shape[:2], S), wide), jnp.zeros_like(router_SD)
    start = (dx_BLD, x_BLD, *as_varying(zeros, varying_axes(x_BLD)), dparams)
    items = (jnp.arange(S), layers, dalign_S)
    (dx_BLD, x_BLD, g_BLS, dw_SD, dparams), _ = lax.scan(layer, start, items, reverse=True)
    dw_SD += full_einsum("bls,bld->sd", g_BLS, x_BLD.astype(wide))
    dx_BLD += full_einsum("bls,sd->bld", g_BLS, router_SD).astype(dx_BLD.dtype)
    return dx_BLD, dparams, dw_SD


_stages.defvjp(_stages_forward, _stages_backward)


def _alignment_gradient(z_BL, idx_BC, valid_BL, valid_BC):
    """d `routing.alignment_loss` / d z."""
    ones_BC = jnp.ones(idx_BC.shape, bool) if valid_BC is None else valid_BC
    mask_BL = routing.put_rows(jnp.zeros(z_BL.shape, bool), idx_BC, ones_BC)
    dz_BL = jax.nn.sigmoid(z_BL) - mask_BL
    if valid_BL is None:
        return dz_BL / z_BL.size
    return jnp.where(valid_BL, dz_BL, 0) / jnp.maximum(jnp.sum(valid_BL), 1)


def _smallest(kth_B, z_BC, valid_BC):
    """Mean over sequences of the smallest logit of a selected token that is valid."""
    if valid_BC is None:
        return jnp.mean(kth_B)
    least_B = jnp.min(z_BC, axis=-1, where=valid_BC, initial=jnp.inf)
    return jnp.mean(least_B, where=jnp.any(valid_BC, axis=-1))


def _compete(z_BL, valid_BL):
    """Logits with padding ranked below every real token."""
    return z_BL if valid_BL is None else jnp.where(valid_BL, z_BL, -jnp.inf)


def _and(mask_BL, valid_BL):
    return mask_BL if valid_BL is None else mask_BL & valid_BL


def _take(tree: Any, idx_BC: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: routing.take_rows(leaf, idx_BC), tree)
