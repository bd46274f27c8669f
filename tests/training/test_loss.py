"""Chunked cross-entropy against the whole logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn import jaxprs
from xmod_jax.training import loss


def whole(states_BLD, head_DV, targets_BL, weight_BL):
    log_p = jax.nn.log_softmax(states_BLD @ head_DV, axis=-1)
    picked_BL = jnp.take_along_axis(log_p, targets_BL[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked_BL * weight_BL)


@pytest.mark.parametrize(("B", "L"), [(1, 1), (2, 300), (3, 128)])
def test_values_and_gradients_equal_the_whole_in_float64(B, L, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 128 * 11)  # several chunks, the last one padded
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        states = jax.random.normal(keys[0], (B, L, 6), jnp.float64)
        head = jax.random.normal(keys[1], (6, 11), jnp.float64)
        targets = jax.random.randint(keys[2], (B, L), 0, 11)
        weight = jax.random.uniform(keys[3], (B, L), jnp.float64)
        ours, theirs = (
            jax.value_and_grad(lambda s, h, f=f: 3 * f(s, h, targets, weight), argnums=(0, 1))
            for f in (loss.cross_entropy, whole)
        )
        for got, want in zip(
            jax.tree.leaves(ours(states, head)), jax.tree.leaves(theirs(states, head)), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_no_buffer_of_all_logits_is_compiled():
    T, V = 8192, 4096
    arguments = (jnp.zeros((1, T, 8)), jnp.zeros((8, V)), jnp.zeros((1, T), int), jnp.ones((1, T)))
    gradient = jax.jit(jax.grad(loss.cross_entropy, argnums=(0, 1)))
    analysis: Any = gradient.lower(*arguments).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < T * V * 4


def test_losses_are_summed_in_full_precision():
    """An accelerator rounds the operands of a float32 product to 11 bits unless told not to."""
    arguments = (jnp.ones((1, 300, 6)), jnp.ones((6, 11)), jnp.zeros((1, 300), int))
    for function in (loss.cross_entropy, jax.grad(loss.cross_entropy)):
        traced = jax.make_jaxpr(function)(*arguments, jnp.ones((1, 300)))
        to_scalars = [
            equation
            for equation in jaxprs.equations(traced.jaxpr)
            if equation.primitive.name == "dot_general" and equation.outvars[0].aval.shape == ()
        ]
        assert to_scalars
        for equation in to_scalars:
            assert equation.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_a_mean_of_bfloat16_losses_scales_its_gradients_exactly():
    """1/1000 in bfloat16 is 0.2% too large, and so would be every gradient but the head's."""
    states, head = jnp.ones((1, 1000, 4), jnp.bfloat16), jnp.eye(4)
    arguments = (head, jnp.zeros((1, 1000), int), jnp.ones((1, 1000)))
    unit = jax.grad(loss.cross_entropy)(states, *arguments)
    mean = jax.grad(lambda states: loss.cross_entropy(states, *arguments) / 1000)(states)
    want = (unit.astype(jnp.float32) / 1000).astype(jnp.bfloat16)
    np.testing.assert_array_equal(mean, want)


def test_huge_logits_stay_finite():
    states, head = jnp.full((1, 4, 2), 1e4), jnp.ones((2, 3)).at[:, 1].set(-1.0)
    value, gradient = jax.value_and_grad(loss.cross_entropy)(
        states, head, jnp.ones((1, 4), int), jnp.ones((1, 4))
    )
    assert bool(jnp.isfinite(value)) and bool(jnp.all(jnp.isfinite(gradient)))
