"""One stage of the fit of the law: least squares over exponents, linear once they are given.

Exponents are searched by differential evolution; the linear coefficients of all candidates of a
generation are solved at once, exactly. SPEC section 8.

Legend: P candidates, n observations, k exponents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from xmod_jax.law import least_squares
from xmod_jax.law.observations import Table
from xmod_jax.law.terms import (
    capacity_reward,
    context_penalty,
    exposure_penalty,
    stride_interaction,
)

Array = NDArray[np.float64]

# Exponents of scale (eta) and of saturation or growth (rho). A rho of 0 would make its term vanish
# against an infinite coefficient; 0.02 is the logarithm to within 2% over the grid's K.
ETA_BOUNDS = (0.0, 3.0)
RHO_BOUNDS = (0.02, 4.0)

# Points of the scan that guards a refit against another valley.
_SCAN = 256

# Starts agree when their predictions do to this many nats, far below a loss's own noise.
AGREEMENT = 1e-3


@dataclasses.dataclass(frozen=True)
class Search:
    """Effort of the search.

    Attributes:
      seed: of all randomness.
      starts: independent searches that must agree.
      population: members of a generation per exponent.
      generations: largest number of generations.
    """

    seed: int = 0
    starts: int = 3
    population: int = 12
    generations: int = 300


@dataclasses.dataclass(frozen=True)
class Stage:
    """One nonlinear least-squares problem that is linear given its exponents.

    Attributes:
      exponents: their names.
      linear: names of the non-negative coefficients, in the order of the features.
      bounds: of the exponents.
      terms: for each non-negative coefficient, the exponents of its term.
      features: exponents [P, k] -> signed terms [P, n, number of coefficients].
      target: what is fitted, [n].
      intercept: whether a free e is fitted.
    """

    exponents: tuple[str, ...]
    linear: tuple[str, ...]
    bounds: tuple[tuple[float, float], ...]
    terms: tuple[tuple[str, ...], ...]
    features: Callable[[Array], Array]
    target: Array
    intercept: bool

    def solve(self, exponents_Pk: Array) -> least_squares.Solution:
        return least_squares.nonnegative(self.features(exponents_Pk), self.target, self.intercept)

    def predict(self, exponents_Pk: Array) -> Array:
        """Best predictions [P, n] for each candidate's exponents."""
        features = self.features(exponents_Pk)
        solution = least_squares.nonnegative(features, self.target, self.intercept)
        sums_Pn = np.einsum("pnk,pk->pn", features, solution.coefficients_Pk)
        return solution.intercept_P[:, None] + sums_Pn


@dataclasses.dataclass(frozen=True)
class StageFit:
    """Coefficients by name, and by how many nats the starts' predictions differ at most."""

    values: dict[str, float]
    distance: float

    @property
    def agree(self) -> bool:
        """Whether all starts reached the same predictions."""
        return self.distance <= AGREEMENT

    @property
    def disagreement(self) -> str:
        """One sentence about the distance between the starts."""
        return (
            f"independent starts disagree on {', '.join(self.values)}: their predictions differ "
            f"by up to {self.distance:.2g} nats"
        )


def first_stage(table: Table, candidate: bool = False) -> Stage:
    """e, u, w and their exponents on the A = 1 rows; with `candidate` also v and its exponents."""

    def features(exponents_Pk: Array) -> Array:
        eta_N, rho_N, eta_L, rho_L, *exposure = exponents_Pk.T[:, :, None]
        columns = [
            -capacity_reward(table.n_act, table.n_total, eta_N, rho_N),
            context_penalty(table.L, table.K, eta_L, rho_L),
        ]
        if candidate:
            columns.append(exposure_penalty(table.K, table.tokens, table.dense_tokens, *exposure))
        return np.stack(columns, axis=-1)

    terms: tuple[tuple[str, ...], ...] = (("eta_N", "rho_N"), ("eta_L", "rho_L"))
    terms += (("eta_D", "rho_D"),) * candidate
    return Stage(
        exponents=sum(terms, ()),
        linear=("u", "w") + ("v",) * candidate,
        bounds=(ETA_BOUNDS, RHO_BOUNDS) * len(terms),
        terms=terms,
        features=features,
        target=table.delta,
        intercept=True,
    )


