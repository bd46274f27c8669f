"""Grouped products against a loop over groups: values, gradients, every shape of load."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmod_jax.nn import grouped


def by_loop(x_TD, weight_XDO, share_Tk, group_Tk):
    """Each token's copies, one at a time, by the group they name; group X is dropped."""
    X = len(weight_XDO)
    out_TO = jnp.zeros((len(x_TD), weight_XDO.shape[2]), x_TD.dtype)
    for x in range(X):
        weight_T = jnp.sum(jnp.where(group_Tk == x, share_Tk, 0), axis=1)
        out_TO += weight_T[:, None] * jnp.tanh(x_TD @ weight_XDO[x])
    return out_TO


def by_groups(x_TD, weight_XDO, share_Tk, group_Tk, block):
    groups = grouped.sort_by_group(group_Tk, len(weight_XDO), block)
    rows_MD = grouped.spread(x_TD, groups)
    out_MO = jnp.tanh(grouped.grouped_matmul(rows_MD, weight_XDO, groups.size_X, block))
    return grouped.collect(out_MO, share_Tk, groups)


def problem(seed: int, T: int, X: int, k: int, group_Tk=None):
    keys = jax.random.split(jax.random.key(seed), 5)
    x_TD = jax.random.normal(keys[0], (T, 6), jnp.float64)
    weight_XDO = jax.random.normal(keys[1], (X, 6, 5), jnp.float64)
    share_Tk = jax.random.uniform(keys[2], (T, k), jnp.float64)
    if group_Tk is None:
        draw = jax.vmap(lambda key: jax.random.permutation(key, X)[:k])
        group_Tk = draw(jax.random.split(keys[3], T)).astype(jnp.int32)
    bar_TO = jax.random.normal(keys[4], (T, 5), jnp.float64)
    return x_TD, weight_XDO, share_Tk, jnp.asarray(group_Tk, jnp.int32), bar_TO


def assert_same(block, x_TD, weight_XDO, share_Tk, group_Tk, bar_TO):
    value_and_pull = lambda function, *rest: jax.jit(
        lambda *a: (
            function(*a, group_Tk, *rest),
            jax.vjp(lambda *b: function(*b, group_Tk, *rest), *a)[1](bar_TO),
        )
    )(x_TD, weight_XDO, share_Tk)
    got, want = value_and_pull(by_groups, block), value_and_pull(by_loop)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-10, atol=1e-10)
    return got


@pytest.fixture(params=["small", "large"])
def matrix_size(request, monkeypatch):
    """Both ways through blocks: matrices copied for every block, and one block at a time."""
    monkeypatch.setattr(grouped, "_SMALL_MATRIX", {"small": 1 << 13, "large": 0}[request.param])


# `ragged_dot` is what accelerators may use; on CPU it is dense, slow, and right.
@pytest.mark.parametrize(
    ("block", "T", "X", "k"),
    [(4, 1, 1, 1), (1, 1, 5, 2), (4, 23, 4, 2), (8, 40, 16, 3), (grouped.RAGGED, 23, 4, 2)],
)
def test_values_and_gradients_equal_a_loop(matrix_size, block, T, X, k):
    with jax.enable_x64(True):
        assert_same(block, *problem(T + X, T, X, k))


@pytest.mark.parametrize("block", [4, grouped.RAGGED])
def test_all_tokens_to_one_group_and_exact_zero_gradient_to_the_others(matrix_size, block):
    with jax.enable_x64(True):
        _, (_, dweight_XDO, _) = assert_same(
            block, *problem(0, 13, 5, 1, group_Tk=np.full((13, 1), 3))
        )
        dweight_XDO = np.asarray(dweight_XDO)
        assert np.all(dweight_XDO[[0, 1, 2, 4]] == 0) and np.all(dweight_XDO[3] != 0)


