"""Stacks of layers: a layer's leaves taken from them, and its gradients written into another one.

A stack is a tree whose leaves have the same leading axes. Leaves that are not floating have no
gradient; their places in a stack of gradients stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn.stage_arguments import as_varying, is_differentiable, varying_axes


def at(tree: Any, *index: jax.Array) -> Any:
    """Leaf[index] of every leaf, for traced indices of the leading axes."""
    for i in index:
        tree = jax.tree.map(lambda leaf, i=i: lax.dynamic_index_in_dim(leaf, i, 0, False), tree)
    return tree


def pick(tree: Any, index: tuple[Any, ...]) -> Any:
    """As `at`, by one slice: where a turn of a loop does little, slices of slices copy stages."""

    def one(leaf: jax.Array) -> jax.Array:
        rest = leaf.shape[len(index) :]
        start = [jnp.asarray(i, jnp.int32) for i in (*index, *[0] * len(rest))]
        return lax.dynamic_slice(leaf, start, (*[1] * len(index), *rest)).reshape(rest)

    return jax.tree.map(one, tree)


def write(tree: Any, new: Any, *index: Any) -> Any:
    """The tree with leaf[index] = new; in place where the compiler may."""

    def one(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if not is_differentiable(new):
            return leaf
        start: list[Any] = [*index, *([0] * new.ndim)]
        return lax.dynamic_update_slice(leaf, new[(None,) * len(index)].astype(leaf.dtype), start)

    return jax.tree.map(one, tree, new)


def add(tree: Any, new: Any, *index: Any) -> Any:
    """The tree with leaf[index] += new; in place where the compiler may."""
    plus = lambda old, new: old + new if is_differentiable(new) else new
    return write(tree, jax.tree.map(plus, at(tree, *index), new), *index)


def fresh(tree: Any) -> Any:
    """A tree to write the gradients of `tree` into; nothing much where there is none."""
    empty = lambda leaf: (
        lax.empty(leaf.shape, leaf.dtype) if is_differentiable(leaf) else jnp.zeros(())
    )
    return as_varying(jax.tree.map(empty, tree), varying_axes(tree))


def without_constants(gradients: Any, tree: Any) -> Any:
    """Gradients of `tree`, None for what has none."""
    return jax.tree.map(
        lambda leaf, gradient: gradient if is_differentiable(leaf) else None, tree, gradients
    )
