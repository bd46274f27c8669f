"""The worked example of the README: a routed stage around a block of one's own, NNX and Linen."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge

from xmod_jax import gated_residual, routed_stage, threshold_stage

B, L, D, S, K = 2, 12, 8, 6, 4


class MyBlock(nnx.Module):
    """Any causal block: here an FFN over the running mean of the routed rows so far."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(2 * D, 16, rngs=rngs)
        self.outer = nnx.Linear(16, D, rngs=rngs)

    def __call__(self, rows):
        steps = jnp.arange(1, rows.shape[1] + 1, dtype=rows.dtype)[:, None]
        mean = jnp.cumsum(rows, axis=1) / steps
        return self.outer(nnx.gelu(self.inner(jnp.concatenate([rows, mean], -1))))


class MyLinenBlock(nn.Module):
    """The same as a Linen module."""

    @nn.compact
    def __call__(self, rows):
        steps = jnp.arange(1, rows.shape[1] + 1, dtype=rows.dtype)[:, None]
        mean = jnp.cumsum(rows, axis=1) / steps
        return nn.Dense(D)(nn.gelu(nn.Dense(16)(jnp.concatenate([rows, mean], -1))))


def nnx_stack():
    blocks = jax.vmap(lambda key: MyBlock(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), S))
    return blocks, lambda block, rows, positions: block(rows)


def linen_stack():
    module = MyLinenBlock()
    init = lambda key: module.init(key, jnp.zeros((1, 1, D)))["params"]
    params = jax.vmap(init)(jax.random.split(jax.random.key(0), S))
    return params, lambda params, rows, positions: module.apply({"params": params}, rows)


def bridged_stack():
    def make(key):
        block = bridge.ToNNX(MyLinenBlock(), rngs=nnx.Rngs(key))
        # Parameters apart from the bridge's random state, which no layer needs after its start.
        return nnx.split(block.lazy_init(jnp.zeros((1, 1, D))), nnx.Param, ...)

    layout, _, rest = make(jax.random.key(0))
    states = jax.vmap(lambda key: make(key)[1])(jax.random.split(jax.random.key(0), S))

    def block(state, rows, positions):
        # Fresh variables: the bridge counts its calls, which must not reach out of a trace.
        return nnx.merge(layout, state, jax.tree.map(lambda leaf: leaf, rest))(rows)

    return states, block


@pytest.mark.parametrize("stack", [nnx_stack, linen_stack, bridged_stack])
def test_a_stage_around_my_own_block_trains_and_evaluates_causally(stack):
    blocks, block = stack()
    update = gated_residual(block)
    x_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
    target_BLD = jnp.roll(x_BLD, 1, axis=1)
    positions_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    params = (blocks, jnp.ones(S)), 0.3 * jax.random.normal(jax.random.key(2), (S, D))
    optimizer = optax.adam(1e-2, b1=0.9)

    def loss(params):
        layers, routers_SD = params
        out = routed_stage(update, layers, routers_SD, x_BLD, positions_BL, sparsity=K)
        return jnp.mean((out.x_BLD - target_BLD) ** 2) + 0.1 * jnp.mean(out.alignment_S)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]

    layers, routers_SD = params
    evaluate = jax.jit(
        lambda x: (
            threshold_stage(
                update, layers, routers_SD, x, positions_BL, jnp.zeros(S), sparsity=K
            ).x_BLD
        )
    )
    before, after = evaluate(x_BLD), evaluate(x_BLD.at[:, 7:].add(1.0))
    np.testing.assert_allclose(after[:, :7], before[:, :7], rtol=1e-5, atol=1e-6)
    assert not np.allclose(after[:, 7:], before[:, 7:])
