"""How long the law takes, and how much the closed form saves; `-n0 -s` prints the figures."""

import numpy as np
import pytest

from experiments.suites import law as suite

pytestmark = [pytest.mark.slow, pytest.mark.timed]


def _told(costs: dict[str, suite.Cost]) -> None:
    for name, cost in costs.items():
        print(f"\n{name}: {cost.cpu:.3f} s CPU, {cost.wall:.3f} s wall", end="")


def test_fit_with_all_group_refits_takes_seconds():
    table = suite.published_size()
    assert len(table) == suite.PUBLISHED_ROWS
    costs = suite.fitting(table)
    _told(costs)
    assert costs["fit"].result.seeds_agree
    assert sum(cost.cpu for cost in costs.values()) < 20


def test_two_hundred_draws_take_minutes_at_most():
    cost = suite.drawing(suite.published_size())
    _told({"200 draws": cost})
    assert len(cost.result.laws) == suite.DRAWS
    assert cost.cpu < 300


def test_closed_form_beats_an_iterative_solver_for_each_candidate():
    """The same candidates, and the same search, generation for generation, in one run."""
    costs = suite.objectives(suite.published_size())
    _told(costs)
    ours, theirs = costs["closed form"], costs["lsq_linear"]
    np.testing.assert_allclose(ours.result, theirs.result, rtol=1e-2)
    assert theirs.cpu > 4 * ours.cpu

    costs = suite.searches(suite.published_size())
    _told(costs)
    ours, theirs = costs["closed form"], costs["lsq_linear"]
    assert ours.result.fun == pytest.approx(theirs.result.fun, rel=1e-3)
    assert theirs.cpu > 3 * ours.cpu
