"""What the devices of a mesh exchange inside a step; nothing at all outside of one.

A step runs as one program for each device (`jax.shard_map`), which sees its own sequences, its
parts of the parameters, and talks to others through these functions alone. So routing, sorting,
gathers and scatters along a sequence stay where the sequence is, by construction.

Each function asks JAX which axes the program is spread over: without a mesh, and along an axis of
one device, it does nothing. Differentiation happens inside the program, so the transposes are
written here: the gradient of a device is that of its own sequences' loss.

Shapes: Y matrices of a stack, M and N rows and columns of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.sharding import AXES, BATCH_AXES, FSDP, TENSOR, axes_of, of_heads

T = TypeVar("T")


def _spread_over(axes: Iterable[str | None]) -> tuple[str, ...]:
    """Those of `axes` along which the running program has several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in axes if a is not None and a in mesh.manual_axes and mesh.shape[a] > 1)


def _devices(axes: Iterable[str]) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes)


def gathered(params: T, dtype: Any) -> T:
    """Parameters of one layer, or the like, whole along `fsdp`.

    They travel in `dtype`, the precision that they are used in, and come back as they were; their
    gradients are summed in the precision of the parameters.
    """
    if not _spread_over([FSDP]):
        return params

    def gather(path: Any, leaf: jax.Array) -> jax.Array:
        axes = axes_of(path)
        return _gather(leaf, axes.index(FSDP) - 2, jnp.dtype(dtype)) if FSDP in axes else leaf

    return jax.tree_util.tree_map_with_path(gather, params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(part, axis, dtype):
    whole = lax.all_gather(part.astype(dtype), FSDP, axis=part.ndim + axis, tiled=True)
    return whole.astype(part.dtype)


def _gather_backward(axis, dtype, _, bar):
    return (lax.psum_scatter(bar, FSDP, scatter_dimension=bar.ndim + axis, tiled=True),)


_gather.defvjp(lambda part, axis, dtype: (_gather(part, axis, dtype), None), _gather_backward)


def enter_tensor(x: T) -> T:
    """Values that are equal along `tensor`, as input of work that it divides.

    Their gradients are summed over the devices that share the work.
    """
    return jax.tree.map(_enter, x) if _spread_over([TENSOR]) else x


def leave_tensor(x: jax.Array) -> jax.Array:
    """The sum of what the devices of `tensor` have each made a part of."""
    return _leave(x) if _spread_over([TENSOR]) else x


@jax.custom_vjp
def _enter(x):
    return x


@jax.custom_vjp
def _leave(x):
    return lax.psum(x, TENSOR)


_enter.defvjp(lambda x: (x, None), lambda _, bar: (lax.psum(bar, TENSOR),))
_leave.defvjp(lambda x: (_leave(x), None), lambda _, bar: (bar,))


def batch_sum(x: T) -> T:
    """Sum over all parts of the batch; without a gradient."""
    axes = _spread_over(BATCH_AXES)
    return jax.tree.map(lambda leaf: lax.psum(lax.stop_gradient(leaf), axes), x) if axes else x


def batch_mean(x: T) -> T:
    """Mean over all parts of the batch; without a gradient."""
    axes = _spread_over(BATCH_AXES)
    return jax.tree.map(lambda leaf: lax.pmean(lax.stop_gradient(leaf), axes), x) if axes else x


def batch_nanmean(x: jax.Array, empty: float) -> jax.Array:
    """Mean over all elements of all parts that are not NaN; `empty` where all are."""
    total, count = batch_sum((jnp.nansum(x), jnp.sum(~jnp.isnan(x))))
    return jnp.where(count > 0, total / jnp.maximum(count, 1), empty)


def batch_parts() -> int:
    """Number of parts that the batch lies in."""
    return _devices(_spread_over(BATCH_AXES))


def agreed_maximum(x: jax.Array) -> jax.Array:
    """The largest `x` of the devices that must take the same path; `x` where they need not.

    Devices that exchange parameters or activations inside a branch have to enter it together.
    """
    if not _spread_over([FSDP, TENSOR]):
        return x
    return lax.pmax(x, _spread_over(AXES))


def mean_gradient(gradient: T) -> T:
    """Mean over the whole batch of the gradients that the devices have from their own parts."""
    parts = batch_parts()

    def mean(path: Any, leaf: jax.Array) -> jax.Array:
        # Along the axes of a matrix its parts were summed as they were scattered.
        whole = [axis for axis in BATCH_AXES if axis not in axes_of(path)]
        axes = _spread_over([*whole, TENSOR] if of_heads(path) else whole)
        return (lax.psum(leaf, axes) if axes else leaf) / parts

    return jax.tree_util.tree_map_with_path(mean, gradient) if _spread_over(AXES) else gradient


def global_norm(tree: Any) -> jax.Array:
    """Root of the sum of squares over parameters, or their like, of which devices hold parts."""
    squares: dict[tuple[str, ...], jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        axes = _spread_over(axes_of(path))
        squares[axes] = squares.get(axes, jnp.zeros(())) + jnp.sum(leaf * leaf)
    return jnp.sqrt(
        sum(lax.psum(square, axes) if axes else square for axes, square in squares.items())
    )


def matrices_at_once(stack: jax.Array, axes: tuple[str | None, str | None], limit: int) -> int:
    """Matrices of a stack to give to `over_matrices` at once: equal turns, a multiple of devices.

    Args:
      stack: [..., M, N], of which this device holds its part.
      axes: the mesh axes of its last two dimensions.
      limit: bytes of the whole matrices that a device works on; it always takes one.
    """
    count = math.prod(stack.shape[:-2])
    devices = _devices(_spread_over(AXES))
    part = stack.shape[-2] * stack.shape[-1] * stack.dtype.itemsize
    matrix = part * _devices(_spread_over(axes))
    turns = -(-count // (devices * max(1, limit // matrix)))
    return -(-count // (turns * devices)) * devices


def over_matrices(
    function: Callable[[jax.Array], jax.Array],
    stack: jax.Array,
    axes: tuple[str | None, str | None],
) -> jax.Array:
    """Applies a function of whole matrices to a stack of parts, each matrix on one device.

    The matrices are dealt out over every device of the mesh, so that none is worked on twice and no
    device holds more than its share of the stack.

    Args:
      function: ``[Y, M, N] -> [Y, M, N]``, on each matrix by itself; zeros become zeros.
      stack: [..., M, N], of which this device holds its part.
      axes: the mesh axes of its last two dimensions.
    """
    flat = stack.reshape(-1, *stack.shape[-2:])
    cut = [(axis, dim) for dim, axis in enumerate(axes, 1) if axis and _spread_over([axis])]
    repeated = _spread_over(axis for axis in AXES if axis not in axes)
    devices = _devices(axis for axis, _ in cut) * _devices(repeated)
    count = len(flat)
    parts = jnp.pad(flat, ((0, -count % devices), (0, 0), (0, 0)))
    for axis, dim in cut:
        parts = lax.all_to_all(parts, axis, split_axis=0, concat_axis=dim, tiled=True)
    share = len(parts) // _devices(repeated)
    if repeated:
        parts = lax.dynamic_slice_in_dim(parts, lax.axis_index(repeated) * share, share)
    parts = function(parts)
    if repeated:
        parts = lax.all_gather(parts, repeated, axis=0, tiled=True)
    for axis, dim in reversed(cut):
        parts = lax.all_to_all(parts, axis, split_axis=dim, concat_axis=0, tiled=True)
    return parts[:count].reshape(stack.shape)
