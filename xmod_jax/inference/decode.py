"""Decoding with caches, under threshold routing: the full pass, a few tokens at a time.

`extend` runs T new tokens of every sequence on top of a cache: one at a time that is decoding, a
few hundred at a time it is how a prompt of any length fills the caches with one compiled program.

A sparse layer runs only if a new token of the batch is routed to it. Which layers these are is seen
from the router logits of the whole stage, which are read from the stream at its start and again
from the rows that a layer changed: the loop over a stage's layers goes from one routed layer to the
next, so that layers without a token cost nothing at all, not even a turn of the loop.

Shapes: B sequences, T new tokens of a sequence, D width, S sparse layers of an interval (a stage,
or a part of one that has leads), M rows of a bucket, H, G, E as in `nn.layers`, N stages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.config import Sparse
from xmod_jax.inference import cache as caches
from xmod_jax.inference.cache import Cache, GroupCache, Rows
from xmod_jax.model import Decoder, Stages, Threshold
from xmod_jax.nn import routing
from xmod_jax.nn.layers import AttentionLayer, FFNBlock, Phases, rotary_phases, updated
from xmod_jax.nn.moe import MoEBlock
from xmod_jax.nn.routed_stage import read_logits
from xmod_jax.nn.stacks import pick

_STAYS = re.compile(r"\.router|\.sparse\.gate|\.ffn\.bias")


class _New(NamedTuple):
    """Where the new tokens stand.

    Attributes:
      phases: theirs.
      real_BT: False for padding, which stands behind a sequence's new tokens.
      start_B: tokens of each sequence before them.
      count_B: real ones among them.
    """

    phases: Phases
    real_BT: jax.Array
    start_B: jax.Array
    count_B: jax.Array


def extend(
    model: Decoder,
    route: Threshold,
    cache: Cache,
    tokens_BT: jax.Array,
    count_B: jax.Array,
    every_layer: bool = False,
) -> tuple[jax.Array, Cache]:
    """Runs the next tokens of every sequence.

    Args:
      model: any architecture.
      route: the thresholds of its sparse layers.
      cache: what the sequences have seen; every buffer has room for the new tokens (`Generator`
        sees to it). Donate it, or every step copies all of it.
      tokens_BT: int32 tokens.
      count_B: int32, how many of them count, from the left: 0 leaves a sequence as it is.
      every_layer: runs the block of every sparse layer and masks its result where no token is
        routed. The result is the same: it shows what decoding costs where layers are not skipped.

    Returns:
      The states [B, T, D] after the final norm, undefined where a token does not count, and the
      new cache.
    """
    backbone = model.config.backbone
    position_BT = cache.length_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    new = _New(
        rotary_phases(position_BT, backbone.head_dim, backbone.rope_base),
        jnp.arange(tokens_BT.shape[1]) < count_B[:, None],
        cache.length_B,
        count_B,
    )
    x_BTD = model.embedding[...][tokens_BT].astype(model.config.compute.value)
    prefix = cache.prefix
    if prefix is not None:
        layers = prefix.keys.shape[0]
        step = lambda n, carry: _dense(model.prefix, (n,), carry[0], carry[1], new)
        x_BTD, prefix = lax.fori_loop(0, layers, step, (x_BTD, prefix))
    groups = []
    for stages, thresholds_NS, group in zip(model.groups, route.values, cache.groups, strict=True):
        x_BTD, group = _run_group(model, stages, thresholds_NS, x_BTD, group, new, every_layer)
        groups.append(group)
    new_cache = Cache(cache.length_B + count_B, prefix, tuple(groups))
    return model.final_norm(x_BTD), new_cache


def decode_step(
    model: Decoder,
    route: Threshold,
    cache: Cache,
    tokens_B: jax.Array,
    running_B: jax.Array,
    every_layer: bool = False,
) -> tuple[jax.Array, Cache]:
    """Runs one token of every sequence that is `running_B`: float32 logits [B, V], new cache."""
    count_B = running_B.astype(jnp.int32)
    states_B1D, cache = extend(model, route, cache, tokens_B[:, None], count_B, every_layer)
    return model.logits(states_B1D)[:, 0], cache


def cast_once(model: Decoder) -> Decoder:
    """The model with parameters in the dtype that decoding reads them in; it decodes the same.

    Matrices and norms are cast to the compute dtype at each use; routers, gates and the experts'
    biases are read in float32 and stay so.
    """
    dtype = model.config.compute.value

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if _STAYS.search(jax.tree_util.keystr(path)) else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, model)


def _dense(
    blocks: Any, index: tuple[Any, ...], x_BTD: jax.Array, store: Rows, new: _New
) -> tuple[jax.Array, Rows]:
    """A layer for every token (dense, of experts, or a lead's attention), and its cache."""
    block = pick(blocks, index)

    def attend(q_BTHE, k_BTGE, v_BTGE):
        rows = caches.append(store, index, (k_BTGE, v_BTGE), new.start_B, new.count_B)
        return caches.read(q_BTHE, rows, index, new.phases.position_BL), rows

    a_BTD, store = block.attention.through(attend, block.attention_norm(x_BTD), new.phases)
    x_BTD = x_BTD + a_BTD
    if isinstance(block, AttentionLayer):
        return x_BTD, store
    h_BTD = block.ffn_norm(x_BTD)
    if isinstance(block, MoEBlock):
        if new.real_BT.size * block.ffn.active < block.ffn.router.shape[-1]:
            # Fewer copies of tokens than experts: the others are not even read.
            return x_BTD + block.ffn.of_few(blocks.ffn, index, h_BTD), store
        return x_BTD + block.ffn(h_BTD, new.real_BT, None)[0], store
    return x_BTD + block.ffn(h_BTD), store


def _run_group(
    model: Decoder,
    stages: Stages,
    thresholds_NS: jax.Array,
    x_BTD: jax.Array,
    cache: GroupCache,
    new: _New,
    every_layer: bool,
) -> tuple[jax.Array, GroupCache]:
    """All stages of a group, each a loop over its routed layers and then its anchor."""
    N, S = thresholds_NS.shape
    P = 1 if cache.lead is None else cache.lead.keys.shape[1]
    routers_NSD, config = stages.sparse.router[...], model.config
    full_kv = config.routing.sparse is Sparse.FULL_KV
    every_layer |= full_kv  # every layer has keys and values to keep
    settings = config.routing.bias_scale, config.hierarchy.sparsity, full_kv, every_layer, new
    cut = lambda leaf, n, s: lax.dynamic_slice_in_dim(leaf[n], s, S // P)

    def interval(n, p, carry):
        x_BTD, cache = carry
        if cache.lead is not None:
            x_BTD, lead = _dense(stages.lead, (n, p), x_BTD, cache.lead, new)
            cache = cache._replace(lead=lead)
        first = n, p * (S // P)
        router_SD, threshold_S = cut(routers_NSD, *first), cut(thresholds_NS, *first)
        sparse = _Sparse(stages.sparse, first, router_SD, threshold_S, *settings)
        return _run_interval(sparse, x_BTD, cache)

    def stage(n, carry):
        x_BTD, cache = _repeat(P, functools.partial(interval, n), carry)
        if cache.anchor is not None:
            x_BTD, anchor = _dense(stages.anchor, (n,), x_BTD, cache.anchor, new)
            cache = cache._replace(anchor=anchor)
        return x_BTD, cache

    return _repeat(N, stage, (x_BTD, cache))


def _repeat(count: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """``body(n, carry)`` for n below `count`; no loop around a single turn."""
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


class _Sparse(NamedTuple):
    """The sparse layers of one interval, and the tokens that pass them; constants of its loop.

    Attributes:
      layers: parameters of the group's sparse layers [N, S, ...].
      first: stage and layer at which the interval starts.
      router_SD: its routers.
      threshold_S: its thresholds.
      tau: scale of the token-choice bias.
      sparsity: K.
      full_kv: whether the layers attend to every token (Selected-Q/full-KV).
      every_layer: whether layers without a routed token get a turn.
      new: the tokens.
    """

    layers: Any
    first: tuple[Any, Any]
    router_SD: jax.Array
    threshold_S: jax.Array
    tau: float
    sparsity: int
    full_kv: bool
    every_layer: bool
    new: _New


class _Now(NamedTuple):
    """What changes from one sparse layer to the next.

    Attributes:
      s: the layer that comes; S behind the last.
      x_BTD: the stream.
      logits_BTS: router logits of all layers, of the stream as it is now.
      chosen_BT: updates of each token in this interval.
      cache: of the group.
    """

    s: jax.Array
    x_BTD: jax.Array
    logits_BTS: jax.Array
    chosen_BT: jax.Array
    cache: GroupCache


def _run_interval(
    sparse: _Sparse, x_BTD: jax.Array, cache: GroupCache
) -> tuple[jax.Array, GroupCache]:
    """The sparse layers of an interval: a turn of the loop for each that has a routed token."""
    S = len(sparse.threshold_S)
    layer_S = jnp.arange(S, dtype=jnp.int32)

    def next_layer(s, logits_BTS, chosen_BT):
        if sparse.every_layer:
            return s
        z_BTS = logits_BTS - sparse.tau * chosen_BT[..., None]
        enters_BTS = (z_BTS >= sparse.threshold_S) & sparse.new.real_BT[..., None]
        due_S = jnp.any(enters_BTS, axis=(0, 1)) & (layer_S >= s)
        return jnp.min(jnp.where(due_S, layer_S, S))

    def layer(now: _Now) -> _Now:
        logits_BT = lax.dynamic_index_in_dim(now.logits_BTS, now.s, 2, keepdims=False)
        z_BT = logits_BT - sparse.tau * now.chosen_BT
        mask_BT = (z_BT >= sparse.threshold_S[now.s]) & sparse.new.real_BT
        if sparse.full_kv:
            now = now._replace(cache=_keep_all(sparse, now))
        now = _in_bucket(sparse, mask_BT, z_BT, now)
        chosen_BT = now.chosen_BT + mask_BT
        s = next_layer(now.s + 1, now.logits_BTS, chosen_BT)
        return now._replace(s=s, chosen_BT=chosen_BT)

    logits_BTS = read_logits(x_BTD, sparse.router_SD)
    chosen_BT = jnp.zeros(x_BTD.shape[:2], logits_BTS.dtype)
    s = next_layer(jnp.zeros((), jnp.int32), logits_BTS, chosen_BT)
    start = _Now(s, x_BTD, logits_BTS, chosen_BT, cache)
    end = lax.while_loop(lambda now: now.s < S, layer, start)
    return end.x_BTD, end.cache


def _at(sparse: _Sparse, now: _Now) -> tuple[Any, Any]:
    """Index of the layer that comes in the group's stacks."""
    n, first = sparse.first
    return n, first + now.s


def _keep_all(sparse: _Sparse, now: _Now) -> GroupCache:
    """Selected-Q/full-KV: every new token's keys and values, whether it is routed or not."""
    at, block, new = _at(sparse, now), sparse.layers.block, sparse.new
    norm, attention = pick((block.attention_norm, block.attention), at)
    store = now.cache.sparse
    assert store is not None
    kept = caches.append(store, at, attention.keys_values(norm(now.x_BTD), new.phases), *new[2:])
    return now.cache._replace(sparse=kept)


def _in_bucket(sparse: _Sparse, mask_BT: jax.Array, z_BT: jax.Array, now: _Now) -> _Now:
    """The layer on its routed rows, in the smallest bucket that holds those of every sequence.

    As in `nn.threshold_stage`, a bucket is a loop of one turn or none: it changes the caches in
    place, where a switch between buckets would copy them.
    """
    sizes = routing.bucket_sizes(mask_BT.shape[1], sparse.sparsity)
    if len(sizes) == 2 and not sparse.full_kv:  # the loop over layers stops at no idle one
        return _routed_layer(sparse, sizes[1], mask_BT, z_BT, now)
    which = jnp.searchsorted(jnp.asarray(sizes), jnp.max(jnp.sum(mask_BT, axis=-1)))

    def turn(size, zero, now):
        # All depends on the turn, so that the compiler moves none of it out of an idle loop.
        after = _routed_layer(
            sparse, size, mask_BT & (zero == 0), z_BT, now._replace(s=now.s + zero)
        )
        return after._replace(s=now.s)

    for k, size in enumerate(sizes[1:], 1):
        turns = (which == k).astype(jnp.int32)
        now = lax.fori_loop(0, turns, functools.partial(turn, size), now)
    return now


def _routed_layer(
    sparse: _Sparse, size: int, mask_BT: jax.Array, z_BT: jax.Array, now: _Now
) -> _Now:
    """A sparse layer's block on at most `size` routed rows of each sequence."""
    at, cache = _at(sparse, now), now.cache
    layer = pick(sparse.layers, at)
    block = layer.block
    take, put = _rows_of(mask_BT, size)
    rows_BMD, phases = take(now.x_BTD), jax.tree.map(take, sparse.new.phases)
    count_B = jnp.sum(mask_BT, axis=-1, dtype=jnp.int32)
    start_B = cache.count_NSB[at]
    a_BMD = jnp.zeros_like(rows_BMD)
    if not isinstance(block, FFNBlock):
        attend = functools.partial(_attend, sparse, at, cache.sparse, phases, start_B, count_B)
        h_BMD = block.attention_norm(rows_BMD)
        a_BMD, store = block.attention.through(attend, h_BMD, phases)
        cache = cache._replace(sparse=store)
    f_BMD = block.ffn(block.ffn_norm(rows_BMD + a_BMD))
    score_BM = jax.nn.sigmoid(take(z_BT))
    new_BMD = updated(layer, rows_BMD, a_BMD, f_BMD, score_BM).astype(rows_BMD.dtype)
    return now._replace(
        x_BTD=put(now.x_BTD, new_BMD),
        logits_BTS=put(now.logits_BTS, read_logits(new_BMD, sparse.router_SD)),
        cache=cache._replace(count_NSB=cache.count_NSB.at[at].set(start_B + count_B)),
    )


def _attend(sparse, at, store, phases, start_B, count_B, q_BMHE, k_BMGE, v_BMGE):
    """Attention of the routed rows: among themselves and those before them, or to every token."""
    if sparse.full_kv:
        return caches.read(q_BMHE, store, at, phases.position_BL), store
    store = caches.append(store, at, (k_BMGE, v_BMGE), start_B, count_B)
    slot_BM = start_B[:, None] + jnp.arange(q_BMHE.shape[1], dtype=jnp.int32)
    return caches.read(q_BMHE, store, at, slot_BM), store


def _rows_of(
    mask_BT: jax.Array, size: int
) -> tuple[Callable[[jax.Array], jax.Array], Callable[[jax.Array, jax.Array], jax.Array]]:
    """How to take the marked rows out of [B, T, ...], and how to put new ones back."""
    if mask_BT.shape[1] == 1:  # of one token the row is there already, and may keep its value
        marked = lambda x: mask_BT.reshape(mask_BT.shape + (1,) * (x.ndim - 2))
        return lambda x: x, lambda x, rows: jnp.where(marked(x), rows, x)
    idx_BM = routing.compact(mask_BT, size)
    return (
        lambda x: routing.take_rows(x, idx_BM),
        lambda x, rows: routing.put_rows(x, idx_BM, rows),
    )