def second_stage(table: Table, target: Array) -> Stage:
    """z and its exponents on the rows of other A; `target` [n] is what stage 1 leaves there."""

    def features(exponents_Pk: Array) -> Array:
        rho_K, rho_A = exponents_Pk.T[:, :, None]
        return -stride_interaction(table.K, table.A, rho_K, rho_A)[..., None]

    return Stage(
        exponents=("rho_K", "rho_A"),
        linear=("z",),
        bounds=(RHO_BOUNDS, RHO_BOUNDS),
        terms=(("rho_K", "rho_A"),),
        features=features,
        target=target,
        intercept=False,
    )


def fit_stage(stage: Stage, search: Search) -> StageFit:
    """Searches from several starts, polishes each, keeps the best, compares the rest with it."""
    starts = np.random.SeedSequence(search.seed).spawn(search.starts)
    ends_Pk = np.array([_polish(stage, _evolve(stage, start, search)) for start in starts])
    solution = stage.solve(ends_Pk)
    best = int(np.argmin(solution.rss_P))
    predicted_Pn = stage.predict(ends_Pk)
    distance = float(np.abs(predicted_Pn - predicted_Pn[best]).max())
    return StageFit(_values(stage, ends_Pk[best]), distance)


def refit_stage(stage: Stage, near: Mapping[str, float]) -> dict[str, float]:
    """Coefficients by name of a stage whose target has moved a little, from where it lay before.

    Descends from the exponents in `near` and from the best point of a scan of the whole box, and
    keeps the better end: the optimum that `fit_stage` finds, in a third of one search's time.
    """
    start_k = np.array([near[name] for name in stage.exponents])
    scan_Pk = _scan(stage.bounds)
    best_k = scan_Pk[np.argmin(stage.solve(scan_Pk).rss_P)]
    ends_Pk = np.array([_polish(stage, start_k), _polish(stage, best_k)])
    return _values(stage, ends_Pk[np.argmin(stage.solve(ends_Pk).rss_P)])


@functools.cache
def _scan(bounds: tuple[tuple[float, float], ...]) -> Array:
    """Points [P, k] spread over a box; always the same."""
    lower, upper = np.array(bounds).T
    return np.random.default_rng(0).uniform(lower, upper, (_SCAN, len(bounds)))


def _values(stage: Stage, exponents_k: Array) -> dict[str, float]:
    """All coefficients by name, the linear ones solved for the exponents."""
    solution = stage.solve(exponents_k[None])
    values = dict(zip(stage.exponents, exponents_k.tolist(), strict=True))
    values |= dict(zip(stage.linear, solution.coefficients_Pk[0].tolist(), strict=True))
    if stage.intercept:
        values["e"] = float(solution.intercept_P[0])
    return values


def _evolve(stage: Stage, seed: np.random.SeedSequence, search: Search) -> Array:
    """Exponents [k] found by differential evolution from one seed."""
    # The share of the sum of squares, not a mean in nats^2: the tolerances below then mean the same
    # for any number of rows and any size of Delta.
    scale = float(np.sum(stage.target**2)) or 1.0

    def stop_at_the_bottom(intermediate_result: optimize.OptimizeResult) -> None:
        # Without noise the population shrinks for ever; the polish is there in a few steps.
        if intermediate_result.fun < 1e-9:
            raise StopIteration

    found = optimize.differential_evolution(
        lambda exponents_kP: stage.solve(exponents_kP.T).rss_P / scale,
        stage.bounds,
        vectorized=True,
        updating="deferred",
        polish=False,
        popsize=search.population,
        maxiter=search.generations,
        tol=1e-4,
        callback=stop_at_the_bottom,
        rng=np.random.default_rng(seed),
    )
    return np.asarray(found.x, float)


def _polish(stage: Stage, exponents_k: Array) -> Array:
    """Descends to the bottom of the valley; the linear coefficients follow the exponents."""
    lower, upper = np.array(stage.bounds).T
    step = 1e-6

    def residual(point_k: Array) -> Array:
        return stage.predict(point_k[None])[0] - stage.target

    def jacobian(point_k: Array) -> Array:
        shift = step * np.eye(len(point_k))
        predicted = stage.predict(np.concatenate([point_k + shift, point_k - shift]))
        ahead, behind = np.split(predicted, 2)
        return (ahead - behind).T / (2 * step)

    inside = np.clip(exponents_k, lower + 1e-9, upper - 1e-9)
    tight: dict[str, Any] = {"xtol": 1e-14, "ftol": 1e-15, "gtol": 1e-15, "max_nfev": 200}
    found = optimize.least_squares(residual, inside, jacobian, bounds=(lower, upper), **tight)
    better = stage.solve(np.array([exponents_k, found.x])).rss_P
    return np.asarray(found.x if better[1] <= better[0] else exponents_k, float)
