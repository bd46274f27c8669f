"""Muon's update of stacks that lie in parts, a few layers at a time; run by test_optimizer.py.

Every mesh of 8 devices gives what one device gives that takes all layers at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from xmod_jax import sharding
from xmod_jax.sharding import MeshShape
from xmod_jax.training.optimizer import orthogonal_momentum

MESHES = ("data:8", "fsdp:8", "data:2,fsdp:2,tensor:2")
LAYERS = (1, 8, 13)  # fewer than devices, as many, and a number that turns do not divide


def stacks() -> dict[str, Any]:
    random = np.random.default_rng(0)
    draw = lambda count: random.standard_normal((count, 16, 24)).astype(np.float32)
    return {f"stack_{count}": {"attention": {"query": draw(count)}} for count in LAYERS}


def two_updates(gradient: Any, bytes_at_once: int) -> Any:
    muon = orthogonal_momentum(0.95, bytes_at_once)
    _, state = muon.update(gradient, muon.init(gradient))
    return muon.update(jax.tree.map(lambda leaf: leaf[::-1], gradient), state)


def main() -> None:
    want = jax.jit(functools.partial(two_updates, bytes_at_once=1 << 30))(stacks())
    for text in ("one", *MESHES):
        update: Any = functools.partial(two_updates, bytes_at_once=1)
        if text != "one":
            specs, mesh = sharding.specs(stacks()), MeshShape.parse(text).make()
            out = sharding.specs(jax.eval_shape(update, stacks()))
            update = jax.shard_map(
                update, mesh=mesh, in_specs=(specs,), out_specs=out, check_vma=False
            )
            assert text == "data:8" or specs["stack_8"]["attention"]["query"] != P()
        for a, b in zip(
            jax.tree.leaves(jax.jit(update)(stacks())), jax.tree.leaves(want), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=text)
    print("equal")


if __name__ == "__main__":
    main()
