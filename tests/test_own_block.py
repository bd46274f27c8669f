"""The worked example of the README: a routed stage around a block of one's own, NNX and Linen."""

from __future__ import annotations

import functools

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


def my_loss(blocks, block, x_BLD, router_SD):
    positions_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
    params = blocks, jnp.ones(S)
    out = routed_stage(gated_residual(block), params, router_SD, x_BLD, positions_BL, sparsity=K)
    return jnp.mean(out.x_BLD.astype(jnp.float32) ** 2) + jnp.mean(out.alignment_S)


def my_arrays():
    x_BLD = jax.random.normal(jax.random.key(1), (B, L, D))
    return x_BLD, 0.3 * jax.random.normal(jax.random.key(2), (S, D))


def test_a_stage_of_mine_goes_through_the_transformations_of_jax():
    blocks, block = linen_stack()
    x_BLD, router_SD = my_arrays()
    of_x = lambda x_BLD: my_loss(blocks, block, x_BLD, router_SD)
    want = jax.jit(jax.grad(of_x))(x_BLD)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    close(jax.jit(jax.grad(jax.checkpoint(of_x)))(x_BLD), want)
    close(jax.jit(jax.vmap(jax.grad(of_x)))(x_BLD[None])[0], want)
    loop = lambda x_BLD: jax.lax.scan(lambda total, x: (total + of_x(x), None), 0.0, x_BLD[None])[0]
    close(jax.jit(jax.grad(loop))(x_BLD), want)
    assert jax.eval_shape(jax.grad(of_x), x_BLD).shape == x_BLD.shape
    close(jax.jit(jax.grad(of_x), donate_argnums=0)(x_BLD + 0), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_stage_of_mine_runs_in_half_precision(dtype):
    blocks, block = linen_stack()
    x_BLD, router_SD = my_arrays()
    gradient = jax.jit(jax.grad(lambda x_BLD: my_loss(blocks, block, x_BLD, router_SD)))
    got, want = gradient(x_BLD.astype(dtype)), gradient(x_BLD)
    assert got.dtype == dtype
    assert np.linalg.norm(got.astype(jnp.float32) - want) < 0.1 * np.linalg.norm(want)


def test_integers_and_random_keys_among_my_parameters_are_constants():
    """Dropout by a key for each layer, of a rate by its number."""
    x_BLD, router_SD = my_arrays()
    keys, number = jax.random.split(jax.random.key(3), S), jnp.arange(1, S + 1)

    def block(params, rows, positions):
        keep = jax.random.bernoulli(params["key"], 1 / params["number"], rows.shape)
        return rows * params["scale"] * keep

    def of_scale(scale_SD):
        blocks = {"scale": scale_SD, "key": keys, "number": number}
        return my_loss(blocks, block, x_BLD, router_SD)

    scale_SD = jnp.full((S, D), 0.5)
    gradient = jax.jit(jax.grad(of_scale))(scale_SD)
    step = jnp.zeros_like(scale_SD).at[0].set(1e-2)
    slope = (of_scale(scale_SD + step) - of_scale(scale_SD - step)) / 2e-2
    np.testing.assert_allclose(jnp.sum(gradient[0]), slope, rtol=2e-2)


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
