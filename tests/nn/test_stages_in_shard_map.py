"""A stage inside a `jax.shard_map` that checks how values vary over devices, its default."""

from __future__ import annotations

import json

from tests.devices import run_module
from tests.nn.stages_in_shard_map import MESHES


def test_stages_and_their_gradients_on_a_mesh_of_ones_own_are_those_without_one():
    found = json.loads(run_module("tests.nn.stages_in_shard_map", devices=4).stdout)
    assert len(found) == 4 * len(MESHES)
    assert {name: distance for name, distance in found.items() if not distance < 1e-5} == {}
