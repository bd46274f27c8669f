"""The lean stage against plain autodiff: values and every gradient."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nn.references import (
    Problem,
    make_problem,
    plain_stage,
    plain_stages,
    stream_block,
    toy_block,
)
from xmod_jax.nn import routing
from xmod_jax.nn.routed_stage import (
    Dense,
    gated_residual,
    read_logits,
    routed_stage,
    routed_stages,
)

UPDATE = gated_residual(toy_block)


def both_ways(problem, K, tau, seed, valid_BL=None):
    """Value and gradients of a random scalar of stream and alignment loss, lean and plain."""
    count = routing.capacity(problem.x_BLD.shape[1], K)
    dtype = problem.x_BLD.dtype
    bar_BLD = jax.random.normal(jax.random.key(seed), problem.x_BLD.shape, dtype)
    bar_S = jax.random.normal(jax.random.key(seed + 1), problem.router_SD.shape[:1], dtype)

    def lean(params, router_SD, x_BLD):
        options = {"sparsity": K, "bias_scale": tau, "valid_BL": valid_BL}
        out = routed_stage(UPDATE, params, router_SD, x_BLD, problem.positions_BL, **options)
        return jnp.sum(out.x_BLD * bar_BLD) + out.alignment_S @ bar_S, (out[0], out[1])

    def plain(params, router_SD, x_BLD):
        out = plain_stage(params, router_SD, x_BLD, problem.positions_BL, count, tau, valid_BL)
        return jnp.sum(out[0] * bar_BLD) + out[1] @ bar_S, out

    arguments = problem[:3]
    return (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(*arguments)
        for f in (lean, plain)
    )


def worst(got, want):
    """Largest difference over a pytree, relative to each leaf's largest entry."""
    difference = jax.tree.map(
        lambda a, b: float(np.max(np.abs(a - b)) / (1 + np.max(np.abs(b)))), got, want
    )
    return max(jax.tree.leaves(difference))


@pytest.mark.parametrize(
    ("B", "L", "S", "K"),
    [(1, 16, 4, 4), (3, 13, 5, 4), (2, 3, 6, 8), (2, 1, 3, 4), (4, 9, 1, 2), (2, 8, 3, 1)],
    ids=["plain", "K does not divide L", "L < K", "one token", "one layer", "K = 1"],
)
def test_lean_stage_equals_plain_autodiff_in_float64(B, L, S, K):
    with jax.enable_x64(True):
        lean, plain = both_ways(make_problem(L + S, B, L, 8, S), K, tau=0.7, seed=7)
        assert worst(lean, plain) < 1e-12


@pytest.mark.parametrize(("B", "L", "S", "K"), [(2, 33, 6, 4), (3, 5, 4, 8)])
def test_lean_stage_equals_plain_autodiff_in_float32(B, L, S, K):
    lean, plain = both_ways(make_problem(L, B, L, 16, S, jnp.float32), K, 1.0, seed=3)
    assert worst(lean, plain) < 1e-5


@settings(max_examples=5, deadline=None)
@given(
    B=st.integers(1, 3),
    L=st.integers(1, 20),
    S=st.integers(1, 5),
    K=st.integers(1, 24),
    seed=st.integers(0, 10_000),
)
def test_lean_stage_equals_plain_autodiff_at_any_size(B, L, S, K, seed):
    with jax.enable_x64(True):
        lean, plain = both_ways(make_problem(seed, B, L, 4, S), K, 1.0, seed)
        assert worst(lean, plain) < 1e-12


def _dense() -> Dense:
    forward = lambda w_DD, x_BLD: x_BLD + jnp.tanh(x_BLD @ w_DD)
    backward = lambda w_DD, x_BLD, _, saved, bar_BLD: jax.vjp(forward, w_DD, x_BLD)[1](bar_BLD)
    return Dense(lambda w_DD, x_BLD, _: (forward(w_DD, x_BLD), None), backward)


