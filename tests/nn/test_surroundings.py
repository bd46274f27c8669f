"""Stages in somebody's own program: values that a block closes over, meshes as JAX makes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xmod_jax import gated_residual, routed_stage, threshold_stage

B, L, D, S, K = 2, 6, 4, 3, 3
WEIGHT_SDD = 0.3 * jax.random.normal(jax.random.key(0), (S, D, D))
ROUTER_SD = 0.3 * jax.random.normal(jax.random.key(1), (S, D))
X_BLD = jax.random.normal(jax.random.key(2), (B, L, D))
POSITIONS_BL = jnp.broadcast_to(jnp.arange(L), (B, L))
MASK_D = jnp.array([0.5, 1.0, 2.0, 0.0])


def plain(weight, rows_BCD, positions_BC):
    return jnp.tanh(jnp.cumsum(rows_BCD, axis=1) @ weight)


def loss(block, params, x_BLD=X_BLD, positions_BL=POSITIONS_BL):
    layers = params, jnp.ones(S)
    out = routed_stage(
        gated_residual(block), layers, ROUTER_SD, x_BLD, positions_BL, sparsity=K, bias_scale=0.5
    )
    return jnp.mean(out.x_BLD**2) + jnp.sum(out.alignment_S)


def closing(weight_SDD, mask_D):
    return loss(lambda *arguments: plain(*arguments) * mask_D, weight_SDD)


def given(weight_SDD, mask_D):
    """The same, the mask of every layer being among its parameters."""
    block = lambda params, *data: plain(params[0], *data) * params[1]
    return loss(block, (weight_SDD, jnp.broadcast_to(mask_D, (S, D))))


def scanned(f):
    both = lambda w, mask_D: jax.lax.scan(
        lambda total, mask_D: (total + f(w, mask_D), None), 0.0, jnp.stack([mask_D, mask_D])
    )
    return lambda w, mask_D: both(w, mask_D)[0] / 2


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.checkpoint, scanned], ids=["", "jit", "checkpoint", "scan"]
)
def test_a_value_that_the_block_closes_over_has_its_gradient(around):
    want = jax.grad(given, (0, 1))(WEIGHT_SDD, MASK_D)
    got = jax.grad(around(closing), (0, 1))(WEIGHT_SDD, MASK_D)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def test_a_random_key_that_the_block_closes_over_is_a_constant_under_every_transformation():
    def dropped(weight_SDD, key):
        return loss(lambda *a: plain(*a) * jax.random.bernoulli(key, 0.5, (D,)), weight_SDD)

    key = jax.random.key(3)
    mask_D = jax.random.bernoulli(key, 0.5, (D,)).astype(jnp.float32)
    want = jax.grad(given)(WEIGHT_SDD, mask_D)
    many = lambda weight_SDD: jax.vmap(dropped, (None, 0))(weight_SDD, key[None]).sum()
    for got in (jax.grad(jax.jit(dropped))(WEIGHT_SDD, key), jax.grad(many)(WEIGHT_SDD)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "spec", [P("data", None, None), P(None, "data", None), P(None, None, "data")]
)
def test_stages_take_arrays_on_a_mesh_as_jax_makes_it(spec):
    """Its axes are explicit: JAX then looks at shardings as at shapes, of one device too."""
    mesh = jax.make_mesh((1,), ("data",))
    x_BLD = jax.device_put(X_BLD, NamedSharding(mesh, spec))
    positions_BL = jax.device_put(POSITIONS_BL, NamedSharding(mesh, P(*spec[:2])))
    gradient = jax.jit(jax.grad(lambda w, *data: loss(plain, w, *data), (0, 1)))
    got, want = gradient(WEIGHT_SDD, x_BLD, positions_BL), gradient(WEIGHT_SDD, X_BLD, POSITIONS_BL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)

    layers = WEIGHT_SDD, jnp.ones(S)
    evaluate = jax.jit(
        lambda *data: threshold_stage(
            gated_residual(plain), layers, ROUTER_SD, *data, jnp.zeros(S), sparsity=K
        )
    )
    got, want = evaluate(x_BLD, positions_BL), evaluate(X_BLD, POSITIONS_BL)
    assert got.x_BLD.sharding.spec == spec  # the user goes on with it as it came
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
