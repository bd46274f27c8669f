"""Fits the scaling law to observations in two stages (SPEC section 8).

Stage 1 takes the A = 1 rows and finds e, u, w and their exponents; stage 2 takes what is left of
the other rows and finds z, rho_K, rho_A. In each stage the exponents are searched by differential
evolution; the linear coefficients of all candidates of a generation are solved at once, exactly.

N and L are divided by their geometric means inside, and the coefficients converted back: the
search sees the same numbers whatever the units, so exponents and predictions do not depend on them.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from xmod_jax.law import identifiability
from xmod_jax.law.observations import Table
from xmod_jax.law.stage import Search, Stage, StageFit, first_stage, fit_stage, second_stage
from xmod_jax.law.terms import Law

Array = NDArray[np.float64]
DEFAULT_SEARCH = Search()


@dataclasses.dataclass(frozen=True)
class Quality:
    """R2 on Delta, and RMSE and MAE of the raw loss in nats (those of Delta: the dense part is
    common to both)."""

    r2_delta: float
    rmse: float
    mae: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted law, whether independent starts agreed on it, and what the data leave open."""

    law: Law
    quality: Quality
    seeds_agree: bool
    warnings: tuple[str, ...]


def fit(table: Table, search: Search = DEFAULT_SEARCH) -> Fit:
    """Fits the law.

    Args:
      table: observations; A = 1 rows varying in K, L and N_act, and rows at other A.
      search: effort and seed. The result depends on nothing else, not even the rows' order.

    Raises:
      UserError: the observations do not determine the law; says what to run.
    """
    identifiability.require_determined(table)
    unit_L, unit_N = _geometric_mean(table.L), _geometric_mean(table.n_act)
    scaled = dataclasses.replace(
        table, L=table.L / unit_L, n_act=table.n_act / unit_N, n_total=table.n_total / unit_N
    )
    reference = identifiability.is_reference_stride(scaled)
    first, agree, warnings = _fitted(first_stage(scaled.select(reference)), search)
    base = Law(**first, z=0.0, rho_K=1.0, rho_A=1.0)
    rest = scaled.select(~reference)
    second, agree_too, more = _fitted(second_stage(rest, rest.delta - _predict(base, rest)), search)
    values = first | second
    values["u"] *= unit_N ** values["eta_N"]
    values["w"] *= unit_L ** values["eta_L"]
    law = Law(**values)
    return Fit(law, quality(law, table), agree and agree_too, warnings + more)


def _fitted(stage: Stage, search: Search) -> tuple[dict[str, float], bool, tuple[str, ...]]:
    """Values of one stage, whether its starts agree, its warnings."""
    found: StageFit = fit_stage(stage, search)
    warnings = [] if found.agree else [found.disagreement]
    warnings += identifiability.warnings(stage, found.values)
    return found.values, found.agree, tuple(warnings)


def quality(law: Law, table: Table) -> Quality:
    """How well `law` predicts `table`."""
    residual = table.delta - _predict(law, table)
    spread = float(np.sum((table.delta - table.delta.mean()) ** 2))
    explained = 1 - float(np.sum(residual**2)) / spread if spread > 0 else 0.0
    rmse = float(np.sqrt(np.mean(residual**2)))
    return Quality(explained, rmse, float(np.mean(np.abs(residual))))


def ranges(table: Table) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of L, n_act, K, A and N/N_act: where the law was fitted."""
    columns = {"L": table.L, "n_act": table.n_act, "K": table.K, "A": table.A}
    columns["n_total/n_act"] = table.n_total / table.n_act
    return {name: (float(x.min()), float(x.max())) for name, x in columns.items()}


def _predict(law: Law, table: Table) -> Array:
    return law.delta(table.n_act, table.n_total, table.L, table.K, table.A)


def _geometric_mean(values: Array) -> float:
    return float(np.exp(np.mean(np.log(values))))
