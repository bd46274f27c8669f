import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.law.grid import TABLE8, paper_rows
from xmod_jax.errors import UserError
from xmod_jax.law import stage
from xmod_jax.law.fit import Quality, fit, ranges
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import COEFFICIENTS, Exposure, Law

NOISY = Table.of(observe(paper_rows(noise=0.008, seed=1)))
QUICK = Search(starts=1)


def _where(table, **values):
    mask = np.ones(len(table), bool)
    for name, allowed in values.items():
        mask &= np.isin(getattr(table, name), allowed)
    return table.select(mask)


def _predict(law, table):
    return law.delta(table.n_act, table.n_total, table.L, table.K, table.A)


def test_noise_free_observations_return_the_published_coefficients():
    found = fit(Table.of(observe(paper_rows())))
    assert found.seeds_agree and not found.warnings
    for name in COEFFICIENTS:
        assert getattr(found.law, name) == pytest.approx(TABLE8[name], rel=1e-3)
    assert found.quality.r2_delta == pytest.approx(1)
    assert found.quality.rmse < 1e-8


def test_noisy_observations_are_explained_to_their_noise():
    found = fit(NOISY)
    assert found.seeds_agree
    assert 0.005 < found.quality.rmse < 0.0085
    error = _predict(found.law, NOISY) - _predict(Law.paper(), NOISY)
    assert np.sqrt(np.mean(error**2)) < 0.004


@settings(deadline=None, max_examples=4)
@given(st.floats(1e-10, 1e3), st.floats(1e-4, 1e3))
def test_units_of_N_and_L_change_neither_exponents_nor_predictions(unit_N, unit_L):
    scaled = dataclasses.replace(
        NOISY,
        L=NOISY.L * unit_L,
        n_act=NOISY.n_act * unit_N,
        n_total=NOISY.n_total * unit_N,
    )
    first, second = fit(NOISY, QUICK).law, fit(scaled, QUICK).law
    for name in COEFFICIENTS:
        if name not in ("u", "w"):
            assert getattr(second, name) == pytest.approx(getattr(first, name), rel=1e-5)
    np.testing.assert_allclose(_predict(second, scaled), _predict(first, NOISY), atol=1e-8)


def test_shuffled_rows_give_the_same_bits_and_another_seed_the_same_law():
    rows = paper_rows(noise=0.008, seed=1)
    random.Random(3).shuffle(rows)
    first = fit(NOISY, QUICK)
    assert fit(Table.of(observe(rows)), QUICK) == first
    other = fit(NOISY, Search(seed=5, starts=1)).law
    np.testing.assert_allclose(_predict(other, NOISY), _predict(first.law, NOISY), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"L": [32768]}, ["distinct L", "k_sweep_2k"]),
        ({"n_act": [NOISY.n_act.max()]}, ["distinct N_act", "scale_sweep_32k", "anchor_sweep_32k"]),
        ({"K": [2, 4]}, ["distinct K at A = 1", "distinct K at other A"]),
        ({"A": [1]}, ["distinct A other than 1", "anchor_sweep_32k"]),
        ({"A": [1, 3]}, ["1 distinct A other than 1, needs 2"]),
        ({"A": [0.5, 2, 3]}, ["0 observations at A = 1"]),
        ({"L": []}, ["distinct L", "distinct K", "distinct N_act", "distinct A"]),
    ],
)
def test_observations_that_do_not_determine_the_law_are_refused(values, words):
    with pytest.raises(UserError) as caught:
        fit(_where(NOISY, **values))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sizes_of_one_backbone_are_one_N_act():
    table = _where(NOISY, n_act=[NOISY.n_act.max()])
    near = dataclasses.replace(table, n_act=table.n_act * (1 + 1e-4 * np.arange(len(table))))
    with pytest.raises(UserError, match="1 distinct N_act"):
        fit(near)


def test_absent_terms_are_at_their_bound_and_say_so():
    flipped = fit(dataclasses.replace(NOISY, delta=-NOISY.delta), QUICK)
    assert flipped.law.z == 0
    assert any(text.startswith("z is at its bound 0") for text in flipped.warnings)
    assert any("at its bound of" in text for text in flipped.warnings)
    assert not any("z" in text for text in flipped.warnings if text.startswith("flat"))


def test_identical_residuals_give_a_finite_law():
    found = fit(dataclasses.replace(NOISY, delta=np.full(len(NOISY), -0.1)), QUICK)
    assert np.isfinite(dataclasses.astuple(found.law)).all()
    assert np.isfinite(dataclasses.astuple(found.quality)).all()
    assert found.law.e == pytest.approx(-0.1)


def test_noise_that_hides_the_stride_exponents_is_reported_as_a_flat_direction():
    rng = np.random.default_rng(0)
    loud = dataclasses.replace(NOISY, delta=NOISY.delta + 0.1 * rng.standard_normal(len(NOISY)))
    warnings = fit(loud, QUICK).warnings
    assert any("flat direction" in text or "at its bound" in text for text in warnings)


def test_starts_in_different_valleys_are_told(monkeypatch):
    rho = iter((0.1, 3.0, 0.1, 3.0))
    monkeypatch.setattr(
        stage, "_polish", lambda problem, _: np.full(len(problem.exponents), next(rho))
    )
    found = fit(NOISY, Search(starts=2, generations=1))
    assert not found.seeds_agree
    assert any("disagree" in text for text in found.warnings)


def test_the_fitted_range_holds_compute():
    compute = dataclasses.replace(NOISY, flops=NOISY.flops * np.linspace(1, 3, len(NOISY)))
    assert ranges(compute)["flops"] == (1e20, pytest.approx(3e20))


def test_compute_leaves_the_coefficients_as_they_are():
    other = dataclasses.replace(NOISY, flops=NOISY.flops * 7)
    assert fit(other, QUICK).law == fit(NOISY, QUICK).law


def test_quality_of_a_known_error():
    predicted = _predict(Law.paper(), NOISY)
    measured = Quality.of(predicted + 0.01, predicted)
    assert measured.rmse == pytest.approx(0.01) and measured.mae == pytest.approx(0.01)
    assert Quality.of(np.ones(3), np.zeros(3)).r2_delta == 0


def test_candidate_with_exposure_returns_its_coefficients():
    table = Table.of(observe(paper_rows()))
    exposure = Exposure(v=2.0, eta_D=0.2, rho_D=0.3)
    extra = exposure.delta(table.K, table.tokens, table.dense_tokens)
    assert extra.max() > 0.01
    both = dataclasses.replace(table, delta=table.delta + extra)
    found = fit(both, QUICK, candidate=True)
    np.testing.assert_allclose(found.predict(both), both.delta, atol=1e-4)
    assert found.exposure is not None and found.exposure.v > 0
    assert fit(table, QUICK).exposure is None


def test_candidate_needs_dense_token_counts_that_vary():
    same = dataclasses.replace(NOISY, dense_tokens=np.full(len(NOISY), 1e10))
    fit(same, QUICK)
    with pytest.raises(UserError, match="1 distinct dense token counts"):
        fit(same, QUICK, candidate=True)
