"""Products of rows with the matrix of their group: what experts are made of.

Rows stand sorted by group, each group at a multiple of `block` rows, so that a block of rows has
one matrix. Nothing is dropped, whatever the sizes of the groups.

On CPU, where `jax.lax.ragged_dot` multiplies every row with every matrix, blocks go one by one, or
all at once where the matrices are small; on an accelerator `ragged_dot` is used where a probe finds
it sound.

Shapes: T tokens, k groups of a token, X groups, M rows (padding included), I and O matrix sizes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn.precision import full_einsum

RAGGED = 0  # the `block` that stands for `jax.lax.ragged_dot`
_MAX_BLOCK = 128
_SMALL_MATRIX = 1 << 13  # elements
# ``[M, I], [M, O] -> [X, I, O]``: products over the rows of each group.
_BY_GROUP = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


class Groups(NamedTuple):
    """Which rows belong to which group.

    Attributes:
      size_X: int32, rows of every group.
      slot_Tk: int32, the row that holds a token's k-th copy; M for a copy that has no group.
      token_M: int32, the token that a row holds; T for padding.
    """

    size_X: jax.Array
    slot_Tk: jax.Array
    token_M: jax.Array


def block_rows(count: int, groups: int) -> int:
    """Rows of a block for `count` rows in `groups` groups; `RAGGED` where that is faster.

    Half the mean size of a group: larger blocks are padding, smaller ones are slow products.
    """
    if _ragged_dot_is_sound(jax.default_backend()):
        return RAGGED
    rows = 8
    while 2 * rows <= min(_MAX_BLOCK, count / groups / 2):
        rows *= 2
    return rows


def sort_by_group(group_Tk: jax.Array, groups: int, block: int) -> Groups:
    """Places every copy of every token in a row of its group, in the order of the tokens.

    Args:
      group_Tk: int32 group of each copy, 0 .. X - 1; X drops the copy.
      groups: X.
      block: from `block_rows`.
    """
    T, k = group_Tk.shape
    align = max(1, block)
    M = -(-(T * k + min(groups, T * k) * (align - 1)) // align) * align
    flat = group_Tk.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    size_X = jax.ops.segment_sum(jnp.ones_like(flat), flat, num_segments=groups)
    first_X = jnp.cumsum(size_X) - size_X
    aligned_X = -(-size_X // align) * align
    start_X = jnp.cumsum(aligned_X) - aligned_X
    # Rank within the group, from where the group starts in sorted order.
    sorted_ = flat[order]
    home = jnp.minimum(sorted_, groups - 1)
    slot = start_X[home] + jnp.arange(T * k, dtype=jnp.int32) - first_X[home]
    slot = jnp.where(sorted_ < groups, slot, M)
    slot_Tk = jnp.zeros(T * k, jnp.int32).at[order].set(slot, unique_indices=True).reshape(T, k)
    token_M = jnp.full(M, T, jnp.int32).at[slot].set((order // k).astype(jnp.int32), mode="drop")
    return Groups(size_X.astype(jnp.int32), slot_Tk, token_M)


@jax.custom_vjp
def spread(x_TD: jax.Array, groups: Groups) -> jax.Array:
    """Rows [M, D] of the groups; padding is zero."""
    return x_TD.at[groups.token_M].get(mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows_MD: jax.Array, weight_Tk: jax.Array, groups: Groups) -> jax.Array:
    """Sum over a token's copies of weight times row, [T, D]; a dropped copy counts zero."""
    return full_einsum("tkd,tk->td", _copies(rows_MD, groups), weight_Tk.astype(rows_MD.dtype))


def _copies(rows_MD, groups):
    return rows_MD.at[groups.slot_Tk].get(mode="fill", fill_value=0)


# Each row holds one copy, so both transposes are gathers too: no scatter-add anywhere.
spread.defvjp(
    lambda x_TD, groups: (spread(x_TD, groups), groups),
    lambda groups, bar_MD: (jnp.sum(_copies(bar_MD, groups), axis=1), None),
)


