"""Fits the scaling law to observations in two stages (SPEC section 8).

Stage 1 takes the A = 1 rows and finds e, u, w and their exponents; stage 2 takes what is left of
the other rows and finds z, rho_K, rho_A. In each stage the exponents are searched by differential
evolution; the linear coefficients of all candidates of a generation are solved at once, exactly.

N, L and D are divided by their geometric means inside, and the coefficients converted back: the
search sees the same numbers whatever the units, so exponents and predictions do not depend on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from xmod_jax.law import identifiability
from xmod_jax.law.observations import Table
from xmod_jax.law.stage import Search, Stage, StageFit, first_stage, fit_stage, second_stage
from xmod_jax.law.terms import COEFFICIENTS, Exposure, Law

Array = NDArray[np.float64]
DEFAULT_SEARCH = Search()


@dataclasses.dataclass(frozen=True)
class Quality:
    """How well Delta is predicted.

    Attributes:
      r2_delta: share of Delta's variance explained.
      rmse: root mean square error in nats, of Delta and of the raw loss alike: the dense part is
        common to observation and prediction.
      mae: mean absolute error in nats, likewise.
    """

    r2_delta: float
    rmse: float
    mae: float

    @classmethod
    def of(cls, observed: Array, predicted: Array) -> Quality:
        """Quality of predictions [n], n >= 1; R2 is 0 where the observations do not vary."""
        residual = observed - predicted
        spread = float(np.sum((observed - observed.mean()) ** 2))
        explained = 1 - float(np.sum(residual**2)) / spread if spread > 0 else 0.0
        rmse = float(np.sqrt(np.mean(residual**2)))
        return cls(explained, rmse, float(np.mean(np.abs(residual))))


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted law.

    Attributes:
      law: its ten coefficients.
      exposure: the term with P_D, of the candidate law only.
      quality: on the fitted observations.
      seeds_agree: whether independent starts of the search reached the same predictions.
      warnings: what the data leave undetermined, a sentence each.
    """

    law: Law
    exposure: Exposure | None
    quality: Quality
    seeds_agree: bool
    warnings: tuple[str, ...]

    def predict(self, table: Table) -> Array:
        """Predicted Delta [n] in nats."""
        return _predict(self.law, self.exposure, table)


def fit(table: Table, search: Search = DEFAULT_SEARCH, candidate: bool = False) -> Fit:
    """Fits the law.

    Args:
      table: observations; A = 1 rows varying in K, L and N_act, and rows at other A.
      search: effort and seed. The result depends on nothing else, not even the rows' order.
      candidate: fit the law with the exposure term P_D.

    Raises:
      UserError: the observations do not determine the law; says what to run.
    """
    return fit_by(table, lambda stage: _searched(stage, search), candidate)


@dataclasses.dataclass(frozen=True)
class Solved:
    """A stage's coefficients by name, whether starts agree, warnings."""

    values: dict[str, float]
    agree: bool = True
    warnings: tuple[str, ...] = ()


def fit_by(table: Table, solve: Callable[[Stage], Solved], candidate: bool = False) -> Fit:
    """`fit` with the stages solved by `solve`, which sees units of geometric means.

    Raises:
      UserError: the observations do not determine the law.
    """
    identifiability.require_determined(table, candidate)
    units = Units.of(table)
    scaled = units.scale(table)
    reference = identifiability.is_reference_stride(scaled)
    first = solve(first_stage(scaled.select(reference), candidate))
    base = _assemble(first.values | {"z": 0.0, "rho_K": 1.0, "rho_A": 1.0})
    rest = scaled.select(~reference)
    second = solve(second_stage(rest, rest.delta - _predict(*base, rest)))
    law, exposure = _assemble(units.restore(first.values | second.values))
    return Fit(
        law,
        exposure,
        Quality.of(table.delta, _predict(law, exposure, table)),
        first.agree and second.agree,
        first.warnings + second.warnings,
    )


@dataclasses.dataclass(frozen=True)
class Units:
    """Units in which the fit counts context lengths, parameters and tokens."""

    L: float
    N: float
    D: float

    @classmethod
    def of(cls, table: Table) -> Units:
        """Geometric means of the table's columns."""
        columns = table.L, table.n_act, table.dense_tokens
        return cls(*(float(np.exp(np.mean(np.log(column)))) for column in columns))

    def scale(self, table: Table) -> Table:
        """The table in these units."""
        return dataclasses.replace(
            table,
            L=table.L / self.L,
            n_act=table.n_act / self.N,
            n_total=table.n_total / self.N,
            tokens=table.tokens / self.D,
            dense_tokens=table.dense_tokens / self.D,
        )

    def restore(self, values: Mapping[str, float]) -> dict[str, float]:
        """Coefficients fitted in these units, as they are in the table's."""
        restored = dict(values)
        scales = (("u", self.N, "eta_N"), ("w", self.L, "eta_L"), ("v", self.D, "eta_D"))
        for linear, unit, eta in scales:
            if linear in restored:
                restored[linear] *= unit ** restored[eta]
        return restored


def ranges(table: Table) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of what law.json names: where the law was fitted."""
    columns = {"L": table.L, "n_act": table.n_act, "K": table.K, "A": table.A}
    columns["n_total/n_act"] = table.n_total / table.n_act
    columns |= {"dense_tokens": table.dense_tokens, "flops": table.flops}
    columns["K_strided"] = table.K[~identifiability.is_reference_stride(table)]
    return {name: (float(x.min()), float(x.max())) for name, x in columns.items()}


def _searched(stage: Stage, search: Search) -> Solved:
    found: StageFit = fit_stage(stage, search)
    warnings = [] if found.agree else [found.disagreement]
    warnings += identifiability.warnings(stage, found.values)
    return Solved(found.values, found.agree, tuple(warnings))


def _assemble(values: Mapping[str, float]) -> tuple[Law, Exposure | None]:
    law = Law(**{name: values[name] for name in COEFFICIENTS})
    if "v" not in values:
        return law, None
    return law, Exposure(values["v"], values["eta_D"], values["rho_D"])


def _predict(law: Law, exposure: Exposure | None, table: Table) -> Array:
    delta = law.delta(table.n_act, table.n_total, table.L, table.K, table.A)
    if exposure is not None:
        delta = delta + exposure.delta(table.K, table.tokens, table.dense_tokens)
    return delta
