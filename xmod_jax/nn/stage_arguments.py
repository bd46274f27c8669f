"""What a stage is given: refused by its name, and of one kind on every device.

Shapes alone are looked at, so that all of it is done while a stage is traced.

Shapes: B batch, L context, D width, N stages, S sparse layers of a stage, P intervals of a stage.
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

T = TypeVar("T")


def check_stage(
    params: Any,
    router: jax.Array,
    x_BLD: jax.Array,
    positions: Any,
    sparsity: int,
    bias_scale: float,
    valid_BL: jax.Array | None,
    axes: str,
    threshold: jax.Array | None = None,
) -> tuple[int, float]:
    """Refuses what no stage can be run on; the arguments are those of `xmod_jax.routed_stage`.

    Args:
      axes: the leading axes of `router` and of what is stacked like it, ``"S"`` or ``"NS"``.
      threshold: one for every layer, where there are any.

    Returns:
      `sparsity` and `bias_scale` as plain numbers.

    Raises:
      ValueError: names the argument, what it must be and what it is.
    """
    _check_stream(x_BLD)
    B, L, D = x_BLD.shape
    layers = _check_router(f"router_{axes}D", router, axes, D)
    like = f"as many as router_{axes}D, {list(router.shape)}, has layers"
    check_stacked("params", params, layers, axes, like)
    check_stacked("positions", positions, (B, L), "BL", f"as x_BLD, {list(x_BLD.shape)}")
    if valid_BL is not None:
        shape, dtype = _array("valid_BL", valid_BL)
        if shape != (B, L) or dtype != jnp.bool_:
            raise ValueError(f"valid_BL must be bool {[B, L]}, got {dtype} {list(shape)}")
    if threshold is not None:
        shape, dtype = _array(f"threshold_{axes}", threshold)
        if shape != layers or not _is_real(dtype):
            raise ValueError(
                f"threshold_{axes} must be {list(layers)} numbers, {like}, got {dtype} "
                f"{list(shape)}"
            )
    return _count("sparsity", sparsity), _scale("bias_scale", bias_scale)


def check_dense(name: str, layer: Any, params: Any, stages: tuple[int, ...], axes: str) -> None:
    """Refuses an anchor or a lead without parameters, or parameters without it, or of other sizes.

    Args:
      name: ``"anchor"`` or ``"lead"``.
      layer: what runs it, or None.
      params: its parameters, stacked, or None.
      stages: [N] of an anchor, [N, S] of a lead, whose number P must divide S.
      axes: of its stacks, for the message.

    Raises:
      ValueError: names the argument.
    """
    leaves = jax.tree.leaves(params)
    if layer is None and not leaves:
        return
    if layer is None or not leaves:
        missing = name if layer is None else f"{name}_params"
        raise ValueError(f"{name} and {name}_params belong together, {missing} is missing")
    shape, _ = _array(f"{name}_params", leaves[0])
    lead = stages[:1] if len(stages) == 1 or len(shape) < 2 else (stages[0], shape[1])
    if len(lead) < len(axes) or (len(axes) == 2 and (lead[1] < 1 or stages[1] % lead[1])):
        raise ValueError(
            f"{name}_params must be [N, P, ...] with P a divisor of {stages[1]}, the sparse layers "
            f"of a stage, got {list(shape)}"
        )
    check_stacked(f"{name}_params", params, lead, axes, "a layer for each")


def check_stacked(name: str, tree: Any, lead: tuple[int, ...], axes: str, why: str) -> None:
    """Refuses a tree with a leaf whose shape does not begin with `lead`.

    Raises:
      ValueError: names the leaf.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape, _ = _array(name + jax.tree_util.keystr(path), leaf)
        if shape[: len(lead)] != lead:
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be [{', '.join(axes)}, ...] with "
                f"[{', '.join(axes)}] = {list(lead)}, {why}, got {list(shape)}"
            )


def check_rows(name: str, new: Any, rows_BCD: jax.Array) -> None:
    """Refuses what a function of rows returned, unless it is rows again.

    Raises:
      ValueError: names the function.
    """
    shape, dtype = getattr(new, "shape", None), getattr(new, "dtype", None)
    if shape != rows_BCD.shape or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        got = type(new).__name__ if shape is None else f"{dtype} {list(shape)}"
        raise ValueError(
            f"{name} must return rows like those it is given, {rows_BCD.dtype} "
            f"{list(rows_BCD.shape)}, it returned {got}"
        )


def check_function(name: str, function: Any) -> None:
    """Refuses what cannot be called, or not be told apart from another one in a compiled program.

    Raises:
      ValueError: names the argument.
    """
    if not callable(function):
        raise ValueError(f"{name} must be a function, got {type(function).__name__}")
    try:
        hash(function)
    except TypeError:
        raise ValueError(
            f"{name} must be hashable, got {type(function).__name__}: give a plain function, with "
            "its arrays in params"
        ) from None


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf has a gradient: integers, masks and random keys have none."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def alike(tree: T) -> T:
    """Arrays of JAX's, of one type along the mesh axes of a `jax.shard_map`."""
    tree = jax.tree.map(jnp.asarray, tree)
    return as_varying(tree, varying_axes(tree))


def varying_axes(tree: Any) -> frozenset[str]:
    """Mesh axes along which devices may hold different values: those of any leaf, by its type.

    Empty outside of `jax.shard_map`, and in one with ``check_vma=False``.
    """
    return frozenset().union(*(_varying(leaf) for leaf in jax.tree.leaves(tree)))


def as_varying(tree: T, axes: frozenset[str]) -> T:
    """The same values, of a type that lets them differ along `axes`; costs nothing forward.

    A loop's carry has one type, so what starts as a constant has to have that of what it becomes.
    Backward, the gradient of a value that all devices share is summed over them here.
    """

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def _varying(leaf: Any) -> frozenset[str]:
    aval = jax.typeof(leaf)
    # The name of this attribute is not settled between versions of JAX.
    manual = getattr(aval, "mat", None)
    return getattr(aval, "vma", frozenset()) if manual is None else manual.varying


def _array(name: str, value: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(f"{name} must be an array, got {type(value).__name__}")
    return tuple(shape), dtype


def _check_stream(x_BLD: Any) -> None:
    shape, dtype = _array("x_BLD", x_BLD)
    if not isinstance(x_BLD, jax.Array | np.ndarray):
        raise ValueError(f"x_BLD must be an array, got {type(x_BLD).__name__}")
    if len(shape) != 3 or 0 in shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            "x_BLD must be floating [sequences, tokens, width], at least one of each, got "
            f"{dtype} {list(shape)}"
        )
    if jnp.finfo(dtype).bits < 16:
        raise ValueError(f"x_BLD must have at least 16 bits a number, got {dtype}")


def _check_router(name: str, router: Any, axes: str, width: int) -> tuple[int, ...]:
    """The leading axes."""
    shape, dtype = _array(name, router)
    if len(shape) != len(axes) + 1 or 0 in shape or shape[-1] != width:
        raise ValueError(
            f"{name} must be [{', '.join(axes)}, D] with a vector of D = {width}, the width of "
            f"x_BLD, for each layer, got {list(shape)}"
        )
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"{name} must be float32 or wider, got {dtype}: nearby scores would become equal"
        )
    return shape[:-1]


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise ValueError(
            f"{name} must be a whole number of at least 1, known while tracing, got {value!r}"
        )
    return number


def _scale(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(
            f"{name} must be a finite number of at least 0, known while tracing, got {value!r}"
        )
    return number
