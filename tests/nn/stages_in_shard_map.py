"""Stages inside `jax.shard_map` with its default checks; run by test_stages_in_shard_map.py.

    python -m tests.nn.stages_in_shard_map

Prints a JSON object: for each case the largest distance from the same outside of any mesh.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.nn.references import Problem, make_problem, toy_block
from xmod_jax import gated_residual, routed_stage, threshold_stage

UPDATE = gated_residual(toy_block)
PROBLEM = make_problem(0, 4, 13, 8, 4, jnp.float32)
# Axes with names of this project's own too: a user's mesh may have them.
MESHES = {
    "auto": ({"data": 2, "fsdp": 2}, AxisType.Auto, P(("data", "fsdp"))),
    "explicit": ({"batch": 2, "tensor": 2}, AxisType.Explicit, P("batch")),
}


def train(*problem: Any) -> tuple[jax.Array, jax.Array]:
    out = routed_stage(UPDATE, *problem, sparsity=4)
    return out.x_BLD, out.alignment_S


def evaluate(*problem: Any) -> jax.Array:
    return threshold_stage(UPDATE, *problem, jnp.linspace(-0.3, 0.3, 4), sparsity=4).x_BLD


def objective(axes: Any, *problem: Any) -> jax.Array:
    """Its sum over the devices of `axes` is that of the whole batch."""
    x_BLD, alignment_S = train(*problem)
    share = jax.lax.axis_size(axes) if axes else 1
    return jnp.sum(jnp.sin(x_BLD)) + jnp.sum(alignment_S) / share


def worst(got: Any, want: Any) -> float:
    distance = lambda a, b: np.max(np.abs(np.asarray(a) - b)) / (1 + np.max(np.abs(b)))
    return max(map(float, jax.tree.leaves(jax.tree.map(distance, got, want))))


def main() -> None:
    arguments = (0, 1, 2)
    want_x, want_evaluated = jax.jit(train)(*PROBLEM)[0], jax.jit(evaluate)(*PROBLEM)
    gradient = lambda f: jax.grad(f, argnums=arguments)
    want_gradient = jax.jit(gradient(functools.partial(objective, None)))(*PROBLEM)
    found = {}
    for name, (shape, kind, batch) in MESHES.items():
        mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(kind,) * 2)
        specs = (P(), P(), batch, batch)
        place = lambda tree, spec, mesh=mesh: jax.device_put(tree, NamedSharding(mesh, spec))
        problem = Problem(*map(place, PROBLEM, specs))
        spread = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs)
        axes = batch[0]
        run = lambda f, out, problem=problem, spread=spread: jax.jit(spread(f, out_specs=out))(
            *problem
        )
        streamed = lambda *each: train(*each)[0]
        found[f"{name}: forward"] = worst(run(streamed, batch), want_x)
        found[f"{name}: threshold"] = worst(run(evaluate, batch), want_evaluated)
        inside = gradient(functools.partial(objective, axes))
        found[f"{name}: gradient inside"] = worst(run(inside, (P(), P(), batch)), want_gradient)
        total = spread(
            lambda *each, axes=axes: jax.lax.psum(objective(axes, *each), axes), out_specs=P()
        )
        outside = jax.jit(gradient(jax.checkpoint(total)))(*problem)
        found[f"{name}: gradient outside"] = worst(outside, want_gradient)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
