"""Experts against a loop over experts in NumPy, their balance, and the layer's own gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xmod_jax.config import Backbone, MoE
from xmod_jax.nn.layers import rotary_phases
from xmod_jax.nn.moe import Experts, MoEBlock, moe_forward, moe_layer, move_bias

D = 16


def experts(config: MoE, seed: int = 0, spread: float = 1.0) -> Experts:
    """Experts with weights large enough to matter."""
    module = Experts(D, config, rngs=nnx.Rngs(seed))
    wide = jnp.zeros(0, float).dtype  # float64 where a test enables it
    module = jax.tree.map(lambda leaf: (20 * leaf).astype(wide), module)
    module.bias[...] = spread * jax.random.normal(jax.random.key(seed), (config.experts,), float)
    return module


def silu(x):
    return x / (1 + np.exp(-x))


def by_loop(module: Experts, x_TD: np.ndarray, config: MoE) -> np.ndarray:
    """SPEC 4, expert by expert."""
    w = lambda param: np.asarray(param[...], np.float64)
    score_TX = 1 / (1 + np.exp(-x_TD @ w(module.router)))
    order = np.argsort(-(score_TX + w(module.bias)), axis=1, kind="stable")[:, : config.active]
    out_TD = np.zeros_like(x_TD)
    for x in range(config.experts):
        for t in np.flatnonzero((order == x).any(1)):
            weight = config.active * score_TX[t, x] / score_TX[t, order[t]].sum()
            hidden = silu(x_TD[t] @ w(module.gate)[x]) * (x_TD[t] @ w(module.up)[x])
            out_TD[t] += weight * hidden @ w(module.down)[x]
    if (s := module.shared) is not None:
        out_TD += (silu(x_TD @ w(s.gate)) * (x_TD @ w(s.up))) @ w(s.down)
    return out_TD


@pytest.mark.parametrize(
    "config",
    [MoE(8, 2, 2, 6), MoE(5, 5, 0, 4), MoE(16, 1, 1, 8), MoE(1, 1, 0, 6)],
    ids=["6 of 8 idle", "all active", "one active", "one expert"],
)
def test_experts_equal_a_loop_over_experts(config):
    with jax.enable_x64(True):
        module = experts(config)
        x_BLD = jax.random.normal(jax.random.key(1), (2, 9, D), jnp.float64)
        out_BLD, output, _ = jax.jit(lambda m, x: m(x, None, None))(module, x_BLD)
        want_TD = by_loop(module, np.asarray(x_BLD).reshape(18, D), config)
        np.testing.assert_allclose(out_BLD.reshape(18, D), want_TD, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(jnp.sum(output.load_X), 1.0)
        # One expert after the other, read from the second layer of a stack.
        stack = jax.tree.map(lambda leaf: jnp.stack([0 * leaf, leaf]), module)
        few_BLD = jax.jit(lambda m, s, x: m.of_few(s, (1,), x))(module, stack, x_BLD)
        np.testing.assert_allclose(few_BLD.reshape(18, D), want_TD, rtol=1e-10, atol=1e-12)


def plain_experts(module: Experts, x_BLD, config: MoE):
    """The same in plain JAX, every expert on every token, for autodiff."""
    x_TD = x_BLD.reshape(-1, D)
    score_TX = jax.nn.sigmoid(x_TD @ module.router[...])
    _, expert_Tk = jax.lax.top_k(score_TX + module.bias[...], config.active)
    hot_TX = jnp.sum(jax.nn.one_hot(expert_Tk, config.experts, dtype=x_TD.dtype), axis=1)
    weight_TX = hot_TX * score_TX
    weight_TX = config.active * weight_TX / jnp.sum(weight_TX, axis=1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("td,xdf->txf", x_TD, module.gate[...]))
    hidden *= jnp.einsum("td,xdf->txf", x_TD, module.up[...])
    out_TD = jnp.einsum("txf,xfd,tx->td", hidden, module.down[...], weight_TX)
    share_TX = score_TX / jnp.sum(score_TX, axis=1, keepdims=True)
    load_X = jnp.mean(hot_TX, axis=0) / config.active
    balance = config.experts * jnp.sum(load_X * jnp.mean(share_TX, axis=0))
    assert module.shared is not None
    return out_TD.reshape(x_BLD.shape) + module.shared(x_BLD), balance


def test_gradients_equal_autodiff_of_every_expert_on_every_token():
    with jax.enable_x64(True):
        config = MoE(6, 2, 1, 5)
        module = experts(config, seed=3)
        x_BLD = jax.random.normal(jax.random.key(4), (2, 11, D), jnp.float64)
        bar_BLD = jax.random.normal(jax.random.key(5), x_BLD.shape, jnp.float64)

        def scalar(function):
            def loss(module, x_BLD):
                out_BLD, balance = function(module, x_BLD)
                return jnp.sum(out_BLD * bar_BLD) + 3 * balance

            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(module, x_BLD)

        def ours(module, x_BLD):
            out_BLD, output, _ = module(x_BLD, None, None)
            return out_BLD, output.balance

        got, want = scalar(ours), scalar(lambda module, x: plain_experts(module, x, config))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-10)


def test_the_layers_gradient_equals_autodiff_through_it():
    with jax.enable_x64(True):
        block = MoEBlock(Backbone(D, 8, 2, 1, 24, 29), MoE(6, 2, 1, 5), rngs=nnx.Rngs(0))
        block = jax.tree.map(lambda leaf: (10 * leaf).astype(jnp.float64), block)
        x_BLD = jax.random.normal(jax.random.key(1), (2, 7, D), jnp.float64)
        phases = rotary_phases(jnp.broadcast_to(jnp.arange(7), (2, 7)), 8, 1e6)

        def loss(layer):
            def scalar(block, x_BLD):
                y_BLD, output = layer(block, x_BLD, phases, None)[:2]
                return jnp.sum(jnp.sin(y_BLD)) + output.balance

            return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1)))(block, x_BLD)

        got, want = loss(moe_layer), loss(moe_forward)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-12)


def test_padding_gets_no_expert_and_enters_no_statistic():
    with jax.enable_x64(True):
        config = MoE(6, 2, 0, 5)
        module = experts(config, seed=6)
        x_BLD = jax.random.normal(jax.random.key(7), (2, 8, D), jnp.float64)
        valid_BL = jnp.arange(8) < jnp.array([8, 3])[:, None]
        run = jax.jit(lambda m, x, valid: m(x, valid, None)[:2])
        padded, with_padding = run(module, x_BLD, valid_BL)
        assert np.all(padded[1, 3:] == 0)
        real = jnp.concatenate([x_BLD[0], x_BLD[1, :3]])[None]
        alone, without = run(module, real, None)
        np.testing.assert_allclose(alone[0, 8:], padded[1, :3], rtol=1e-12)
        for a, b in zip(with_padding, without, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_balance_is_one_when_even_and_grows_with_collapse():
    config = MoE(4, 1, 0, 4)
    module = experts(config, spread=0.0)
    module.router[...] = jnp.zeros_like(module.router[...])
    even = jnp.tile(jnp.eye(4, D), (4, 1))[None]
    module.router[...] = 10 * jnp.eye(D, 4)
    _, output, _ = module(even, None, None)
    np.testing.assert_allclose(output.balance, 1.0, atol=1e-6)
    np.testing.assert_allclose(output.load_X, 0.25)
    _, output, _ = module(jnp.tile(jnp.eye(1, D), (16, 1))[None], None, None)
    assert output.load_X.tolist() == [1.0, 0.0, 0.0, 0.0] and output.balance > 1.5


def test_the_bias_moves_against_the_load_and_stays_centred():
    load_NX = jnp.array([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    bias_NX = jnp.zeros((2, 4))
    for _ in range(100):
        bias_NX = move_bias(bias_NX, load_NX, 0.01)
    assert np.all(np.abs(bias_NX.mean(-1)) < 1e-6)
    assert bias_NX[0, 0] < -1 and np.all(bias_NX[0, 1:] > 0.4)
    assert np.all(bias_NX[1] == 0)


def test_the_bias_chooses_and_does_not_weigh():
    """With a bias that forces expert 2 its weight is still that of its score alone."""
    config = MoE(3, 1, 0, 4)
    module = experts(config, spread=0.0)
    module.bias[...] = jnp.array([0.0, 0.0, 5.0])
    x_BLD = jax.random.normal(jax.random.key(0), (1, 5, D))
    out_BLD, output, _ = module(x_BLD, None, None)
    assert output.load_X.tolist() == [0.0, 0.0, 1.0]
    only = jax.nn.silu(x_BLD @ module.gate[...][2]) * (x_BLD @ module.up[...][2])
    np.testing.assert_allclose(out_BLD, only @ module.down[...][2], rtol=1e-5, atol=1e-5)
