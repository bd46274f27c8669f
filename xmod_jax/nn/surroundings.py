"""What a stage meets in somebody's own program: values that a block closes over, explicit meshes.

Shapes: B batch, L context, C rows of a sequence, D width, S sparse layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xmod_jax.nn.stage_arguments import check_function, check_rows, varying_axes


class Layers(NamedTuple):
    """An update, and its parameters of all layers, every leaf [S, ...]."""

    update: Callable[..., Any]
    params: Any


def closures_as_params(
    layers: Layers, router_SD: jax.Array, x_BLD: jax.Array, positions: Any, count: int
) -> Layers:
    """The same layers, the traced values that the update closes over being parameters too.

    A derivative of our own sees arguments alone: such a value had no gradient, and was out of reach
    where JAX traces the backward pass apart from the forward one. Every layer gets a copy of it.

    Args:
      layers: what runs.
      router_SD: gives the scores' dtype.
      x_BLD: the stream.
      positions: pytree of [B, L, ...] arrays.
      count: C.
    """
    # Inside of `jax.shard_map` a value has another type here than where it will be used.
    if varying_axes((layers.params, x_BLD, positions)):
        return layers
    check_function("update", layers.update)

    def new_rows(params: Any, rows_BCD: jax.Array, positions: Any, score_BC: jax.Array) -> Any:
        new_BCD = layers.update(params, rows_BCD, positions, score_BC)
        check_rows("update", new_BCD, rows_BCD)
        return new_BCD

    B, _, D = x_BLD.shape
    given = (
        jax.tree.map(lambda leaf: _like(leaf, leaf.shape[1:]), layers.params),
        _like(x_BLD, (B, count, D)),
        jax.tree.map(lambda leaf: _like(leaf, (B, count, *leaf.shape[2:])), positions),
        _like(router_SD, (B, count)),
    )
    traced = jax.make_jaxpr(new_rows)(*given)
    moved = [isinstance(const, jax.core.Tracer) for const in traced.consts]
    if not any(moved):
        return layers

    def update(params: Any, *data: Any) -> jax.Array:
        params, values = params
        rest = iter(values)
        consts = [next(rest) if m else c for c, m in zip(traced.consts, moved, strict=True)]
        run = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))
        return run(*jax.tree.leaves((params, *data)))[0]

    S = len(router_SD)
    values = [c for c, m in zip(traced.consts, moved, strict=True) if m]
    stacked = [jnp.broadcast_to(value, (S, *jnp.shape(value))) for value in values]
    return Layers(update, (layers.params, stacked))


def _like(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def without_explicit_axes(
    run: Callable[[jax.Array, Any], tuple[Any, ...]], x_BLD: jax.Array, rest: Any, returned: int
) -> tuple[Any, ...]:
    """``run(x_BLD, rest)``, where the compiler chooses the shardings along every axis of a mesh.

    Along axes that a mesh calls explicit, as `jax.make_mesh` does by default, JAX would have to be
    told the sharding of every gather.

    Args:
      run: what a stage does; returns a tuple of arrays, the stream first. That keeps its sharding,
        the others get none.
      x_BLD: the stream.
      rest: pytree of arrays.
      returned: how many arrays `run` returns.
    """
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves((x_BLD, rest))]
    meshes = [kind.sharding.mesh for kind in types]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return run(x_BLD, rest)
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in axes if kind == AxisType.Explicit)
    spec = types[0].sharding.spec if meshes[0] == mesh else P()
    stream, others = (NamedSharding(mesh, each) for each in (spec, P()))
    shardings = (stream, *[others] * (returned - 1))
    return jax.sharding.auto_axes(run, axes=explicit, out_sharding=shardings)(x_BLD, rest)
