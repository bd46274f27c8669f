import dataclasses

import numpy as np
import pytest

from tests.law.grid import paper_rows
from xmod_jax.law import bootstrap, outliers
from xmod_jax.law.fit import fit
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import Search

QUICK = Search(starts=1)
ROWS = paper_rows(noise=0.008, seed=1)


def _found(rows):
    observations = observe(rows)
    fitted = fit(Table.of(observations), QUICK)
    return outliers.find(observations, fitted, QUICK), fitted


def _wrong(changes):
    """The paper's sweeps with some losses changed by so many nats."""
    return [
        dataclasses.replace(row, loss=row.loss + changes[i], source=f"line {i}")
        if i in changes
        else row
        for i, row in enumerate(ROWS)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.008, 0.04])
def test_noise_does_not_stand_out(noise):
    assert _found(paper_rows(noise=noise, seed=2))[0] is None


@pytest.mark.parametrize(
    "changes", [{30: 6.5}, {3: 0.2}, {95: -0.5}, {5: 7.0, 40: -1.0, 60: 0.3, 97: 2.0}]
)
def test_wrong_losses_are_named_and_the_law_without_them_is_that_of_the_others(changes):
    found, fitted = _found(_wrong(changes))
    assert found is not None and found.without is not None
    assert {o.row.source for o, _ in found.rows} == {f"line {i}" for i in changes}
    for observation, residual in found.rows:
        change = changes[int(observation.row.source.split()[1])]
        assert residual == pytest.approx(change, abs=0.04)
    others = [row for i, row in enumerate(ROWS) if i not in changes]
    assert found.without == fit(Table.of(observe(others)), QUICK)
    told = " ".join(outliers.sentences(found, fitted))
    assert f"without them R2 {found.without.quality.r2_delta:.4f}" in told
    assert f"with them {fitted.quality.r2_delta:.4f}" in told
    assert found.without.quality.r2_delta > 0.98 > fitted.quality.r2_delta
    assert found.scatter == pytest.approx(0.008, rel=0.4)


def test_a_wrong_dense_loss_is_told_by_what_shares_it():
    wrong = [
        dataclasses.replace(row, loss=row.loss + 0.5) if row.dense and row.L == 8192 else row
        for row in ROWS
    ]
    found, fitted = _found(wrong)
    assert found is not None and found.shared == ("556M", 8192) and len(found.rows) == 10
    (told,) = outliers.sentences(found, fitted)
    assert "dense reference of 556M, L = 8192: look at its loss" in told and "and 2 more" in told


def test_rows_without_which_nothing_is_determined_are_told_beside_dense():
    wrong = [
        dataclasses.replace(row, loss=9.5) if row.dense and row.family == "165M" else row
        for row in ROWS
    ]
    found, fitted = _found(wrong)
    assert found is not None and found.without is None and found.shared == ("165M", 32768)
    (told,) = outliers.sentences(found, fitted)
    assert "stand out from the dense loss" in told and "do not determine the law" in told


def test_nothing_is_told_where_most_rows_are_far_from_dense():
    apart = [dataclasses.replace(r, loss=r.loss + 2) if not r.dense else r for r in ROWS]
    assert _found(apart)[0] is None


def test_nothing_is_told_where_the_law_describes_no_large_part_of_the_rows():
    """Then they are no outliers: what is left after them is not the rule."""
    rng = np.random.default_rng(0)
    wild = [
        dataclasses.replace(row, loss=row.loss + 0.9 * rng.choice([-1, 1]) * (i % 2))
        if not row.dense
        else row
        for i, row in enumerate(ROWS)
    ]
    assert _found(wild)[0] is None


def test_leverage_is_what_a_row_moves_its_own_prediction_by():
    table = Table.of(observe(ROWS))
    law = fit(table, QUICK).law
    own = bootstrap.leverage(table, law)
    assert np.all((own > 0) & (own <= 1)) and own.sum() == pytest.approx(10, abs=0.5)
    whole = np.diag(bootstrap._hat(table, law))
    np.testing.assert_allclose(own, whole, atol=1e-12)
