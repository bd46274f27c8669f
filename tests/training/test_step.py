"""One optimiser step: accumulation, routers, thresholds, compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.training import small
from xmod_jax.training.step import accumulated_gradient, initial_state, make_step


def batch(seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (4, 17), 0, 257, jnp.int32)


def test_accumulated_gradient_equals_that_of_the_whole_batch():
    state = initial_state(small.run())
    one = jax.jit(accumulated_gradient, static_argnums=(2, 3))(state.model, batch(), 0.1, 1)
    two = jax.jit(accumulated_gradient, static_argnums=(2, 3))(state.model, batch(), 0.1, 2)
    for got, want in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-6)


def test_steps_compile_once_move_every_leaf_and_average_the_thresholds():
    config = small.run()
    step: Any = jax.jit(make_step(config))
    start = state = initial_state(config)
    observed = []
    for seed in range(3):
        _, (_, _, kth) = accumulated_gradient(state.model, batch(seed), 0.1, 1)
        observed.append(kth[0])
        state, metrics = step(state, batch(seed))
        assert all(bool(jnp.isfinite(value)) for value in metrics)
    assert step._cache_size() == 1
    assert int(state.step) == 3
    for before, after in zip(
        jax.tree.leaves(start.model), jax.tree.leaves(state.model), strict=True
    ):
        assert not np.array_equal(before, after)
    # The first three steps are a plain mean of the smallest selected logits.
    np.testing.assert_allclose(state.thresholds[0], np.mean(observed, 0), rtol=1e-3, atol=1e-4)


def test_the_same_seed_gives_the_same_start_and_another_another():
    same = [initial_state(small.run(seed=seed)).model.embedding[...] for seed in (1, 1, 2)]
    assert np.array_equal(same[0], same[1])
    assert not np.array_equal(same[0], same[2])
