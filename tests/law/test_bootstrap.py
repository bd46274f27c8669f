import dataclasses
import json
import random

import numpy as np
import pytest

from tests.law.grid import paper_rows
from xmod_jax.errors import UserError
from xmod_jax.law import bootstrap, fit
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import COEFFICIENTS, Draws, Law, LawFile

NOISE = 0.008
QUICK = Search(starts=1)
TABLE = Table.of(observe(paper_rows(noise=NOISE, seed=1)))
FITTED = fit.fit(TABLE, QUICK)
DRAWS = bootstrap.draw(TABLE, FITTED, 10)


def _columns(table):
    return table.n_act, table.n_total, table.L, table.K, table.A


def _values(draws):
    return np.array([dataclasses.astuple(law) for law in draws.laws])


def _shifted(table, size, seed=0):
    """The table with an error common to each sweep."""
    sweep_n = bootstrap.sweeps(table)
    shift_G = size * np.random.default_rng(seed).standard_normal(sweep_n.max() + 1)
    return dataclasses.replace(table, delta=table.delta + shift_G[sweep_n])


def test_a_sweep_is_the_rows_of_one_size_context_and_stride():
    sweep_n = bootstrap.sweeps(TABLE)
    assert len(set(sweep_n)) == 13
    for sweep in set(sweep_n):
        rows = TABLE.select(sweep_n == sweep)
        assert len(set(zip(rows.n_act, rows.L, rows.A, strict=True))) == 1
    near = dataclasses.replace(TABLE, n_act=TABLE.n_act * (1 + 1e-4 * np.arange(len(TABLE)) / 100))
    assert np.array_equal(bootstrap.sweeps(near), sweep_n)


def test_draws_depend_on_the_seed_alone():
    rows = paper_rows(noise=NOISE, seed=1)
    random.Random(3).shuffle(rows)
    shuffled = Table.of(observe(rows))
    again = bootstrap.draw(shuffled, fit.fit(shuffled, QUICK), 5)
    assert again.laws == DRAWS.laws[:5]
    other = bootstrap.draw(TABLE, FITTED, 5, seed=1)
    assert other.laws != again.laws


def test_a_refit_from_nearby_finds_the_optimum_of_a_full_search():
    residuals = bootstrap.Residuals.of(TABLE, FITTED.law)
    for number in range(4):
        moved = residuals.resample(np.random.default_rng([0, number]))
        resampled = dataclasses.replace(TABLE, delta=FITTED.predict(TABLE) + moved)
        full = fit.fit(resampled, QUICK)
        drawn = DRAWS.laws[number].delta(*_columns(TABLE))
        np.testing.assert_allclose(drawn, full.predict(TABLE), atol=1e-6)


def test_without_noise_every_draw_is_the_law():
    table = Table.of(observe(paper_rows()))
    draws = bootstrap.draw(table, fit.fit(table, QUICK), 4)
    assert draws.noise < 1e-8
    np.testing.assert_allclose(_values(draws), [dataclasses.astuple(Law.paper())] * 4, rtol=1e-3)


def test_noise_of_single_trainings_is_found_whole():
    """The fit takes up a part of it; the mean over tables must not be short of that part."""
    sizes = []
    for seed in range(8):
        table = Table.of(observe(paper_rows(noise=NOISE, seed=seed)))
        sizes.append(bootstrap.Residuals.of(table, fit.fit(table, QUICK).law).noise)
    assert np.sqrt(np.mean(np.square(sizes))) == pytest.approx(NOISE, rel=0.1)


def test_errors_common_to_a_sweep_widen_the_intervals():
    shifted = _shifted(TABLE, 2 * NOISE)
    wide = bootstrap.draw(shifted, fit.fit(shifted, QUICK), 10)
    widths = [
        np.mean(np.diff(draws.interval(draws.delta(*_columns(TABLE))), axis=0))
        for draws in (DRAWS, wide)
    ]
    assert widths[1] > 1.5 * widths[0]
    assert wide.noise > 1.5 * DRAWS.noise


