"""Blockwise attention against the whole L x L square."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xmod_jax.nn.attention import blockwise_attention


def square_attention(q_BLHE, k_BLGE, v_BLGE):
    repeat = q_BLHE.shape[2] // k_BLGE.shape[2]
    k_BLHE, v_BLHE = (jnp.repeat(a, repeat, axis=2) for a in (k_BLGE, v_BLGE))
    s_BHLL = jnp.einsum("blhe,bmhe->bhlm", q_BLHE, k_BLHE) / q_BLHE.shape[-1] ** 0.5
    s_BHLL = jnp.where(jnp.tril(jnp.ones(s_BHLL.shape[-2:], bool)), s_BHLL, -jnp.inf)
    return jnp.einsum("bhlm,bmhe->blhe", jax.nn.softmax(s_BHLL, axis=-1), v_BLHE)


def inputs(B, L, H, G, E, dtype):
    keys = jax.random.split(jax.random.key(L), 4)
    shapes = [(B, L, H, E), (B, L, G, E), (B, L, G, E), (B, L, H, E)]
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("L", "block"),
    [(1, 4), (7, 4), (12, 4), (5, 256), (6, 8), (7, 8)],
    ids=["one", "ragged", "whole", "short", "halves", "ragged halves"],
)
@pytest.mark.parametrize("G", [1, 2, 4])
def test_values_and_gradients_equal_the_square_in_float64(L, block, G):
    with jax.enable_x64(True):
        q, k, v, bar = inputs(2, L, 4, G, 6, jnp.float64)
        blocked, pull = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, block)[0], q, k, v)
        square, pull_square = jax.vjp(square_attention, q, k, v)
        np.testing.assert_allclose(blocked, square, atol=1e-13)
        for got, want in zip(pull(bar), pull_square(bar), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-13)


def test_saved_output_gives_the_same_values_and_gradients():
    q, k, v, bar = inputs(2, 9, 4, 2, 6, jnp.float32)
    out, saved = blockwise_attention(q, k, v, 4)
    _, pull = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, 4)[0], q, k, v)
    again, pull_again = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, 4, saved)[0], q, k, v)
    assert np.array_equal(out, again)
    for got, want in zip(pull_again(bar), pull(bar), strict=True):
        assert np.array_equal(got, want)


def test_scores_of_any_size_stay_finite():
    q, k, v, bar = inputs(1, 9, 2, 1, 4, jnp.float32)
    out, pull = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, 4)[0], q * 1e4, k * 1e4, v)
    assert bool(jnp.all(jnp.isfinite(out)))
    assert all(bool(jnp.all(jnp.isfinite(bar))) for bar in pull(bar))


def test_no_buffer_of_the_square_is_compiled():
    L = 2048
    q, k, v, _ = inputs(1, L, 2, 1, 8, jnp.float32)

    def loss(q, k, v):
        return jnp.sum(blockwise_attention(q, k, v, 256)[0])

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    analysis: Any = gradient.lower(q, k, v).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < L * L * 4 / 2
