"""Trains tiny models on meshes; run by test_sharding.py where there are 8 devices.

    python -m tests.training.mesh_curves ARCHITECTURE=MESH,...  (a mesh as data:8+fsdp:1, or "one")

Prints a JSON object: for ``ARCHITECTURE MESH`` the metrics of every step and the collectives of the
compiled step as [kind, shape] pairs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import jax
import numpy as np

from experiments import hlo
from tests.training import small
from xmod_jax import sharding
from xmod_jax.config import BYTE_VOCABULARY, Backbone, ModelConfig, MoE, Routing, RunConfig, Sparse
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.training.step import Metrics, TrainState, abstract_state, make_step

STEPS = 20
BATCH, LENGTH = 8, 24  # neither these nor a capacity is a size of a parameter
BACKBONE = Backbone(32, 8, 4, 2, 64, vocab_size=BYTE_VOCABULARY)
MODELS = {
    "dense": ModelConfig(BACKBONE, Hierarchy.dense(2)),
    "mod": ModelConfig(BACKBONE, Hierarchy(1, (StageGroup(2, 1),), 4), Routing.mod()),
    "xmod": ModelConfig(BACKBONE, Hierarchy(0, (StageGroup(2, 4),), 4)),
    "moe": ModelConfig(BACKBONE, Hierarchy.dense(2), moe=MoE(4, 2, 1, 16, bias_rate=0.01)),
    "routed_ffn": ModelConfig(
        BACKBONE,
        Hierarchy(1, (StageGroup(1, 8, attentions=2),), 4),
        Routing(sparse=Sparse.FFN),
    ),
    "full_kv": ModelConfig(
        BACKBONE, Hierarchy(0, (StageGroup(2, 4),), 4), Routing(sparse=Sparse.FULL_KV)
    ),
}


def run_config(architecture: str) -> RunConfig:
    """The run; warm-up is short, so that all of it moves. ``NAME_kept`` keeps its products."""
    name, kept, _ = architecture.partition("_kept")
    config = small.run(
        batch_size=BATCH, context_length=LENGTH, steps=STEPS, keep_products=bool(kept)
    )
    return dataclasses.replace(config, model=MODELS[name])


def start(config: RunConfig, mesh: Any) -> TrainState:
    """The same state on any mesh, nothing compiled: matrices normal, the rest as usual."""

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        value = np.zeros(leaf.shape)
        if name.startswith(".model") and name.endswith(("scale.value", "sparse.gate.value")):
            value += 1
        elif name.startswith(".model") and leaf.ndim >= 2 and "bias" not in name:
            value += 0.05 * np.random.default_rng(len(name)).standard_normal(leaf.shape)
        return jax.device_put(value.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(fill, abstract_state(config, mesh))


def curve(architecture: str, text: str) -> dict[str, Any]:
    """Metrics and collectives of one architecture on one mesh."""
    config = run_config(architecture)
    began = time.perf_counter()
    mesh = None if text == "one" else sharding.MeshShape.parse(text.replace("+", ",")).make()
    state, random = start(config, mesh), np.random.default_rng(0)
    batch = lambda: random.integers(0, BYTE_VOCABULARY, (BATCH, LENGTH + 1), np.int32)
    place = lambda x: x if mesh is None else sharding.global_batch(x, BATCH, mesh)
    compiled = jax.jit(make_step(config, mesh)).lower(state, place(batch())).compile()
    metrics = []
    for _ in range(STEPS):
        state, found = compiled(state, place(batch()))
        metrics.append([float(value) for value in found])
    moved = [(part.kind, part.shape) for part in hlo.collectives(compiled.as_text() or "")]
    print(architecture, text, f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
    return {
        "metrics": dict(zip(Metrics._fields, np.transpose(metrics).tolist(), strict=True)),
        "collectives": moved,
    }


def main() -> None:
    found = {}
    for part in sys.argv[1:]:
        architecture, meshes = part.split("=")
        for mesh in meshes.split(","):
            found[f"{architecture} {mesh}"] = curve(architecture, mesh)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
