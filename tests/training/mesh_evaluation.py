"""Evaluates tiny models on meshes, with automatic and explicit axes; run by test_sharding.py.

    python -m tests.training.mesh_evaluation ARCHITECTURE ...

Prints a JSON object: for ``ARCHITECTURE MESH`` the evaluation record, and for each mesh with
explicit axes also the metrics of a step, beside those with automatic axes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from tests.training.mesh_curves import BATCH, LENGTH, run_config, start
from xmod_jax import sharding
from xmod_jax.config import BYTE_VOCABULARY
from xmod_jax.sharding import MeshShape
from xmod_jax.training.evaluation import make_evaluator
from xmod_jax.training.step import Metrics, make_step

MESHES = ("fsdp:8", "data:2,fsdp:2,tensor:2")
EXPLICIT = "data:2,fsdp:2,tensor:2"


def tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, BYTE_VOCABULARY, (rows, LENGTH + 1), np.int32)


def evaluation(architecture: str, mesh: Mesh | None) -> dict[str, float | None]:
    """The record of two batches, the last of which no mesh can cut evenly."""
    state = start(run_config(architecture), mesh)
    thresholds = state.model.thresholds(0.01)
    return make_evaluator(mesh)(state.model, thresholds, [tokens(BATCH), tokens(3)])


def step(architecture: str, mesh: Mesh) -> dict[str, float]:
    config = run_config(architecture)
    batch = sharding.global_batch(tokens(BATCH), BATCH, mesh)
    state, metrics = jax.jit(make_step(config, mesh))(start(config, mesh), batch)
    assert int(state.step) == 1
    return dict(zip(Metrics._fields, map(float, metrics), strict=True))


def main() -> None:
    found: dict[str, Any] = {}
    for name in sys.argv[1:]:
        found[f"{name} one"] = evaluation(name, None)
        for text in MESHES:
            found[f"{name} {text}"] = evaluation(name, MeshShape.parse(text).make())
        explicit = MeshShape.parse(EXPLICIT).make(AxisType.Explicit)
        found[f"{name} explicit"] = evaluation(name, explicit)
        found[f"{name} step"] = step(name, MeshShape.parse(EXPLICIT).make())
        found[f"{name} explicit step"] = step(name, explicit)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
