"""Long sequences go through an FFN in parts, with the values and gradients of the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xmod_jax.nn.layers import SwiGLU, by_rows


@pytest.mark.parametrize("L", [8, 13])
def test_parts_give_the_values_and_gradients_of_the_whole(L):
    ffn = SwiGLU(6, 10, rngs=nnx.Rngs(0))
    x_BLD, bar_BLD = jax.random.normal(jax.random.key(L), (2, 3, L, 6))

    def objective(rows, ffn, x_BLD):
        return jnp.sum(by_rows(lambda x_BLD: ffn(x_BLD), x_BLD, rows) * bar_BLD)

    gradient = jax.jit(jax.value_and_grad(objective, argnums=(1, 2)), static_argnums=0)
    got, want = (gradient(rows, ffn, x_BLD) for rows in (4, L))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), got, want)


def test_no_array_of_all_rows_and_columns_is_kept_for_the_way_back():
    ffn = SwiGLU(6, 10, rngs=nnx.Rngs(0))
    x_BLD = jnp.ones((1, 32, 6))
    pull = jax.vjp(lambda ffn, x_BLD: by_rows(lambda x_BLD: ffn(x_BLD), x_BLD, 8), ffn, x_BLD)[1]
    assert all(10 not in leaf.shape or leaf.ndim == 2 for leaf in jax.tree.leaves(pull))
