"""Saves a state on one mesh and restores it on others; run by test_elastic.py on 8 devices.

python -m tests.training.elastic DIRECTORY, or "fresh" to compare starts instead.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import numpy as np

from tests.training.mesh_curves import run_config
from xmod_jax.sharding import MeshShape
from xmod_jax.training.checkpoint import Checkpoints, named_leaves
from xmod_jax.training.step import TrainState, abstract_state, initial_state

MESHES = ("data:2,fsdp:4", "fsdp:2,tensor:2", None, "fsdp:4,tensor:2", "data:8")


def filled(abstract: TrainState) -> TrainState:
    """A state of random numbers: those of a fresh optimiser are all zero."""
    random = np.random.default_rng(0)
    number = lambda leaf: (100 * random.standard_normal(leaf.shape)).astype(leaf.dtype)
    return jax.tree.map(lambda leaf: jax.device_put(number(leaf), leaf.sharding), abstract)


def values(state: TrainState) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(state).items()}


def compare_fresh() -> None:
    """A run starts with the same numbers on a mesh and on one device."""
    config = run_config("xmod")
    fresh = values(initial_state(config))
    mesh = MeshShape.parse("data:2,fsdp:2,tensor:2").make()
    for name, value in values(initial_state(config, mesh)).items():
        np.testing.assert_array_equal(value, fresh[name], err_msg=name)
    print(jax.device_count())


def main() -> None:
    """Each mesh restores what the one before saved, one step later."""
    config, directory = run_config("xmod"), pathlib.Path(sys.argv[1])
    mesh = MeshShape.parse("fsdp:8").make()
    state = filled(abstract_state(config, mesh))
    state = dataclasses.replace(state, step=state.step * 0 + 1)
    want = values(state)
    for step, text in enumerate(MESHES, 1):
        with Checkpoints(directory, config) as checkpoints:
            checkpoints.save(state, {"step": step})
        other = MeshShape.parse(text).make() if text else None
        with Checkpoints(directory, config) as checkpoints:
            state, position = checkpoints.restore(abstract_state(config, other))
        assert position == {"step": step}
        for name, leaf in named_leaves(state).items():
            if name == "step":
                continue
            assert len(leaf.sharding.device_set) == (other.size if other else 1), name
            np.testing.assert_array_equal(np.asarray(leaf), want[name], err_msg=name)
        state = dataclasses.replace(state, step=state.step + 1)
    print(jax.device_count())


if __name__ == "__main__":
    compare_fresh() if sys.argv[1] == "fresh" else main()