def test_terms_that_the_data_do_not_show_stay_finite():
    flipped = dataclasses.replace(TABLE, delta=-TABLE.delta)
    found = fit.fit(flipped, QUICK)
    assert found.law.z == 0
    draws = bootstrap.draw(flipped, found, 3)
    assert np.isfinite(_values(draws)).all() and np.isfinite(draws.noise)


def test_sweeps_of_a_single_row_are_allowed():
    sweep_n = bootstrap.sweeps(TABLE)
    alone = np.flatnonzero(sweep_n == sweep_n[-1])[1:]
    table = TABLE.select(np.setdiff1d(np.arange(len(TABLE)), alone))
    draws = bootstrap.draw(table, fit.fit(table, QUICK), 3)
    assert np.isfinite(_values(draws)).all() and draws.clusters == 13


def test_progress_sees_every_draw():
    seen = []

    def progress(numbers):
        for number in numbers:
            seen.append(number)
            yield number

    bootstrap.draw(TABLE, FITTED, 3, progress=progress)
    assert seen == [0, 1, 2]


def test_no_draws_and_a_law_with_exposure_are_refused():
    with pytest.raises(ValueError, match="needs draws"):
        bootstrap.draw(TABLE, FITTED, 0)
    with pytest.raises(ValueError, match="level"):
        bootstrap.draw(TABLE, FITTED, 1, level=1.0)
    with pytest.raises(ValueError, match="without P_D"):
        bootstrap.draw(TABLE, fit.fit(TABLE, QUICK, candidate=True), 1)


def test_intervals_hold_their_level_between_equal_tails():
    draws = dataclasses.replace(DRAWS, level=0.8)
    np.testing.assert_allclose(draws.interval(np.arange(101.0)), [10, 90])
    quiet = dataclasses.replace(draws, noise=0.0)
    np.testing.assert_allclose(quiet.run_interval(np.arange(101.0)), [10, 90], atol=1)
    loud = dataclasses.replace(draws, noise=2.0).run_interval(np.zeros(5))
    np.testing.assert_allclose(loud, [-2 * 1.2816, 2 * 1.2816], rtol=0.01)


def test_law_file_keeps_the_draws(tmp_path):
    path = tmp_path / "law.json"
    file = dataclasses.replace(LawFile.paper(), bootstrap=DRAWS)
    file.save(path)
    assert LawFile.load(path).bootstrap == DRAWS
    record = json.loads(path.read_text())
    assert set(record["bootstrap"]["intervals"]) == set(COEFFICIENTS)
    assert Draws.from_record(record["bootstrap"]) == DRAWS
    del record["bootstrap"]["draws"]["rho_A"]
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="rho_A"):
        LawFile.load(path)


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize("common", [0.0, NOISE], ids=["independent", "common_to_sweeps"])
def test_intervals_cover_the_truth_as_often_as_they_say(common):
    """20 noisy tables, 200 draws each: 90% intervals of coefficients and of predictions."""
    truth, coefficients, predictions = np.array(dataclasses.astuple(Law.paper())), [], []
    for seed in range(20):
        table = _shifted(Table.of(observe(paper_rows(noise=NOISE, seed=seed))), common, seed)
        draws = bootstrap.draw(table, fit.fit(table, QUICK), 200, seed)
        low, high = draws.interval(_values(draws))
        coefficients.append((low <= truth) & (truth <= high))
        expected = Law.paper().delta(*_columns(table))
        low, high = draws.interval(draws.delta(*_columns(table)))
        predictions.append(np.mean((low <= expected) & (expected <= high)))
    each = dict(zip(COEFFICIENTS, np.mean(coefficients, axis=0).tolist(), strict=True))
    print(f"\ncoverage: coefficients {np.mean(coefficients):.3f} {each}")
    print(f"coverage: predictions {np.mean(predictions):.3f}")
    assert 0.80 <= np.mean(coefficients) <= 0.98
    assert 0.80 <= np.mean(predictions) <= 0.98
