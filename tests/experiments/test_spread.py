"""Means over seeds."""

import math

import pytest

from experiments.spread import Spread


def test_several_seeds_have_a_mean_a_deviation_and_a_standard_error():
    spread = Spread.of([1.0, 2.0, None, 3.0, math.nan])
    assert spread is not None and spread.values == (1.0, 2.0, 3.0)
    assert spread.mean == 2.0 and spread.deviation == pytest.approx(1.0)
    assert spread.error == pytest.approx(1 / 3**0.5)


def test_one_seed_has_no_spread_and_none_no_mean():
    single = Spread.of([1.5])
    assert single is not None and single.mean == 1.5
    assert single.deviation is None and single.error is None
    assert Spread.of([None, math.inf]) is None
