"""Keys and values of the past: of every token in dense layers, of the routed ones in sparse layers.

A sparse layer attends among its routed tokens only, so its cache holds no others and has a count of
its own for every sequence; a whole X-MoD then needs about the memory of its dense twin. Keys are
kept as attention reads them, rotated to their original positions, and rows in the order of those
positions: a row sees the rows before it, and positions need not be kept.

Buffers are stacked like the parameters and change in place: they are carried through the loops over
layers, never scanned over, and a step takes them by donation.

Shapes: B sequences, T new rows of a sequence, M rows of a buffer, G key/value heads, E head dim,
H query heads, R = H/G query heads of a key/value head, Q = R*T queries of a key/value head, c rows
of a chunk, N stages, S sparse layers of a stage, P leads of a stage.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.config import ModelConfig, Sparse
from xmod_jax.hierarchy import StageGroup
from xmod_jax.nn.routing import capacity

ROUTED_SLACK = 1.25  # rows of a sparse layer's buffer over those of evenly routed tokens
_FEW_ROWS = 8  # buffers have a multiple of this
# Elements of a slice of keys. On CPU larger ones are copied by several threads, which takes longer
# to arrange than to do, and leave the fast cache before they are used.
_CHUNK_ELEMENTS = 1 << 15
_FEWEST_CHUNK_ROWS = 64
_MASKED = -1e30  # finite, so that a row's maximum never turns into inf - inf


class Rows(NamedTuple):
    """Keys and values [..., B, G, M, E]; the leading axes are those of the layers' parameters."""

    keys: jax.Array
    values: jax.Array


class GroupCache(NamedTuple):
    """The caches of one stage group.

    Attributes:
      sparse: [N, S, B, G, M, E]; None where sparse layers have no attention. Selected-Q/full-KV
        keeps every token here.
      count_NSB: int32, tokens routed to each sparse layer so far.
      anchor: [N, B, G, M, E].
      lead: [N, P, B, G, M, E].
    """

    sparse: Rows | None
    count_NSB: jax.Array
    anchor: Rows | None
    lead: Rows | None