def _collect_backward(saved, bar_TD):
    rows_MD, weight_Tk, groups = saved
    wide = weight_Tk.dtype
    copies_TkD = _copies(rows_MD, groups)
    dweight_Tk = full_einsum("tkd,td->tk", copies_TkD, bar_TD, preferred_element_type=wide)
    # The weight of each row, by way of the slots: padding keeps zero.
    weight_M = jnp.zeros(len(rows_MD), weight_Tk.dtype)
    weight_M = weight_M.at[groups.slot_Tk.reshape(-1)].set(weight_Tk.reshape(-1), mode="drop")
    drows_MD = spread(bar_TD, groups) * weight_M.astype(bar_TD.dtype)[:, None]
    return drows_MD, dweight_Tk, None


collect.defvjp(
    lambda rows_MD, weight_Tk, groups: (
        collect(rows_MD, weight_Tk, groups),
        (rows_MD, weight_Tk, groups),
    ),
    _collect_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    rows_MI: jax.Array, weight_XIO: jax.Array, size_X: jax.Array, block: int
) -> jax.Array:
    """Every group's rows times its matrix, [M, O] in the dtype of the rows.

    Args:
      rows_MI: rows in the order of `sort_by_group`; those of padding are zero, and stay so.
      weight_XIO: a matrix for every group, cast to the dtype of the rows.
      size_X: int32 rows of every group.
      block: what the rows were sorted with.
    """
    weight_XIO = weight_XIO.astype(rows_MI.dtype)
    if block == RAGGED:
        return lax.ragged_dot(rows_MI, weight_XIO, size_X)
    if _is_small(weight_XIO):
        rows_nRI = rows_MI.reshape(-1, block, rows_MI.shape[1])
        out_nRO = jnp.einsum(
            "nri,nio->nro", rows_nRI, weight_XIO[_group_of_block(size_X, rows_nRI)]
        )
        return out_nRO.reshape(len(rows_MI), -1)
    out_MO = jnp.zeros((len(rows_MI), weight_XIO.shape[2]), rows_MI.dtype)

    def group(x, out_MO, first, last):
        weight_IO = lax.dynamic_index_in_dim(weight_XIO, x, 0, False)

        def one(n, out_MO):
            part_RI = lax.dynamic_slice_in_dim(rows_MI, n * block, block)
            return lax.dynamic_update_slice_in_dim(out_MO, part_RI @ weight_IO, n * block, 0)

        return lax.fori_loop(first, last, one, out_MO)

    return _over_groups(group, out_MO, size_X, block)


def _is_small(weight_XIO) -> bool:
    """Whether to copy the matrix for every block: cheaper than a loop's turn for every block."""
    return weight_XIO.shape[1] * weight_XIO.shape[2] <= _SMALL_MATRIX


