"""Threshold routing by buckets against a masked pass that runs every layer on every token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nn.references import Problem, make_problem, toy_block
from xmod_jax.nn import routing
from xmod_jax.nn.routed_stage import gated_residual
from xmod_jax.nn.threshold_stage import _sequences_together, threshold_stage

UPDATE = gated_residual(toy_block)


def masked_stage(problem, threshold_S, tau):
    """Every layer, one sequence at a time, on exactly the routed rows; masks of every layer."""
    block, gate_S = problem.params
    streams, masks = [], []
    for x_LD, positions_L in zip(problem.x_BLD, problem.positions_BL, strict=True):
        chosen_L, mask_SL = jnp.zeros(len(x_LD)), []
        for s in range(len(problem.router_SD)):
            z_L = x_LD @ problem.router_SD[s] - tau * chosen_L
            idx = np.flatnonzero(z_L >= threshold_S[s])
            if len(idx):
                layer = jax.tree.map(lambda leaf, s=s: leaf[s], block)
                new = toy_block(layer, x_LD[idx][None], positions_L[idx][None])[0]
                weight = gate_S[s] * jax.nn.sigmoid(z_L[idx])
                x_LD = x_LD.at[idx].add(weight[:, None] * new)
            mask_SL.append(np.isin(np.arange(len(x_LD)), idx))
            chosen_L += mask_SL[-1]
        streams.append(x_LD)
        masks.append(mask_SL)
    return jnp.stack(streams), np.array(masks)  # [B, S, L]


def run(problem, threshold_S, K, tau):
    return threshold_stage(
        UPDATE,
        problem.params,
        problem.router_SD,
        problem.x_BLD,
        problem.positions_BL,
        threshold_S,
        sparsity=K,
        bias_scale=tau,
    )


@pytest.mark.parametrize("level", [-100.0, -0.5, 0.0, 1.0, 100.0], ids=lambda level: f"at {level}")
def test_buckets_equal_the_masked_pass_and_drop_no_token(level):
    with jax.enable_x64(True):
        problem = make_problem(5, 3, 19, 8, 4)
        threshold_S = jnp.full(4, level)
        out = run(problem, threshold_S, K=4, tau=0.7)
        want_BLD, mask_BSL = masked_stage(problem, threshold_S, 0.7)
        np.testing.assert_allclose(out.x_BLD, want_BLD, atol=1e-12)
        np.testing.assert_allclose(out.routed_S, mask_BSL.mean((0, 2)), atol=1e-6)


def test_statistics_of_the_selections():
    with jax.enable_x64(True):
        problem = make_problem(6, 3, 15, 8, 5)
        out = run(problem, jnp.zeros(5), K=3, tau=0.5)
        _, mask_BSL = masked_stage(problem, jnp.zeros(5), 0.5)
    np.testing.assert_allclose(out.coverage, mask_BSL.any(1).mean(), atol=1e-6)
    counts = np.bincount(mask_BSL.sum(1).ravel(), minlength=6)
    assert np.array_equal(out.updates, counts)
    both = (mask_BSL[:, 1:] & mask_BSL[:, :-1]).sum(-1)
    either = (mask_BSL[:, 1:] | mask_BSL[:, :-1]).sum(-1)
    for b in range(3):
        pairs = either[b] > 0
        np.testing.assert_allclose(
            out.jaccard_B[b], (both[b][pairs] / either[b][pairs]).mean(), atol=1e-6
        )


def test_the_same_tokens_in_every_layer_are_jaccard_1_and_no_pair_is_nan():
    problem = make_problem(7, 2, 12, 8, 4, jnp.float32)
    same = problem._replace(
        router_SD=jnp.broadcast_to(problem.router_SD[:1], problem.router_SD.shape),
        params=(problem.params[0], jnp.zeros(4)),
    )
    collapsed = run(same, jnp.zeros(4), K=4, tau=0.0)
    np.testing.assert_allclose(collapsed.jaccard_B, 1.0)
    assert np.count_nonzero(collapsed.updates) == 2  # either never or in all layers
    assert np.all(np.isnan(run(same, jnp.full(4, 1e9), K=4, tau=0.0).jaccard_B))


def test_padding_of_a_bucket_touches_nothing():
    problem = make_problem(8, 2, 16, 8, 3, jnp.float32)
    out = run(problem, jnp.full(3, 100.0), K=4, tau=1.0)
    assert np.array_equal(out.x_BLD, problem.x_BLD)


def test_sequences_that_run_apart_give_what_each_gives_alone():
    with jax.enable_x64(True):
        problem = make_problem(9, 2, 600, 8, 3)
        out = run(problem, jnp.zeros(3), K=1, tau=0.5)
        parts = [a[:1] for a in problem[2:]], [a[1:] for a in problem[2:]]
        alone = [run(Problem(*problem[:2], *a), jnp.zeros(3), K=1, tau=0.5) for a in parts]
    join = lambda field: np.concatenate([getattr(one, field) for one in alone])
    np.testing.assert_allclose(out.x_BLD, join("x_BLD"), atol=1e-12)
    np.testing.assert_allclose(out.jaccard_B, join("jaccard_B"), atol=1e-6)
    for field in ("routed_S", "coverage"):
        mean = np.mean([getattr(one, field) for one in alone], axis=0)
        np.testing.assert_allclose(getattr(out, field), mean, atol=1e-6)
    assert np.array_equal(out.updates, alone[0].updates + alone[1].updates)


@pytest.mark.parametrize(
    ("batch", "count", "together"), [(4, 512, 1), (4, 511, 2), (6, 200, 3), (5, 100, 5), (4, 1, 4)]
)
def test_as_many_sequences_run_together_as_fill_a_product(batch, count, together):
    assert _sequences_together(batch, count) == together


@settings(max_examples=200, deadline=None)
@given(L=st.integers(1, 5000), K=st.integers(1, 300))
def test_buckets_hold_every_count_from_0_to_l(L, K):
    sizes = routing.bucket_sizes(L, K)
    assert sizes[0] == 0 and sizes[-1] == L
    assert list(sizes) == sorted(set(sizes))
    C = routing.capacity(L, K)
    assert any(C <= size < C + 8 for size in sizes)  # the trained load wastes few rows
    assert 1 <= routing.capacity(L, K) <= L


@settings(max_examples=30, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=1, max_size=12), extra=st.integers(0, 3))
def test_compaction_lists_selected_positions_in_order(mask, extra):
    count = min(len(mask), max(1, sum(mask) + extra))
    idx_C = np.asarray(routing.compact(jnp.array([mask]), count))[0]
    real = idx_C[idx_C < len(mask)]
    assert real.tolist() == np.flatnonzero(mask).tolist()
    assert len(set(idx_C.tolist())) == count and list(idx_C) == sorted(idx_C)


def test_ties_go_to_the_earliest_position_and_exactly_c_are_selected():
    z_BL = jnp.array([[1.0, 2.0, 2.0, 2.0, 0.0], [3.0, 3.0, 3.0, 3.0, 3.0]])
    pick = routing.select_top_k(z_BL, 2)
    assert pick.idx_BC.tolist() == [[1, 2], [0, 1]]
    assert pick.mask_BL.sum(-1).tolist() == [2, 2]
    assert pick.kth_B.tolist() == [2.0, 3.0]