class Stages(NamedTuple):
    """Two stages with leads and anchors, and weights of their outputs in an objective."""

    problem: Problem
    leads: jax.Array
    anchors: jax.Array
    bar_BLD: jax.Array
    bar_NS: jax.Array

    @classmethod
    def make(cls, P: int) -> Stages:
        N, S, L, D = 2, 2 * P, 13, 6
        problem = make_problem(P, 2, L, D, N * S)
        problem = problem._replace(
            params=jax.tree.map(lambda leaf: leaf.reshape(N, S, D, D), problem.params[0]),
            router_SD=problem.router_SD.reshape(N, S, D),
        )
        keys = jax.random.split(jax.random.key(9), 4)
        leads = jax.random.normal(keys[0], (N, P, D, D)) / D
        anchors = jax.random.normal(keys[1], (N, D, D)) / D
        bar_BLD = jax.random.normal(keys[2], problem.x_BLD.shape)
        return cls(problem, leads, anchors, bar_BLD, jax.random.normal(keys[3], (N, S)))

    @property
    def arguments(self) -> tuple[Any, ...]:
        problem = self.problem
        return problem.params, problem.router_SD, self.leads, self.anchors, problem.x_BLD

    def objective(self, out_BLD: jax.Array, losses_NS: jax.Array) -> jax.Array:
        return jnp.sum(out_BLD * self.bar_BLD) + jnp.sum(losses_NS * self.bar_NS)

    def lean(self, K: int, *arguments: Any, into: Any = None) -> jax.Array:
        params, router_NSD, leads, anchors, x_BLD = arguments
        out = routed_stages(
            stream_block,
            params,
            router_NSD,
            x_BLD,
            self.problem.positions_BL,
            sparsity=K,
            bias_scale=0.7,
            anchor=_dense(),
            anchor_params=anchors,
            lead=_dense(),
            lead_params=leads,
            reads_stream=True,
            into=into,
        )
        return self.objective(out.x_BLD, out.alignment_S)


@pytest.mark.parametrize(("P", "K"), [(1, 4), (2, 4), (3, 5)])
def test_leads_anchors_and_the_stream_get_the_gradients_of_plain_autodiff(P, K):
    with jax.enable_x64(True):
        stages = Stages.make(P)

        def plain(params, router_NSD, leads, anchors, x_BLD):
            given = stages.problem._replace(params=params, router_SD=router_NSD)
            count = routing.capacity(x_BLD.shape[1], K)
            return stages.objective(*plain_stages(given, leads, anchors, P, count, 0.7, x_BLD))

        got, want = (
            jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3, 4)))(*stages.arguments)
            for f in (functools.partial(stages.lean, K), plain)
        )
        assert worst(got, want) < 1e-12


def test_gradients_of_stacks_are_added_to_given_sums_and_the_others_are_not():
    with jax.enable_x64(True):
        stages = Stages.make(2)
        params, _, leads, anchors, _ = stages.arguments
        sums = jax.tree.map(lambda leaf: jnp.cos(leaf + 1), (params, (anchors, leads)))
        gradient = jax.jit(jax.grad(functools.partial(stages.lean, 4), argnums=(0, 1, 2, 3, 4)))
        alone = gradient(*stages.arguments)
        with_sums = jax.jit(
            lambda sums, *arguments: jax.grad(
                lambda *arguments: stages.lean(4, *arguments, into=sums), argnums=(0, 1, 2, 3, 4)
            )(*arguments)
        )(sums, *stages.arguments)
        zero = jnp.zeros(())
        added = sums[0], zero, sums[1][1], sums[1][0], zero
        want = [jax.tree.map(lambda g, s: g + s, *pair) for pair in zip(alone, added, strict=True)]
        assert worst(with_sums, tuple(want)) < 1e-12


def test_padding_neither_competes_nor_changes_nor_counts():
    with jax.enable_x64(True):
        problem = make_problem(0, 2, 12, 8, 4)
        valid_BL = jnp.arange(12) < jnp.array([12, 2])[:, None]
        lean, plain = both_ways(problem, 3, 1.0, 5, valid_BL)
        assert worst(lean, plain) < 1e-12
        (_, (x_BLD, _)), _ = lean
        assert np.array_equal(x_BLD[1, 2:], problem.x_BLD[1, 2:])