def _group_of_block(size_X, rows_nRI) -> jax.Array:
    """The group of every block, ascending; blocks of padding behind the last group count to it."""
    n, block = rows_nRI.shape[:2]
    end_X = jnp.cumsum(-(-size_X // block))
    group_n = jnp.searchsorted(end_X, jnp.arange(n, dtype=end_X.dtype), side="right")
    return jnp.minimum(group_n, len(size_X) - 1)


def _over_groups(group, carry, size_X, block):
    """Runs ``group(x, carry, first block, end)`` over all groups in turn."""
    end_X = jnp.cumsum(-(-size_X // block))

    def step(carry, item):
        x, first, end = item
        return group(x, carry, first, end), None

    first_X = jnp.concatenate([jnp.zeros(1, end_X.dtype), end_X[:-1]])
    return lax.scan(step, carry, (jnp.arange(len(size_X)), first_X, end_X))[0]


def _grouped_backward(block, saved, bar_MO):
    rows_MI, weight_XIO, size_X = saved
    weight_XOI = weight_XIO.swapaxes(1, 2)
    if block == RAGGED:
        drows_MI = lax.ragged_dot(bar_MO, weight_XOI.astype(bar_MO.dtype), size_X)
        # Not by autodiff, whose sum over a group's rows would be in the dtype of the rows.
        dweight_XIO = lax.ragged_dot_general(
            rows_MI, bar_MO, size_X, _BY_GROUP, preferred_element_type=weight_XIO.dtype
        )
        return drows_MI, dweight_XIO, None
    if _is_small(weight_XIO):
        rows_nRI = rows_MI.reshape(-1, block, rows_MI.shape[1])
        bar_nRO = bar_MO.reshape(-1, block, bar_MO.shape[1])
        group_n = _group_of_block(size_X, rows_nRI)
        drows_nRI = jnp.einsum("nro,nio->nri", bar_nRO, weight_XIO.astype(bar_MO.dtype)[group_n])
        dweight_nIO = jnp.einsum(
            "nri,nro->nio", rows_nRI, bar_nRO, preferred_element_type=weight_XIO.dtype
        )
        dweight_XIO = jax.ops.segment_sum(dweight_nIO, group_n, len(size_X), True)
        return drows_nRI.reshape(rows_MI.shape), dweight_XIO, None
    drows_MI = jnp.zeros(rows_MI.shape, rows_MI.dtype)

    def group(x, carry, first, end):
        drows_MI, dweight_XIO = carry
        weight_IO = lax.dynamic_index_in_dim(weight_XIO, x, 0, False).astype(bar_MO.dtype)

        def one(n, carry):
            drows_MI, dweight_IO = carry
            bar_RO = lax.dynamic_slice_in_dim(bar_MO, n * block, block)
            part_RI = lax.dynamic_slice_in_dim(rows_MI, n * block, block)
            drows_RI = jnp.einsum("ro,io->ri", bar_RO, weight_IO)
            dweight_IO += jnp.einsum(
                "ri,ro->io", part_RI, bar_RO, preferred_element_type=dweight_IO.dtype
            )
            return lax.dynamic_update_slice_in_dim(drows_MI, drows_RI, n * block, 0), dweight_IO

        zero_IO = jnp.zeros(weight_XIO.shape[1:], weight_XIO.dtype)
        drows_MI, dweight_IO = lax.fori_loop(first, end, one, (drows_MI, zero_IO))
        return drows_MI, lax.dynamic_update_index_in_dim(dweight_XIO, dweight_IO, x, 0)

    start = drows_MI, lax.empty(weight_XIO.shape, weight_XIO.dtype)
    return *_over_groups(group, start, size_X, block), None


grouped_matmul.defvjp(
    lambda rows_MI, weight_XIO, size_X, block: (
        grouped_matmul(rows_MI, weight_XIO, size_X, block),
        (rows_MI, weight_XIO, size_X),
    ),
    _grouped_backward,
)


@functools.cache
def _ragged_dot_is_sound(backend: str) -> bool:
    """Whether products by `ragged_dot` and their gradient neither are dense nor need much memory.

    A dense form multiplies every row with every matrix, or holds a masked copy of the rows for
    every group; both show in the compiled program before anything runs.
    """
    if backend == "cpu":
        return False
    X, rows, size = 16, 1024, 256
    shapes = (
        jax.ShapeDtypeStruct((rows, size), jnp.bfloat16),
        jax.ShapeDtypeStruct((X, size, size), jnp.float32),
        jax.ShapeDtypeStruct((X,), jnp.int32),
    )
    loss = lambda *each: jnp.sum(grouped_matmul(*each, RAGGED))
    return _is_lean(jax.grad(loss, argnums=(0, 1)), shapes, 3 * 2 * rows * size * size)


def _is_lean(function, shapes, flops: float) -> bool:
    """Whether the compiled function takes at most twice `flops` and little temporary memory."""
    compiled = jax.jit(function).lower(*shapes).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None or memory is None:
        return False
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    # Where the compiler tells no FLOPs, nothing shows that the products are not dense.
    counted = cost.get("flops", float("inf"))
    return counted <= 2 * flops and memory.temp_size_in_bytes <= 4 * arrays
