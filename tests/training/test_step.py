"""One optimiser step: accumulation, routers, thresholds, compilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.training import small
from xmod_jax.config import ModelConfig, MoE
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.training.checkpoint import named_leaves
from xmod_jax.training.step import (
    abstract_state,
    accumulated_gradient,
    initial_state,
    make_step,
)

_gradient = jax.jit(accumulated_gradient, static_argnums=(2, 3))


def batch(seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (4, 17), 0, 257, jnp.int32)


def test_accumulated_gradient_equals_that_of_the_whole_batch():
    state = initial_state(small.run())
    one = _gradient(state.model, batch(), 0.1, 1)
    two = _gradient(state.model, batch(), 0.1, 2)
    for got, want in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-6)


def test_steps_compile_once_move_every_leaf_and_average_the_thresholds():
    config = small.run()
    step: Any = jax.jit(make_step(config))
    start = state = initial_state(config)
    observed = []
    for seed in range(3):
        _, auxiliary = _gradient(state.model, batch(seed), 0.1, 1)
        observed.append(auxiliary.kth[0])
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


def test_experts_learn_and_their_biases_move_by_load_alone():
    moe = MoE(6, 2, 1, 8, bias_rate=0.05)
    model = ModelConfig(small.BACKBONE, Hierarchy.dense(2), moe=moe)
    config = dataclasses.replace(small.run(), model=model)
    step: Any = jax.jit(make_step(config))
    start = initial_state(config)
    _, auxiliary = _gradient(start.model, batch(), 0.1, 1)
    state, metrics = step(start, batch())
    assert state.model.prefix is not None and start.model.prefix is not None
    bias_NX = state.model.prefix.ffn.bias[...]
    push_NX = np.sign(1 / 6 - np.asarray(auxiliary.load))
    np.testing.assert_allclose(
        bias_NX, 0.05 * (push_NX - push_NX.mean(-1, keepdims=True)), atol=1e-6
    )
    assert float(metrics.balance_loss) >= 0.99 and float(metrics.max_load) >= 1
    ffn, before = state.model.prefix.ffn, start.model.prefix.ffn
    for name in ("router", "gate", "up", "down"):
        assert not np.array_equal(getattr(ffn, name)[...], getattr(before, name)[...])
    for seed in range(1, 4):
        state, metrics = step(state, batch(seed))
    assert step._cache_size() == 1 and bool(jnp.isfinite(metrics.loss))


def test_expert_biases_are_in_the_checkpoint():
    model = ModelConfig(small.BACKBONE, Hierarchy.dense(2), moe=MoE(6, 2, 1, 8))
    state = abstract_state(dataclasses.replace(small.run(), model=model))
    biases = {n: leaf.shape for n, leaf in named_leaves(state).items() if n.endswith("bias.value")}
    assert biases == {"model.prefix.ffn.bias.value": (2, 6)}
