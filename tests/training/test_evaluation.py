"""Means over the batches of an evaluation."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from tests.test_model import make, tokens
from xmod_jax.training.evaluation import _weighted, make_evaluator


def test_means_weigh_batches_by_rows_and_a_statistic_where_it_is_defined():
    values: list[Any] = [
        {"loss": np.float32(1.0), "jaccard": np.float32(math.nan), "coverage": np.float32(0.5)},
        {"loss": np.float32(2.0), "jaccard": np.float32(0.25), "coverage": np.float32(1.0)},
        {"loss": np.float32(4.0), "jaccard": np.float32(0.75), "coverage": np.float32(1.0)},
    ]
    means = _weighted(values, [2, 2, 1])
    assert means == pytest.approx({"loss": 2.0, "jaccard": (2 * 0.25 + 0.75) / 3, "coverage": 0.8})


def test_a_loss_that_is_lost_in_one_batch_is_lost_and_a_statistic_nowhere_defined_stays_so():
    values: list[Any] = [
        {"loss": math.nan, "jaccard": math.nan},
        {"loss": 2.0, "jaccard": math.nan},
    ]
    means = _weighted(values, [1, 1])
    assert math.isnan(means["loss"]) and math.isnan(means["jaccard"])


def test_an_overlap_that_is_undefined_is_no_nan_that_jax_would_stop_at():
    model = make("mod")  # of one sparse layer an interval, so that none has an overlap
    batch_BL1 = np.asarray(tokens(2, 9))
    with jax.debug_nans(True):
        record = make_evaluator()(model, model.thresholds(), [batch_BL1, batch_BL1])
    assert record["jaccard"] is None and record["jaccard_threshold"] is None
    assert record["coverage"] is not None and 0 <= record["coverage"] <= 1
    assert record["loss_calibrated"] == pytest.approx(record["loss_threshold"])
