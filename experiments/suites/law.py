"""How long the law takes: the fit, its group refits, bootstrap draws; what the closed form saves.

The observations are the paper's sweeps (109 rows) made from its law with noise of 0.008 nats.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize

from experiments.suites import timing
from experiments.suites.models import Setting
from experiments.suites.timing import Row
from xmod_jax import accounting
from xmod_jax.config import BACKBONES, ModelConfig
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.law import bootstrap, validate
from xmod_jax.law.fit import Units, fit
from xmod_jax.law.observations import Row as Observed
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import first_stage
from xmod_jax.law.terms import Law

PUBLISHED_ROWS = 109  # observations of the paper
NOISE = 0.008  # nats
DRAWS = 200
_COMPUTE = 1e20  # paper FLOPs of every row
K_GRID = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
CONTEXTS = (2048, 4096, 8192, 16384, 32768)


def grid() -> list[tuple[str, int, float, int]]:
    """(family, L, A, K) of the K-L, scale and anchor sweeps (SPEC 7): 101 distinct points."""
    points = [("556M", length, 1.0, k) for length in CONTEXTS for k in K_GRID]
    points.append(("556M", 2048, 1.0, 3))
    points += [(family, 32768, 1.0, k) for family in ("165M", "298M", "936M") for k in K_GRID]
    strides = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)
    anchor = [("165M", 32768, a, k) for a in strides for k in (4, 8, 12, 16)]
    return points + [point for point in anchor if point not in points]


def dense_loss(family: str, length: float, flops: float) -> float:
    """An arbitrary dense curve, linear in log FLOPs, so that interpolation is exact."""
    return 2.6 + 0.1 * len(family) + 0.01 * np.log(length) - 0.12 * np.log(flops / _COMPUTE)


def simulated_rows(law: Law | None = None, noise: float = 0.0, seed: int = 0) -> list[Observed]:
    """Sparse rows of the grid at 1e20 FLOPs and two dense rows per family and L around them."""
    law = law or Law.paper()
    rng = np.random.default_rng(seed)

    def model(family: str, name: str) -> ModelConfig:
        return ModelConfig(BACKBONES[family], Hierarchy.from_name(name))

    def observed(family, length, name, k, a, flops, loss):
        config = model(family, name)
        sizes = accounting.n_act(model(family, "dense")), accounting.total_parameters(config)
        tokens = accounting.tokens_for_flops(config, int(length), flops)
        source = f"{family} L={length:g} {name} {flops:g}"
        return Observed(family, length, *sizes, k, a, flops, tokens, loss, source)

    rows = []
    for family, length, a, k in grid():
        name = f"A{a:g}K{k}"
        n_act = accounting.n_act(model(family, "dense"))
        n_total = accounting.total_parameters(model(family, name))
        delta = float(law.delta(n_act, n_total, length, k, a)) + noise * rng.standard_normal()
        loss = dense_loss(family, length, _COMPUTE) + delta
        rows.append(observed(family, length, name, k, a, _COMPUTE, loss))
    for family, context in sorted({(row.family, row.L) for row in rows}):
        for flops in (0.5 * _COMPUTE, 1.5 * _COMPUTE):
            loss = dense_loss(family, context, flops)
            rows.append(observed(family, context, "dense", 1, 1, flops, loss))
    return rows


def published_size() -> Table:
    """109 rows: the grid's distinct ones and eight of them measured again."""
    table = Table.of(observe(simulated_rows(noise=NOISE, seed=1)))
    again = np.random.default_rng(0).choice(len(table), PUBLISHED_ROWS - len(table), replace=False)
    more = table.select(again)
    more = dataclasses.replace(more, delta=more.delta + NOISE)
    both = [
        np.concatenate([getattr(part, field.name) for part in (table, more)])
        for field in dataclasses.fields(Table)
    ]
    return Table(*both)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an action returned, and the seconds it took of the clock and of this process's time."""

    result: Any
    wall: float
    cpu: float


def timed(action: Callable[[], Any]) -> Cost:
    """Runs an action once."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = action()
    return Cost(result, time.perf_counter() - wall, time.process_time() - cpu)


def fitting(table: Table) -> dict[str, Cost]:
    """The fit, and a refit without each of its groups."""
    return {
        "fit": timed(lambda: fit(table)),
        "group refits": timed(lambda: validate.withhold(table)),
    }


def drawing(table: Table, draws: int = DRAWS) -> Cost:
    """Bootstrap draws of a fitted law."""
    found = fit(table)
    return timed(lambda: bootstrap.draw(table, found, draws))


def objectives(table: Table) -> dict[str, Cost]:
    """Sums of squares of 1920 candidates: by the closed form, and by a solver for each."""
    stage, closed, plain = _objectives(table)
    lower, upper = np.array(stage.bounds).T
    candidates_GPk = np.random.default_rng(0).uniform(lower, upper, (40, 48, 4))
    solve = lambda: [[plain(each) for each in generation] for generation in candidates_GPk]
    return {
        "closed form": timed(lambda: [closed(generation.T) for generation in candidates_GPk]),
        "lsq_linear": timed(solve),
    }


def searches(table: Table) -> dict[str, Cost]:
    """The same search, generation for generation, with either objective."""
    stage, closed, plain = _objectives(table)
    return {
        "closed form": timed(lambda: _search(closed, stage.bounds, vectorized=True)),
        "lsq_linear": timed(lambda: _search(plain, stage.bounds, vectorized=False)),
    }


def _objectives(table: Table):
    """Stage 1 on the A = 1 rows, with its own objective and the plain one."""
    stage = first_stage(Units.of(table).scale(table.select(table.A == 1)))
    bounds = [-np.inf, 0, 0], [np.inf, np.inf, np.inf]
    intercept = np.ones((len(stage.target), 1))

    def plain(exponents_k):
        design = np.concatenate([intercept, stage.features(exponents_k[None])[0]], axis=1)
        return 2 * optimize.lsq_linear(design, stage.target, bounds).cost

    return stage, lambda exponents_kP: stage.solve(exponents_kP.T).rss_P, plain


def _search(objective, bounds, vectorized):
    return optimize.differential_evolution(
        objective,
        bounds,
        vectorized=vectorized,
        updating="deferred",
        polish=False,
        popsize=12,
        maxiter=40,
        tol=0,
        rng=np.random.default_rng(0),
    )


def law(setting: Setting) -> list[Row]:
    """Fit, refits and draws once; both objectives and both searches beside each other."""
    del setting  # one measurement of each, of fixed size
    table = published_size()
    timing.say(f"fitting {len(table)} observations; the suite takes about a minute")
    costs = fitting(table)
    timing.say(f"{DRAWS} bootstrap draws")
    costs[f"{DRAWS} bootstrap draws"] = drawing(table)
    rows = [_row(name, cost) for name, cost in costs.items()]
    for label, pair in (("objective, ", objectives(table)), ("search, ", searches(table))):
        timing.say(f"{label}closed form against lsq_linear")
        for name, cost in pair.items():
            saved = pair["lsq_linear"].cpu / cost.cpu
            rows.append(_row(label + name, cost) | {"speed_of_lsq_linear": saved})
    return rows


def _row(name: str, cost: Cost) -> Row:
    return {
        "model": name,
        "seconds": cost.wall,
        "cpu_seconds": cost.cpu,
        "speed_of_lsq_linear": None,
    }
