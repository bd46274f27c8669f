import dataclasses
import math

import numpy as np
import pytest

from tests.law.grid import dense_loss, paper_rows, tokens_of
from xmod_jax.errors import UserError
from xmod_jax.law import observations as obs
from xmod_jax.law.observations import Row, Table, dense_curves, observe


def _refusal(action):
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _row(loss=2.7, flops=1e20, k=8.0, source="row", L=2048, n_total=2e9, tokens=1e10):
    return Row("556M", L, 5e8, n_total, k, 1, flops, tokens, loss, source)


def test_dense_reference_is_linear_in_log_flops():
    dense = [_row(3.0, 1e19, 1), _row(2.8, 1e20, 1), _row(2.7, 1e21, 1)]
    observation = observe([_row(2.5, math.sqrt(1e19 * 1e20)), *dense])[0]
    assert observation.dense_loss == pytest.approx(2.9)
    assert observation.delta == pytest.approx(-0.4)
    assert observation.dense_tokens == pytest.approx(1e10)
    assert not observation.extrapolated


def test_dense_reference_is_of_the_same_family_and_context():
    for observation in observe(paper_rows()):
        row = observation.row
        assert observation.dense_loss == pytest.approx(dense_loss(row.family, row.L, 1e20))
        tokens = tokens_of(row.family, int(row.L), "dense", 1e20)
        assert observation.dense_tokens == pytest.approx(tokens)


def test_missing_dense_reference_names_the_rows():
    rows = [_row(source="a"), _row(source="b", L=4096), _row(k=1, source="c")]
    message = _refusal(lambda: observe(rows))
    assert "no dense reference" in message and "b (556M, L=4096)" in message
    assert "a (" not in message
    assert "every row has K = 1" in _refusal(lambda: observe([_row(k=1)]))


@pytest.mark.parametrize(("flops", "expected"), [(1e18, 3.2), (1e22, 2.6)])
def test_flops_outside_the_dense_curve_are_refused_or_marked(flops, expected):
    dense = [_row(3.0, 1e19, 1), _row(2.8, 1e20, 1), _row(2.7, 1e21, 1)]
    rows = [*dense, _row(2.5, flops, source="far"), _row(2.5, 5e19, source="near")]
    message = _refusal(lambda: observe(rows))
    assert "does not cover" in message and "far (" in message and "near" not in message
    marked, plain = observe(rows, extrapolate=True)
    assert marked.extrapolated and not plain.extrapolated
    assert marked.dense_loss == pytest.approx(expected)


def test_rounding_to_whole_steps_stays_within_a_dense_point():
    dense = _row(2.9, 1e20, 1)
    assert observe([dense, _row(flops=1.01e20)])[0].dense_loss == 2.9
    assert "does not cover" in _refusal(lambda: observe([dense, _row(flops=1.03e20)]))
    assert observe([dense, _row(flops=1.03e20)], tolerance=0.05)[0].dense_loss == 2.9
    assert observe([dense, _row(flops=2e20)], extrapolate=True)[0].extrapolated


def test_sparse_duplicates_are_refused_by_name():
    dense = _row(2.9, k=1, source="d")
    message = _refusal(lambda: observe([dense, _row(source="a"), _row(2.6, source="b")]))
    assert "duplicated" in message and "a = b" in message
    observe([dense, _row(), _row(n_total=3e9), _row(tokens=2e10)])


@pytest.mark.parametrize("apart", [0.0, 1e-9, 1e-4])
def test_dense_rows_at_one_compute_count_as_their_mean(apart):
    first = _row(2.8, 1e20, 1, source="a")
    again = _row(3.0, 1e20 * (1 + apart), 1, source="b", tokens=1e10 * (1 + apart))
    (curve,) = dense_curves([first, again]).values()
    assert [row.source for row in curve] == ["mean of a = b"]
    (observation,) = observe([first, again, _row(2.7)])
    assert observation.dense_loss == pytest.approx(2.9)
    beyond = observe([first, again, _row(2.7, 1e21)], extrapolate=True)[0]
    assert beyond.dense_loss == pytest.approx(2.9) and beyond.extrapolated


def test_dense_rows_of_other_families_lengths_or_computes_are_not_merged():
    near = _row(2.8, 1e20, 1)
    other = dataclasses.replace(near, family="936M")
    rows = [near, other, _row(2.9, 1.01e20, 1), _row(2.9, 1e20, 1, L=4096)]
    assert [len(curve) for curve in dense_curves(rows).values()] == [2, 1, 1]


def test_dense_rows_of_several_sizes_at_one_compute_are_refused():
    small, large = (_row(2.8, k=1, source=name) for name in ("small", "large"))
    large = dataclasses.replace(large, n_act=2e9)
    message = _refusal(lambda: observe([small, large, _row()]))
    assert "small = large" in message and "n_act" in message and "family of its own" in message


def test_a_curve_is_continued_by_the_slope_to_a_row_that_is_far_enough():
    dense = [_row(3.0, 1e19, 1), _row(2.8, 1e20, 1), _row(2.85, 1.01e20, 1)]
    (observation,) = observe([*dense, _row(2.5, 1e21)], extrapolate=True)
    slope = (2.85 - 3.0) / math.log(10.1)
    assert observation.dense_loss == pytest.approx(2.85 + slope * math.log(1e21 / 1.01e20))


@pytest.mark.parametrize("flops", [0.99e20, 1.02e20, 5e20])
def test_beyond_a_dense_curve_tokens_follow_flops(flops):
    (observation,) = observe([_row(2.9, 1e20, 1), _row(2.7, flops)], extrapolate=True)
    assert observation.dense_tokens == pytest.approx(1e10 * flops / 1e20)
    assert observation.dense_loss == 2.9


@pytest.mark.parametrize("stride", [0.0, -1.0, math.nan, math.inf, 1e90])
def test_the_stride_of_a_dense_row_means_nothing(stride):
    dense = dataclasses.replace(_row(2.9, k=1), A=stride)
    assert observe([dense, _row()])[0].dense_loss == 2.9


@pytest.mark.parametrize("loss", [0.0, -2.7])
def test_a_loss_that_is_not_positive_is_refused(loss):
    assert "bad: loss must be positive" in _refusal(lambda: observe([_row(loss, source="bad")]))


def test_rows_from_elsewhere_are_checked_as_well():
    assert "bad: loss is nan" in _refusal(lambda: observe([_row(math.nan, source="bad")]))


def test_table_does_not_depend_on_the_order_of_rows():
    observations = observe(paper_rows(noise=0.01))
    one, other = Table.of(observations), Table.of(reversed(observations))
    assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("L", "K", "delta"))
    assert len(Table.of([])) == 0
    assert set(one.flops) == {1e20}
    assert obs.FLOPS_TOLERANCE == 0.02