class Cache(NamedTuple):
    """What decoding knows of the past.

    Attributes:
      length_B: int32, tokens of each sequence so far.
      prefix: of the dense prefix [layers, B, G, M, E].
      groups: of the stage groups.
    """

    length_B: jax.Array
    prefix: Rows | None
    groups: tuple[GroupCache, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


def routed_rows(tokens: int, sparsity: int) -> int:
    """Rows that a sparse layer's buffer starts with for a sequence of so many tokens."""
    return round_up(min(tokens, int(ROUTED_SLACK * capacity(tokens, sparsity))))


def round_up(rows: int) -> int:
    """The next size that a buffer may have."""
    return max(_FEW_ROWS, -(-rows // _FEW_ROWS) * _FEW_ROWS)


def empty(config: ModelConfig, batch: int, tokens: int, routed: int) -> Cache:
    """A cache without any token.

    Args:
      config: the model.
      batch: B.
      tokens: most tokens of a sequence, prompt and generated ones.
      routed: most of them that one sparse layer may get; `grow` makes room for more.
    """
    backbone = config.backbone

    def rows(size: int, *layers: int) -> Rows:
        shape = (*layers, batch, backbone.num_kv_heads, round_up(size), backbone.head_dim)
        return Rows(*(jnp.zeros(shape, config.compute.value) for _ in range(2)))

    def group(stages: StageGroup) -> GroupCache:
        layers = stages.count, stages.sparse_layers
        kind = config.routing.sparse
        size = tokens if kind is Sparse.FULL_KV else routed
        return GroupCache(
            None if kind is Sparse.FFN else rows(size, *layers),
            jnp.zeros((*layers, batch), jnp.int32),
            rows(tokens, stages.count) if stages.anchor else None,
            rows(tokens, stages.count, stages.attentions) if stages.attentions else None,
        )

    hierarchy = config.hierarchy
    prefix = rows(tokens, hierarchy.prefix) if hierarchy.prefix else None
    return Cache(jnp.zeros(batch, jnp.int32), prefix, tuple(map(group, hierarchy.groups)))


def keeps_routed_rows(config: ModelConfig) -> bool:
    """Whether sparse layers have buffers that can be too small for what is routed."""
    return bool(config.hierarchy.groups) and config.routing.sparse is Sparse.LAYER


def fullest(cache: Cache) -> jax.Array:
    """int32, most tokens that one sparse layer has got of one sequence; 0 without such layers."""
    counts = [jnp.max(group.count_NSB) for group in cache.groups]
    return functools.reduce(jnp.maximum, counts, jnp.zeros((), jnp.int32))


def routed_size(cache: Cache) -> int:
    """Rows of the sparse layers' buffers."""
    stores = [group.sparse for group in cache.groups]
    assert stores and stores[0] is not None
    return stores[0].keys.shape[-2]


def resize_routed(cache: Cache, rows: int) -> Cache:
    """The cache with `rows` rows in the buffers of routed tokens; needs as many as `fullest`."""

    def one(buffer: jax.Array) -> jax.Array:
        more = rows - buffer.shape[-2]
        if more <= 0:
            return buffer[..., :rows, :]
        return jnp.pad(buffer, (*[(0, 0)] * (buffer.ndim - 2), (0, more), (0, 0)))

    groups = tuple(group._replace(sparse=jax.tree.map(one, group.sparse)) for group in cache.groups)
    return cache._replace(groups=groups)


def append(
    store: Rows, layer: tuple[Any, ...], new: tuple[jax.Array, jax.Array], start_B, count_B
) -> Rows:
    """Writes the first `count_B` new rows of every sequence from row `start_B` on.

    Args:
      store: the buffers.
      layer: index of the layer in their leading axes.
      new: keys and values [B, T, G, E]; T is at most the M of the buffers.
      start_B: int32.
      count_B: int32; ``start_B + count_B`` is at most M (whoever calls sees to it).
    """

    rows = [leaf.swapaxes(1, 2).astype(store.keys.dtype) for leaf in new]
    B, G, T, E = rows[0].shape
    window = (*[1] * (len(layer) + 1), G, T, E)

    def sequence(b, store: Rows) -> Rows:
        # The window cannot reach past the buffer, where the update would be moved back over older
        # rows: so it is moved back here, and the new rows forth within it.
        first = jnp.minimum(start_B[b], store.keys.shape[-2] - T)
        shift = start_B[b] - first
        at = (*layer, b, 0, first, 0)
        slot_T = jnp.arange(T) - shift
        written_T1 = ((slot_T >= 0) & (slot_T < count_B[b]))[:, None]

        def one(buffer: jax.Array, rows_BGTE: jax.Array) -> jax.Array:
            rows_GTE = jnp.roll(lax.dynamic_index_in_dim(rows_BGTE, b, 0, False), shift, axis=1)
            old = lax.dynamic_slice(buffer, at, window)
            fresh = jnp.where(written_T1, rows_GTE.reshape(window), old)
            return lax.dynamic_update_slice(buffer, fresh, at)

        return Rows(one(store.keys, rows[0]), one(store.values, rows[1]))

    return sequence(0, store) if B == 1 else lax.fori_loop(0, B, sequence, store)


def read(q_BTHE: jax.Array, store: Rows, layer: tuple[Any, ...], slot_BT: jax.Array) -> jax.Array:
    """Attention of new rows to the rows of a layer's buffer up to their own.

    Args:
      q_BTHE: queries, rotary phases already applied.
      store: the buffers, the new rows appended.
      layer: index of the layer in their leading axes.
      slot_BT: int32, the buffer's row that belongs to each query.

    Returns:
      [B, T, H, E] in the dtype of the queries, softmax in at least float32. The buffer is read in
      chunks, as far as the last slot.
    """
    B, T, H, E = q_BTHE.shape
    G, M = store.keys.shape[-3:-1]
    wide = jnp.promote_types(jnp.float32, q_BTHE.dtype)
    q_BTHE = q_BTHE * jnp.asarray(E**-0.5, q_BTHE.dtype)
    q_BGQE = q_BTHE.reshape(B, T, G, H // G, E).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, E)
    slot_BQ = jnp.tile(slot_BT, (1, H // G))
    c = min(M, max(_FEWEST_CHUNK_ROWS, _CHUNK_ELEMENTS // (B * G * E)))
    chunks = jnp.minimum(jnp.max(slot_BT), M - 1) // c + 1
    attend = _attend_row if T == 1 else _attend_rows
    o_BGQE = attend(q_BGQE, functools.partial(_cut, layer, c), store, slot_BQ, chunks, wide)
    o_BGQE = o_BGQE.astype(q_BTHE.dtype)
    return o_BGQE.reshape(B, G, H // G, T, E).transpose(0, 3, 1, 2, 4).reshape(B, T, H, E)


def _cut(layer: tuple[Any, ...], c: int, buffer: jax.Array, j: Any) -> tuple[jax.Array, Any]:
    """Chunk j [B, G, c, E] of a layer's buffer, and its first row.

    The last chunk is moved back to end with the buffer, and reads some rows again.
    """
    B, G, M, E = buffer.shape[-4:]
    first = jnp.minimum(j * c, M - c)
    at = (*layer, 0, 0, first, 0)
    rows = lax.dynamic_slice(buffer, at, (*[1] * len(layer), B, G, c, E))
    return rows.reshape(B, G, c, E), first


def _over_chunks(cut: Any, store: Rows, chunks: Any, body: Any, carry: Any) -> Any:
    if cut.args[1] == store.keys.shape[-2]:
        # A loop of one chunk would hoist the whole layer's slice, which copies the buffers.
        return body(0, carry)
    return lax.fori_loop(0, chunks, body, carry)


def _attend_row(q_BGQE, cut, store: Rows, slot_BQ, chunks, wide):
    """All scores first, then the values: for few queries that takes fewer operations a chunk."""
    M = store.keys.shape[-2]

    def score(j, s_BGQM):
        k_BGcE, first = cut(store.keys, j)
        s_BGQc = jnp.einsum("bgqe,bgce->bgqc", q_BGQE, k_BGcE, preferred_element_type=wide)
        return lax.dynamic_update_slice(s_BGQM, s_BGQc, (0, 0, 0, first))

    def value(j, o_BGQE):
        v_BGcE, first = cut(store.values, j)
        p_BGQc = lax.dynamic_slice_in_dim(p_BGQM, first, v_BGcE.shape[2], 3)
        fresh_c = first + jnp.arange(v_BGcE.shape[2]) >= j * v_BGcE.shape[2]
        p_BGQc = jnp.where(fresh_c, p_BGQc, 0).astype(q_BGQE.dtype)
        pv_BGQE = jnp.einsum("bgqc,bgce->bgqe", p_BGQc, v_BGcE, preferred_element_type=wide)
        return o_BGQE + pv_BGQE

    s_BGQM = jnp.full((*q_BGQE.shape[:3], M), _MASKED, wide)
    s_BGQM = _over_chunks(cut, store, chunks, score, s_BGQM)
    seen_BQM = jnp.arange(M) <= slot_BQ[..., None]
    s_BGQM = jnp.where(seen_BQM[:, None], s_BGQM, _MASKED)
    p_BGQM = jax.nn.softmax(s_BGQM, axis=-1)
    return _over_chunks(cut, store, chunks, value, jnp.zeros(q_BGQE.shape, wide))


def _attend_rows(q_BGQE, cut, store: Rows, slot_BQ, chunks, wide):
    """Chunk by chunk with a running maximum: no scores of all queries with all rows are held."""

    def chunk(j, carry):
        top_BGQ, sum_BGQ, acc_BGQE = carry
        k_BGcE, first = cut(store.keys, j)
        v_BGcE, _ = cut(store.values, j)
        c = k_BGcE.shape[2]
        row_c = first + jnp.arange(c)
        seen_BQc = (row_c <= slot_BQ[..., None]) & (row_c >= j * c)
        s_BGQc = jnp.einsum("bgqe,bgce->bgqc", q_BGQE, k_BGcE, preferred_element_type=wide)
        s_BGQc = jnp.where(seen_BQc[:, None], s_BGQc, _MASKED)
        new_BGQ = jnp.maximum(top_BGQ, s_BGQc.max(-1))
        p_BGQc = jnp.exp(s_BGQc - new_BGQ[..., None])
        shrink_BGQ = jnp.exp(top_BGQ - new_BGQ)
        p = p_BGQc.astype(q_BGQE.dtype)
        pv_BGQE = jnp.einsum("bgqc,bgce->bgqe", p, v_BGcE, preferred_element_type=wide)
        acc_BGQE = acc_BGQE * shrink_BGQ[..., None] + pv_BGQE
        return new_BGQ, sum_BGQ * shrink_BGQ + p_BGQc.sum(-1), acc_BGQE

    empty_BGQ = jnp.full(q_BGQE.shape[:3], _MASKED, wide)
    carry = empty_BGQ, jnp.zeros_like(empty_BGQ), jnp.zeros(q_BGQE.shape, wide)
    _, sum_BGQ, acc_BGQE = _over_chunks(cut, store, chunks, chunk, carry)
    return acc_BGQE / sum_BGQ[..., None]