@pytest.mark.parametrize("block", [4, grouped.RAGGED])
def test_dropped_copies_count_nothing(block):
    with jax.enable_x64(True):
        group_Tk = np.array([[0, 2], [3, 3], [1, 3], [2, 0], [3, 1]])  # 3 = X: dropped
        out_TO, (dx_TD, _, dshare_Tk) = assert_same(block, *problem(1, 5, 3, 2, group_Tk))
        assert np.all(out_TO[1] == 0) and np.all(dx_TD[1] == 0)
        assert np.all(np.asarray(dshare_Tk)[group_Tk == 3] == 0)
        groups = grouped.sort_by_group(jnp.asarray(group_Tk, jnp.int32), 3, block)
        assert groups.size_X.tolist() == [2, 2, 2]


@pytest.mark.parametrize("block", [4, grouped.RAGGED])
def test_bfloat16_rows_give_a_float32_gradient_near_float32s(matrix_size, block):
    """The model's rows are bfloat16 where its parameters are float32."""
    with jax.enable_x64(True):
        made = [np.asarray(each) for each in problem(3, 23, 4, 2)]
    x_TD, weight_XDO, share_Tk, group_Tk, bar_TO = (
        jnp.asarray(each, jnp.float32 if each.dtype.kind == "f" else jnp.int32) for each in made
    )

    def gradients(dtype):
        narrow = lambda x, w, s: by_groups(x.astype(dtype), w, s.astype(dtype), group_Tk, block)
        loss = lambda *each: jnp.sum(narrow(*each).astype(jnp.float32) * bar_TO)
        return jax.grad(loss, argnums=(0, 1, 2))(x_TD, weight_XDO, share_Tk)

    for got, want in zip(gradients(jnp.bfloat16), gradients(jnp.float32), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=0, atol=0.05 * np.abs(want).max())


@settings(max_examples=10, deadline=None)
@given(
    T=st.integers(1, 40), X=st.integers(1, 9), k=st.integers(1, 3), block=st.sampled_from([1, 2, 8])
)
def test_every_copy_has_a_row_of_its_group_and_order_is_kept(T, X, k, block):
    k = min(k, X)
    rng = np.random.default_rng(T * 100 + X)
    group_Tk = np.array([rng.permutation(X)[:k] for _ in range(T)], np.int32)
    groups = grouped.sort_by_group(jnp.asarray(group_Tk), X, block)
    slot_Tk, size_X = np.asarray(groups.slot_Tk), np.asarray(groups.size_X)
    assert len(np.unique(slot_Tk)) == T * k and slot_Tk.max() < len(groups.token_M)
    assert np.array_equal(
        np.asarray(groups.token_M)[slot_Tk], np.repeat(np.arange(T)[:, None], k, 1)
    )
    assert np.array_equal(size_X, np.bincount(group_Tk.ravel(), minlength=X))
    start = 0
    for x in range(X):  # each group from a multiple of the block on, tokens in order
        mine = np.sort(slot_Tk[group_Tk == x])
        assert mine.tolist() == list(range(start, start + size_X[x]))
        start += -(-size_X[x] // block) * block
    assert np.sum(np.asarray(groups.token_M) == T) == len(groups.token_M) - T * k


def test_the_probe_refuses_a_dense_ragged_dot():
    """On CPU `ragged_dot` multiplies every row with every matrix: the probe must see that."""
    assert grouped.block_rows(4096, 16) != grouped.RAGGED
    X, rows, size = 16, 256, 64
    shapes = (
        jax.ShapeDtypeStruct((rows, size), jnp.float32),
        jax.ShapeDtypeStruct((X, size, size), jnp.float32),
        jax.ShapeDtypeStruct((X,), jnp.int32),
    )
    needed = 2.0 * rows * size * size
    assert not grouped._is_lean(jax.lax.ragged_dot, shapes, needed)
    plain = lambda rows, weight, sizes: rows @ weight[0] + sizes[0]
    assert grouped._is_lean(plain, shapes, needed)


def test_the_probe_refuses_what_no_flops_are_told_of(monkeypatch):
    shapes = (jax.ShapeDtypeStruct((4, 4), jnp.float32),)
    square = lambda x: x @ x
    assert grouped._is_lean(square, shapes, 1e9)
    silent = lambda compiled: {"bytes accessed": 1.0}
    monkeypatch.setattr(jax.stages.Compiled, "cost_analysis", silent)
    assert not grouped._is_lean(square, shapes, 1e9)
