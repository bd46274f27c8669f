"""How long the law takes, and how much the closed form saves; `-n0 -s` prints the figures."""

import dataclasses
import time

import numpy as np
import pytest
from scipy import optimize

from tests.law.grid import paper_rows
from xmod_jax.law import bootstrap, validate
from xmod_jax.law.fit import Units, fit
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import first_stage

pytestmark = [pytest.mark.slow, pytest.mark.timed]
TABLE = Table.of(observe(paper_rows(noise=0.008, seed=1)))


def _published_size() -> Table:
    """109 rows: the grid's distinct ones and eight of them measured again."""
    again = np.random.default_rng(0).choice(len(TABLE), 109 - len(TABLE), replace=False)
    more = TABLE.select(again)
    more = dataclasses.replace(more, delta=more.delta + 0.008)
    both = [
        np.concatenate([getattr(part, field.name) for part in (TABLE, more)])
        for field in dataclasses.fields(Table)
    ]
    return Table(*both)


def _timed(action):
    """What `action` returns, and the seconds of this process's time and of the clock it took."""
    before = time.process_time(), time.perf_counter()
    result = action()
    return result, time.process_time() - before[0], time.perf_counter() - before[1]


def test_fit_with_all_group_refits_takes_seconds():
    table = _published_size()
    assert len(table) == 109
    found, fit_cpu, fit_wall = _timed(lambda: fit(table))
    groups, cpu, wall = _timed(lambda: validate.withhold(table))
    print(f"\nfit: {fit_cpu:.2f} s CPU, {fit_wall:.2f} s wall")
    print(f"{len(groups)} group refits: {cpu:.2f} s CPU, {wall:.2f} s wall")
    assert found.seeds_agree
    assert fit_cpu + cpu < 20


def test_two_hundred_draws_take_minutes_at_most():
    table = _published_size()
    found = fit(table)
    draws, cpu, wall = _timed(lambda: bootstrap.draw(table, found, 200))
    print(f"\n200 draws: {cpu:.1f} s CPU, {wall:.1f} s wall")
    assert len(draws.laws) == 200
    assert cpu < 300


def _lsq_linear(stage):
    """Stage 1's objective the plain way: one iterative solve for each candidate."""
    bounds = [-np.inf, 0, 0], [np.inf, np.inf, np.inf]
    intercept = np.ones((len(stage.target), 1))

    def objective(exponents_k):
        design = np.concatenate([intercept, stage.features(exponents_k[None])[0]], axis=1)
        return 2 * optimize.lsq_linear(design, stage.target, bounds).cost

    return objective


def _search(objective, stage, seed, vectorized):
    return optimize.differential_evolution(
        objective,
        stage.bounds,
        vectorized=vectorized,
        updating="deferred",
        polish=False,
        popsize=12,
        maxiter=40,
        tol=0,
        rng=np.random.default_rng(seed),
    )


def test_closed_form_beats_an_iterative_solver_for_each_candidate():
    """The same search, generation for generation, and the same candidates, in one run."""
    stage = first_stage(Units.of(TABLE).scale(TABLE.select(TABLE.A == 1)))
    closed, plain = lambda exponents_kP: stage.solve(exponents_kP.T).rss_P, _lsq_linear(stage)
    lower, upper = np.array(stage.bounds).T
    candidates_GPk = np.random.default_rng(0).uniform(lower, upper, (40, 48, 4))
    ours, cpu, _ = _timed(lambda: [closed(generation.T) for generation in candidates_GPk])
    theirs, plain_cpu, _ = _timed(lambda: [[*map(plain, gen)] for gen in candidates_GPk])
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
    print(f"\nobjective of 1920 candidates: closed form {cpu:.3f} s, lsq_linear {plain_cpu:.3f} s")
    print(f"speed-up {plain_cpu / cpu:.1f} (CPU)")
    assert plain_cpu > 4 * cpu

    ours, cpu, wall = _timed(lambda: _search(closed, stage, 0, vectorized=True))
    theirs, plain_cpu, plain_wall = _timed(lambda: _search(plain, stage, 0, vectorized=False))
    print(f"search of {ours.nit} generations, sum of squares {ours.fun:.6g} and {theirs.fun:.6g}:")
    print(f"closed form {cpu:.3f} s CPU, {wall:.3f} s wall")
    print(f"lsq_linear  {plain_cpu:.3f} s CPU, {plain_wall:.3f} s wall")
    print(f"speed-up {plain_cpu / cpu:.1f} (CPU), the search's own work included")
    assert ours.fun == pytest.approx(theirs.fun, rel=1e-3)
    assert plain_cpu > 3 * cpu
