"""Cluster bootstrap of the fitted law: intervals for coefficients, predictions and choices.

A sweep, all K of one N_act, L and A, is a cluster: its trainings share a dense reference, and what
the law misses there it misses together. The grid of the sweeps was chosen, not drawn, and has few
values of each variable: resampling its rows would leave out whole context lengths or sizes, and
many draws would not determine the law. So the grid stays and residuals are resampled in two levels
(Davison & Hinkley 1997, section 3.8): each sweep gets the residuals of a sweep drawn with
replacement, its common shift and, drawn with replacement again, its single rows.

The fit hides a part of the noise, most of it in the shifts of sweeps, since ten coefficients meet a
dozen sweeps. The residuals of each sweep are therefore first multiplied by the matrix that makes
their covariance that of independent noise (CR2: Bell & McCaffrey 2002), and the shifts shrunk to
the variance that single rows do not explain. Every draw is fitted anew, whole.

Legend: n observations, G sweeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from xmod_jax.law import identifiability
from xmod_jax.law.fit import Fit, Solved, fit_by
from xmod_jax.law.observations import Table
from xmod_jax.law.stage import Stage, refit_stage
from xmod_jax.law.terms import COEFFICIENTS, LEVEL, Draws, Law

Array = NDArray[np.float64]

# A direction in which the fit leaves less of a sweep's variance than this is not blown up further.
_LEAST_LEFT = 0.1
# Relative step of numerical derivatives, and the share below which a direction counts as lost.
_STEP, _LOST = 1e-5, 1e-8


def draw(
    table: Table,
    fitted: Fit,
    count: int = 200,
    seed: int = 0,
    level: float = LEVEL,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Draws:
    """Refits the law to `count` resampled tables.

    Args:
      table: the observations that `fitted` was fitted to.
      fitted: the reduced law (without P_D) and nothing else.
      count: number of draws.
      seed: of the draws; the result depends on nothing else.
      level: coverage of the intervals, in (0, 1).
      progress: wraps the numbers of the draws, for a progress bar.

    Raises:
      ValueError: no draws, a level outside (0, 1), or a fit with P_D.
    """
    if fitted.exposure is not None:
        raise ValueError("intervals are those of the reduced law, without P_D")
    residuals = Residuals.of(table, fitted.law)
    predicted = fitted.predict(table)
    near = dataclasses.asdict(fitted.law)

    def solve(stage: Stage) -> Solved:
        return Solved(refit_stage(stage, near))

    laws = []
    for number in progress(range(count)):
        rng = np.random.default_rng([seed, number])
        resampled = dataclasses.replace(table, delta=predicted + residuals.resample(rng))
        laws.append(fit_by(resampled, solve).law)
    return Draws(tuple(laws), seed, level, residuals.noise, len(residuals.shift_G))


def sweeps(table: Table) -> NDArray[np.intp]:
    """The sweep of every row [n]: rows of one N_act, L and A, numbered from 0."""
    columns = identifiability.one_size(table.n_act), table.L, table.A
    _, sweep_n = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return sweep_n.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Residuals:
    """Residuals in two levels, freed of what the fit did to them.

    Attributes:
      sweep_n: the sweep of every row.
      shift_G: common shift of each sweep, in nats; zero where single rows explain all of it.
      single_n: what is left of each row, scaled for the mean taken out.
    """

    sweep_n: NDArray[np.intp]
    shift_G: Array
    single_n: Array

    @classmethod
    def of(cls, table: Table, law: Law) -> Residuals:
        """The residuals of a law fitted to `table`."""
        predicted = law.delta(table.n_act, table.n_total, table.L, table.K, table.A)
        sweep_n = sweeps(table)
        freed_n = _freed(table.delta - predicted, _hat(table, law), sweep_n)
        rows_G = np.bincount(sweep_n)
        mean_G = np.bincount(sweep_n, freed_n) / rows_G
        scale_G = np.sqrt(rows_G / np.maximum(rows_G - 1, 1))
        single_n = (freed_n - mean_G[sweep_n]) * scale_G[sweep_n]
        # A sweep's mean carries its rows' noise as well; only the rest is common to the sweep.
        of_rows_G = np.bincount(sweep_n, single_n**2) / rows_G**2
        variance = np.mean(mean_G**2)
        common = max(0.0, float(variance - np.mean(of_rows_G)))
        shrink = np.sqrt(common / variance) if variance > 0 else 0.0
        return cls(sweep_n, shrink * mean_G, single_n)

    @property
    def noise(self) -> float:
        """Standard deviation of one training around the law, in nats."""
        return float(np.sqrt(np.mean(self.shift_G**2) + np.mean(self.single_n**2)))

    def resample(self, rng: np.random.Generator) -> Array:
        """Residuals [n] of the same sweeps, those of others put in the place of each."""
        rows = [np.flatnonzero(self.sweep_n == sweep) for sweep in range(len(self.shift_G))]
        drawn_n = np.empty_like(self.single_n)
        for own in rows:
            source = rng.integers(len(rows))
            sign = rng.choice([-1.0, 1.0])
            singles = rng.choice(self.single_n[rows[source]], len(own))
            drawn_n[own] = sign * (self.shift_G[source] + singles)
        return drawn_n


def _freed(residual_n: Array, hat_nn: Array, sweep_n: NDArray[np.intp]) -> Array:
    """Residuals whose covariance within each sweep is that of independent noise (CR2)."""
    left_nn = np.eye(len(residual_n)) - hat_nn
    freed_n = np.empty_like(residual_n)
    for sweep in range(sweep_n.max() + 1):
        own = np.flatnonzero(sweep_n == sweep)
        values, vectors = np.linalg.eigh(left_nn[own] @ left_nn[own].T)
        scaled = (vectors.T @ residual_n[own]) / np.sqrt(np.maximum(values, _LEAST_LEFT))
        freed_n[own] = vectors @ scaled
    return freed_n


def _hat(table: Table, law: Law) -> Array:
    """d prediction / d observation [n, n] of the two-stage fit, linear around the law."""
    jacobian_nk = _jacobian(table, law)
    first, second = jacobian_nk[:, :-3], jacobian_nk[:, -3:]  # the last three are stage 2's
    reference = identifiability.is_reference_stride(table)
    rest = ~reference
    hat_nn = np.zeros((len(table), len(table)))
    hat_nn[:, reference] = first @ np.linalg.pinv(first[reference], rcond=_LOST)
    # Stage 2 fits what stage 1 leaves, so it takes back a part of stage 1's error.
    onto = second[rest] @ np.linalg.pinv(second[rest], rcond=_LOST)
    hat_nn[np.ix_(rest, reference)] -= onto @ hat_nn[np.ix_(rest, reference)]
    hat_nn[np.ix_(rest, rest)] = onto
    return hat_nn


def leverage(table: Table, law: Law) -> Array:
    """d prediction / d observation of every row itself [n], in [0, 1], linear around the law."""
    jacobian_nk = _jacobian(table, law)
    reference = identifiability.is_reference_stride(table)
    own_n = np.empty(len(table))
    for stage, columns in ((reference, slice(None, -3)), (~reference, slice(-3, None))):
        part = jacobian_nk[stage, columns]
        own_n[stage] = np.einsum("nk,kn->n", part, np.linalg.pinv(part, rcond=_LOST))
    return own_n


def _jacobian(table: Table, law: Law) -> Array:
    """d Delta / d coefficient [n, 10], each column of length 1 (or 0)."""
    values = dataclasses.asdict(law)
    columns = []
    for name in COEFFICIENTS:
        step = _STEP * max(abs(values[name]), 1e-3)
        ends = [
            # u, w and z may stand at their bound 0, below which no law exists.
            dataclasses.replace(law, **{name: values[name] + moved}).delta(
                table.n_act, table.n_total, table.L, table.K, table.A
            )
            for moved in ((step, 0.0) if values[name] == 0 else (step, -step))
        ]
        columns.append(ends[0] - ends[1])
    jacobian_nk = np.stack(columns, axis=1)
    lengths = np.linalg.norm(jacobian_nk, axis=0)
    return jacobian_nk / np.where(lengths > 0, lengths, 1.0)
