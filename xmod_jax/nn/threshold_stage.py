"""The routed stage under causal threshold routing: evaluation, and every reported loss (SPEC 3).

A token enters a layer iff its biased logit reaches the layer's threshold, so nothing after it can
change the decision. There is no capacity; each layer runs in the smallest of a few row buckets
that holds every routed token of the sequences that run together, and no token is ever dropped.

A bucket is as large as its fullest sequence needs, so only as many sequences run together as it
takes to fill a matrix product.

Shapes: B batch, L context, M rows of a bucket, D width, S sparse layers of the stage, G sequences
that run together.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn import collectives, routing
from xmod_jax.nn.routed_stage import Dense, RowUpdate, intervals, read_logits
from xmod_jax.nn.stacks import at
from xmod_jax.nn.stage_arguments import (
    alike,
    as_varying,
    check_dense,
    check_function,
    check_rows,
    check_stage,
    varying_axes,
)
from xmod_jax.nn.surroundings import without_explicit_axes

PAPER_THRESHOLD = 0.0  # of the biased logit: sigmoid(0) = 0.5
# Rows that one read of a layer's parameters should serve. On CPU reading them takes as long as 40
# rows' products; a device of many units wants far more rows.
_FULL_PRODUCT = {"cpu": 512}
_FULL_PRODUCT_ELSEWHERE = 8192


class ThresholdOutput(NamedTuple):
    """What stages under threshold routing return.

    An interval is a run of sparse layers between two layers that change every token: a stage, or a
    part of one where it has leads. From `threshold_stages` the fields have leading axes: [N] for
    `routed_S`, [N, P] for the others, with P intervals of a stage.

    Attributes:
      x_BLD: the stream after the last stage.
      routed_S: share of the valid tokens routed to each layer.
      coverage: share of tokens that a layer of the interval updated, mean over sequences.
      jaccard_B: overlap of consecutive layers' token sets, mean over a sequence's pairs with a
        non-empty union; NaN where there is none.
      updates: [S/P + 1] number of tokens with 0, 1, ... updates in the interval.
    """

    x_BLD: jax.Array
    routed_S: jax.Array
    coverage: jax.Array
    jaccard_B: jax.Array
    updates: jax.Array


def threshold_stage(
    update: RowUpdate,
    params: Any,
    router_SD: jax.Array,
    x_BLD: jax.Array,
    positions: Any,
    threshold_S: jax.Array,
    *,
    sparsity: int,
    bias_scale: float = 1.0,
    valid_BL: jax.Array | None = None,
) -> ThresholdOutput:
    """Runs the S sparse layers of one stage: token i enters layer s iff its biased logit
    ``s_i - tau * b_i`` is at least ``threshold_S[s]``; 0 is the paper's r >= 0.5.

    The other arguments are those of `xmod_jax.routed_stage`. For forward passes, and derivatives in
    forward mode (`jax.jvp`): JAX refuses reverse mode, since the rows of a layer are not known
    while tracing. Call it outside `jax.vmap`, under which a layer runs every bucket that one of its
    instances needs.

    Raises:
      ValueError: an argument of the wrong shape, dtype or value; names it.
    """
    arguments = (params, router_SD, x_BLD, positions, sparsity, bias_scale, valid_BL)
    check_stage(*arguments, "S", threshold_S)
    options: dict[str, Any] = {"sparsity": sparsity, "bias_scale": bias_scale}

    def run(x_BLD: jax.Array, rest: Any) -> tuple[jax.Array, ...]:
        positions, valid_BL, *stacks = rest
        params, router_NSD, threshold_NS = jax.tree.map(lambda leaf: leaf[None], stacks)
        stage = (params, router_NSD, x_BLD, positions, threshold_NS)
        out = threshold_stages(update, *stage, valid_BL=valid_BL, **options)
        return out.x_BLD, out.routed_S[0], *(field[0, 0] for field in out[2:])

    rest = positions, valid_BL, params, router_SD, threshold_S
    found = without_explicit_axes(run, x_BLD, rest, len(ThresholdOutput._fields))
    return ThresholdOutput(*found)


def threshold_stages(
    update: RowUpdate,
    params: Any,
    router_NSD: jax.Array,
    x_BLD: jax.Array,
    positions: Any,
    threshold_NS: jax.Array,
    *,
    sparsity: int,
    bias_scale: float = 1.0,
    valid_BL: jax.Array | None = None,
    anchor: Dense | None = None,
    anchor_params: Any = None,
    lead: Dense | None = None,
    lead_params: Any = None,
    reads_stream: bool = False,
) -> ThresholdOutput:
    """Runs N stages; token i enters layer s iff ``s_i - tau * b_i >= threshold_NS[n, s]``.

    Arguments as `routed_stages`'; for forward passes. Call it outside `jax.vmap`, under which a
    layer runs every bucket that one of its instances needs.
    """
    check_function("update", update)
    arguments = (params, router_NSD, x_BLD, positions, sparsity, bias_scale, valid_BL)
    sparsity, bias_scale = check_stage(*arguments, "NS", threshold_NS)
    check_dense("anchor", anchor, anchor_params, router_NSD.shape[:1], "N")
    check_dense("lead", lead, lead_params, router_NSD.shape[:2], "NP")
    B, L, _ = x_BLD.shape
    real_BL = jnp.ones((B, L), bool) if valid_BL is None else valid_BL
    dense = anchor_params, lead_params
    given = alike((params, router_NSD, x_BLD, positions, real_BL, threshold_NS, dense))
    params, router_NSD, x_BLD, positions, real_BL, threshold_NS, dense = given
    anchor_params, lead_params = dense
    sizes = routing.bucket_sizes(L, sparsity)
    buckets = [_bucket(update, size, reads_stream) for size in sizes[1:]]

    def interval(n, positions, real_BL, x_BLD, item):
        p, router_SD, threshold_S = item
        if lead is not None:
            x_BLD, _ = lead.forward(at(lead_params, n, p), x_BLD, positions)
        index = (n, p * len(router_SD))
        run = functools.partial(_run_layer, sizes, buckets, params, index, router_SD, positions)
        return _run_interval(run, router_SD, x_BLD, threshold_S, bias_scale, real_BL)

    def stage(positions, real_BL, x_BLD, item):
        n, router_SD, threshold_S = item
        router_PSD = intervals(router_SD, lead_params)
        items = (jnp.arange(len(router_PSD)), router_PSD, threshold_S.reshape(len(router_PSD), -1))
        body = functools.partial(interval, n, positions, real_BL)
        x_BLD, statistics = lax.scan(body, x_BLD, items)
        if anchor is not None:
            x_BLD, _ = anchor.forward(at(anchor_params, n), x_BLD, positions)
        return x_BLD, statistics

    def stages(group):
        x_GLD, positions, real_GL = group
        items = (jnp.arange(len(router_NSD)), router_NSD, threshold_NS)
        return lax.scan(functools.partial(stage, positions, real_GL), x_GLD, items)

    together = _sequences_together(B, routing.capacity(L, sparsity))
    split = lambda leaf: leaf.reshape(-1, together, *leaf.shape[1:])
    x_BLD, found = lax.map(stages, jax.tree.map(split, (x_BLD, positions, real_BL)))
    join = lambda leaf: jnp.moveaxis(leaf, 0, 2).reshape(*leaf.shape[1:3], B, *leaf.shape[4:])
    routed_NPBS, covered_NPB, jaccard_NPB, updates_NPBT = jax.tree.map(join, found)
    return ThresholdOutput(
        x_BLD.reshape(B, L, -1),
        routed_NPBS.sum(2).reshape(threshold_NS.shape) / jnp.sum(real_BL),
        covered_NPB.mean(-1),
        jaccard_NPB,
        updates_NPBT.sum(2),
    )


def _sequences_together(batch: int, count: int) -> int:
    """The fewest sequences of `count` rows each that fill a product and divide the batch."""
    full = _FULL_PRODUCT.get(jax.default_backend(), _FULL_PRODUCT_ELSEWHERE)
    enough = [n for n in range(1, batch) if batch % n == 0 and n * count >= full]
    return enough[0] if enough else batch


def _run_layer(
    sizes, buckets, params, index, router_SD, positions, s, x_BLD, logits_BLS, mask_BL, z_BL
):
    """Layer s of an interval in the smallest bucket that holds every routed token.

    A bucket is a loop of one turn or of none, since a loop changes the stream in place: a switch
    between the buckets copied it twice, up to 12% of the time of a pass.
    """
    need = collectives.agreed_maximum(jnp.max(jnp.sum(mask_BL, axis=-1)))
    which = jnp.searchsorted(jnp.asarray(sizes), need)
    n, first = index

    def turn(bucket, zero, carry):
        # All depends on the turn, so that the compiler moves none of it out of an idle loop.
        layer, taken_BL = at(params, n, first + s + zero), mask_BL & (zero == 0)
        return bucket(layer, router_SD, *carry, positions, taken_BL, z_BL)

    carry = x_BLD, logits_BLS
    for k, bucket in enumerate(buckets, 1):
        turns = (which == k).astype(jnp.int32)
        carry = lax.fori_loop(0, turns, functools.partial(turn, bucket), carry)
    return carry


class _Interval(NamedTuple):
    """What one interval did to each sequence; T + 1 numbers of updates."""

    routed_BS: jax.Array
    covered_B: jax.Array
    jaccard_B: jax.Array
    updates_BT: jax.Array


def _run_interval(run, router_SD, x_BLD, threshold_S, bias_scale, real_BL):
    """The sparse layers of one interval: the stream, and the statistics of their selections."""
    B, L, _ = x_BLD.shape
    S, wide = len(router_SD), router_SD.dtype

    def layer(carry, item):
        x_BLD, logits_BLS, chosen_BL, last_BL, overlap_B, pairs_B = carry
        s, threshold = item
        z_BL = lax.dynamic_index_in_dim(logits_BLS, s, 2, keepdims=False) - bias_scale * chosen_BL
        mask_BL = (z_BL >= threshold) & real_BL
        x_BLD, logits_BLS = run(s, x_BLD, logits_BLS, mask_BL, z_BL)
        union_B = jnp.sum(mask_BL | last_BL, axis=-1)
        pair_B = (union_B > 0) & (s > 0)
        both_B = jnp.sum(mask_BL & last_BL, axis=-1) / jnp.maximum(union_B, 1)
        overlap_B += jnp.where(pair_B, both_B, 0).astype(wide)
        carry = (x_BLD, logits_BLS, chosen_BL + mask_BL, mask_BL, overlap_B, pairs_B + pair_B)
        return carry, jnp.sum(mask_BL, axis=-1)

    zeros = jnp.zeros((B, L), wide), jnp.zeros(B, wide)
    zeros_BL, zeros_B = as_varying(zeros, varying_axes(x_BLD))
    start = (x_BLD, read_logits(x_BLD, router_SD), zeros_BL, zeros_BL > 0, zeros_B, zeros_B)
    items = (jnp.arange(S), threshold_S)
    (x_BLD, _, chosen_BL, _, overlap_B, pairs_B), routed_SB = lax.scan(layer, start, items)
    covered_B = jnp.sum(chosen_BL > 0, axis=-1) / jnp.maximum(jnp.sum(real_BL, axis=-1), 1)
    count = functools.partial(jax.ops.segment_sum, num_segments=S + 1)
    updates_BT = jax.vmap(count)(real_BL.astype(jnp.int32), chosen_BL.astype(jnp.int32))
    # Not 0 / 0, which JAX's search for NaNs would stop at.
    jaccard_B = jnp.where(pairs_B > 0, overlap_B / jnp.maximum(pairs_B, 1), jnp.nan)
    return x_BLD, _Interval(routed_SB.T, covered_B, jaccard_B, updates_BT)


def _bucket(update: RowUpdate, size: int, reads_stream: bool):
    """One layer over at most `size` routed rows of each sequence."""

    def run(layer, router_SD, x_BLD, logits_BLS, positions, mask_BL, z_BL):
        idx_BM = routing.compact(mask_BL, size)
        take = lambda leaf: routing.take_rows(leaf, idx_BM)
        score_BM = jax.nn.sigmoid(take(z_BL))
        stream = (x_BLD, positions) if reads_stream else ()
        rows_BMD, data = take(x_BLD), jax.tree.map(take, positions)
        new_BMD = update(layer, rows_BMD, data, score_BM, *stream)
        check_rows("update", new_BMD, rows_BMD)
        new_BMD = new_BMD.astype(x_BLD.dtype)
        x_BLD = routing.put_rows(x_BLD, idx_BM, new_BMD)
        if len(router_SD) > 1:
            new_logits_BMS = read_logits(new_BMD, router_SD)
            logits_BLS = routing.put_rows(logits_BLS, idx_BM, new_logits_BMS)
        return x_BLD, logits_BLS

    return run
