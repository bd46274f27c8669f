"""Observations that stand out from the law, and the law fitted without them.

Least squares bends to a wrong loss and hides it. So each residual is compared as it would be with
its row left out, r / (1 - h) with h the row's own pull on its prediction (h of the fit, linear
around it), in units of the median absolute deviation of all. The row furthest out is left out, the
law refitted, and so on while one stands out; rows that lie nats from dense are left out from the
start. Nothing is dropped from the fit itself.

Legend: n observations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from xmod_jax.errors import UserError
from xmod_jax.law import bootstrap
from xmod_jax.law.fit import DEFAULT_SEARCH, Fit, Solved, fit, fit_by
from xmod_jax.law.observations import Observation, Table, in_order
from xmod_jax.law.stage import Search, Stage, refit_stage
from xmod_jax.law.terms import COEFFICIENTS

Array = NDArray[np.float64]

# A row stands out if noise alone put it there this rarely (by Student's distribution, wide where
# there are few rows for the law's coefficients), and by so many nats.
RARE = 1e-7
NATS = 0.03
# No training lies as many nats from dense at equal FLOPs; the published ones do by 0.3 at most.
FAR = 1.0
_LARGEST_SHARE = 1 / 3  # of all rows; more of them are no outliers
_LEAST_LEFT = 0.05  # a row that the fit follows to this share or less of a change tells nothing
_MAD = 1.4826  # standard deviation of a normal law over its median absolute deviation


@dataclasses.dataclass(frozen=True)
class Outliers:
    """Rows that stand out.

    Attributes:
      rows: them, the furthest first, each with its Delta in nats minus that of the law without
        them, or minus 0 where there is none.
      scatter: robust standard deviation of the others around that law, in nats.
      without: the law fitted to the others; None where they do not determine one.
      shared: family and L of the dense reference at fault, where the rows are most of its own and
        lie to one side.
    """

    rows: tuple[tuple[Observation, float], ...]
    scatter: float
    without: Fit | None
    shared: tuple[str, float] | None


def find(
    observations: Sequence[Observation], fitted: Fit, search: Search = DEFAULT_SEARCH
) -> Outliers | None:
    """The observations that stand out from a law fitted to all of them; None for none.

    Args:
      observations: what `fitted` was fitted to, in any order.
      fitted: the reduced law.
      search: effort and seed of the fit without them.
    """
    observations = in_order(observations)
    table = Table.of(observations)
    kept_n = _keep(table, fitted)
    if kept_n.all():
        return None
    try:
        without = fit(table.select(kept_n), search)
    except UserError:
        without = None
    residual_n = table.delta - (without.predict(table) if without else 0.0)
    out = np.flatnonzero(~kept_n)
    order = out[np.argsort(-np.abs(residual_n[out]), kind="stable")]
    rows = tuple((observations[i], float(residual_n[i])) for i in order)
    scatter = _spread(residual_n[kept_n])
    return Outliers(rows, scatter, without, _shared_dense(rows, observations))


def _shared_dense(
    rows: Sequence[tuple[Observation, float]], observations: Sequence[Observation]
) -> tuple[str, float] | None:
    keys = {(observation.row.family, observation.row.L) for observation, _ in rows}
    if len(keys) > 1 or len({residual > 0 for _, residual in rows}) > 1:
        return None
    key = keys.pop()
    own = sum((observation.row.family, observation.row.L) == key for observation in observations)
    return key if 1 < len(rows) > own / 2 else None


def _keep(table: Table, fitted: Fit) -> NDArray[np.bool_]:
    """The rows [n] that do not stand out."""
    most = int(len(table) * _LARGEST_SHARE)
    kept_n, law = np.abs(table.delta) <= FAR, fitted
    if len(table) - kept_n.sum() > most:
        kept_n[:] = True
    try:
        if not kept_n.all():
            law = _refit(table.select(kept_n), law)
        while len(table) - kept_n.sum() < most:
            score_n = np.where(kept_n, np.abs(_scores(table, law, kept_n)), 0.0)
            if score_n.max() <= 1:
                break
            kept_n[np.argmax(score_n)] = False
            law = _refit(table.select(kept_n), law)
    except UserError:  # what is left determines no law
        return kept_n
    # One that was left out beside a worse one may lie where it should.
    near_n = np.abs(_scores(table, law, kept_n)) <= 1
    return near_n if len(table) - near_n.sum() <= most else np.ones(len(table), bool)


def _scores(table: Table, fitted: Fit, kept_n: NDArray[np.bool_]) -> Array:
    """How far out each row [n] lies: beyond 1 in size where it stands out."""
    residual_n = table.delta - fitted.predict(table)
    own_n = np.zeros(len(table))
    own_n[kept_n] = bootstrap.leverage(table.select(kept_n), fitted.law)
    left_n = residual_n / np.maximum(1 - own_n, _LEAST_LEFT)
    middle = float(np.median(left_n[kept_n]))
    freedom = max(int(kept_n.sum()) - len(COEFFICIENTS), 1)
    deviations = -special.stdtrit(freedom, RARE / 2)
    return (left_n - middle) / max(deviations * _spread(left_n[kept_n]), NATS)


def _spread(values: Array) -> float:
    return float(_MAD * np.median(np.abs(values - np.median(values))))


def _refit(table: Table, near: Fit) -> Fit:
    """The law of a table that has lost a row: quick, from where it lay before."""
    start = dataclasses.asdict(near.law)

    def solve(stage: Stage) -> Solved:
        return Solved(refit_stage(stage, start))

    return fit_by(table, solve)


def sentences(found: Outliers, fitted: Fit, shown: int = 8) -> list[str]:
    """What to tell about the rows, a sentence each."""
    names = [f"{o.row.source} (loss {o.row.loss:g}, {r:+.3g} nats)" for o, r in found.rows[:shown]]
    more = f" and {len(found.rows) - shown} more" if len(found.rows) > shown else ""
    count = f"{len(found.rows)} rows stand" if len(found.rows) > 1 else "1 row stands"
    apart = "law" if found.without else "dense loss"
    told = (
        f"{count} out from the {apart}, and the law was fitted to all the same: "
        f"{', '.join(names)}{more}"
    )
    if found.shared is not None:
        family, length = found.shared
        told += f"; all have the dense reference of {family}, L = {length:g}: look at its loss"
    if found.without is None:
        return [f"{told}; the other rows alone do not determine the law"]
    now, before = found.without.quality, fitted.quality
    return [
        f"{told}; the others lie {found.scatter:.2g} nats around it; without them R2 "
        f"{now.r2_delta:.4f} and RMSE {now.rmse:.4g} nats, with them {before.r2_delta:.4f} and "
        f"{before.rmse:.4g}"
    ]