@pytest.mark.parametrize("valid", [12, 2, 0])
def test_padding_enters_neither_the_smallest_selected_logit_nor_a_mean(valid):
    """The second sequence has fewer real tokens than are selected, or none at all."""
    problem = make_problem(0, 2, 12, 8, 1, jnp.float32)
    valid_BL = jnp.arange(12) < jnp.array([12, valid])[:, None]
    out = routed_stage(UPDATE, *problem, sparsity=3, valid_BL=valid_BL)
    z_BL = np.asarray(problem.x_BLD @ problem.router_SD[0])
    smallest = [np.sort(z_BL[0])[-4]]
    if valid:
        smallest.append(np.sort(z_BL[1, :valid])[-min(4, valid)])
    np.testing.assert_allclose(out.kth_S, [np.mean(smallest)], rtol=1e-5)


def test_sequences_of_padding_alone_give_no_loss_and_no_gradient():
    problem = make_problem(0, 2, 12, 8, 3, jnp.float32)
    none_BL = jnp.zeros((2, 12), bool)

    def alignment(router_SD):
        given = problem._replace(router_SD=router_SD)
        return routed_stage(UPDATE, *given, sparsity=3, valid_BL=none_BL).alignment_S.sum()

    value, gradient = jax.value_and_grad(alignment)(problem.router_SD)
    assert value == 0 and not np.any(gradient)


def test_a_sequence_does_not_depend_on_its_batch():
    problem = make_problem(1, 4, 17, 8, 5, jnp.float32)
    run = lambda x_BLD, positions_BL: (
        routed_stage(
            UPDATE, problem.params, problem.router_SD, x_BLD, positions_BL, sparsity=4
        ).x_BLD
    )
    together = run(problem.x_BLD, problem.positions_BL)
    for b in range(4):
        alone = run(problem.x_BLD[b : b + 1], problem.positions_BL[b : b + 1])
        np.testing.assert_allclose(together[b : b + 1], alone, rtol=1e-5, atol=1e-6)


def test_huge_router_logits_keep_loss_and_gradients_finite():
    problem = make_problem(2, 2, 16, 8, 3, jnp.float32)
    problem = problem._replace(router_SD=problem.router_SD * 1e5)
    lean, _ = both_ways(problem, 4, 1.0, seed=1)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(lean))


def test_every_router_gets_a_gradient_through_the_score_alone():
    problem = make_problem(3, 2, 16, 8, 4, jnp.float32)

    def loss(router_SD):
        out = routed_stage(
            UPDATE, problem.params, router_SD, problem.x_BLD, problem.positions_BL, sparsity=4
        )
        return jnp.sum(out.x_BLD**2)

    assert np.all(np.linalg.norm(jax.grad(loss)(problem.router_SD), axis=-1) > 0)


def test_bfloat16_stream_keeps_router_and_decisions_in_float32():
    problem = make_problem(4, 1, 3, 8, 1, jnp.float32)
    # 1.0, 1.001 and 1.002 are one number in bfloat16; a float32 router tells them apart.
    router_SD = jnp.zeros((1, 8)).at[0, 0].set(1.0).at[0, 1].set(0.001)
    x_BLD = jnp.ones((1, 3, 8)).at[0, :, 1].set(jnp.array([0.0, 1.0, 2.0])).astype(jnp.bfloat16)
    out = routed_stage(UPDATE, problem.params, router_SD, x_BLD, problem.positions_BL, sparsity=3)
    changed_L = np.any(np.asarray(out.x_BLD != x_BLD), axis=(0, 2))
    assert changed_L.tolist() == [False, False, True]
    assert out.kth_S.dtype == jnp.float32


def test_routers_multiply_in_full_precision():
    """Accelerators round float32 operands by default; a decision near a threshold would turn."""
    x_BLD, router_SD = jnp.ones((1, 4, 8), jnp.bfloat16), jnp.ones((3, 8))
    gradient = jax.grad(lambda router_SD: read_logits(x_BLD, router_SD).sum())
    for traced in (
        jax.make_jaxpr(read_logits)(x_BLD, router_SD),
        jax.make_jaxpr(gradient)(router_SD),
    ):
        products = [e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert products
        for product in products:
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
