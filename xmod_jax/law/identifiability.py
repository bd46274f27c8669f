"""What the observations determine: checks before the fit, warnings after it.

Legend: P candidates, n observations, k exponents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from xmod_jax.errors import UserError
from xmod_jax.law.observations import Table
from xmod_jax.law.stage import Stage

Array = NDArray[np.float64]

# N_act differs between the hierarchies of one backbone by the few thousand parameters of routers
# and gates; values this close (relatively) are one N_act.
N_ACT_TOLERANCE = 0.02
# A relative standard error of this size along some direction of the coefficients is reported.
_FLAT = 0.5


def is_reference_stride(table: Table) -> NDArray[np.bool_]:
    """Whether each row has A = 1, where the anchor-stride interaction vanishes."""
    return np.isclose(table.A, 1.0, rtol=1e-9)


def distinct(values: Array, tolerance: float = 0.0) -> Array:
    """Sorted distinct values; those within a relative `tolerance` of a group's smallest are one."""
    kept: list[float] = []
    for value in np.unique(values):
        if not kept or value > kept[-1] * (1 + tolerance):
            kept.append(float(value))
    return np.array(kept)


def one_size(n_act: Array) -> Array:
    """Each N_act replaced by the smallest of those that count as one."""
    starts = distinct(n_act, N_ACT_TOLERANCE)
    return starts[np.searchsorted(starts, n_act, side="right") - 1]


def require_determined(table: Table, candidate: bool = False) -> None:
    """Checks that every coefficient meets variation that determines it.

    Args:
      table: observations.
      candidate: whether the exposure term P_D is fitted as well.

    Raises:
      UserError: one line with everything that is missing and the sweeps that supply it.
    """
    reference = is_reference_stride(table)
    first, rest = table.select(reference), table.select(~reference)
    any_k = "k_sweep_2k ... k_sweep_32k"
    needs = [
        ("distinct K at A = 1", len(distinct(first.K)), 3, any_k),
        ("distinct L at A = 1", len(distinct(first.L)), 2, any_k),
        (
            "distinct N_act at A = 1",
            len(distinct(first.n_act, N_ACT_TOLERANCE)),
            2,
            "scale_sweep_32k",
        ),
        ("observations at A = 1", len(first), 8, f"{any_k} and scale_sweep_32k"),
        ("distinct A other than 1", len(distinct(rest.A)), 2, "anchor_sweep_32k"),
        ("distinct K at other A", len(distinct(rest.K)), 2, "anchor_sweep_32k"),
        ("observations at other A", len(rest), 4, "anchor_sweep_32k"),
    ]
    if candidate:
        tokens = len(distinct(first.dense_tokens, N_ACT_TOLERANCE))
        needs.append(("distinct dense token counts at A = 1", tokens, 2, "scale_sweep_32k"))
    missing = [
        f"{found} {what}, needs {least} (run {sweeps})"
        for what, found, least, sweeps in needs
        if found < least
    ]
    if missing:
        raise UserError("the observations do not determine the law: " + "; ".join(missing))


def warnings(stage: Stage, values: dict[str, float]) -> list[str]:
    """What a stage's fitted `values` leave undetermined, a sentence each.

    Coefficients and exponents at a bound, and a flat direction of the least-squares valley.
    """
    return _bound_warnings(stage, values) + _flat_warnings(stage, values)


def _bound_warnings(stage: Stage, values: dict[str, float]) -> list[str]:
    found = [
        f"{name} is at its bound 0: the data show no such term, and its exponents "
        f"{', '.join(exponents)} mean nothing"
        for name, exponents in zip(stage.linear, stage.terms, strict=True)
        if values[name] == 0
    ]
    for name, (low, high) in zip(stage.exponents, stage.bounds, strict=True):
        margin = 1e-3 * (high - low)
        if name in _live(stage, values) and not low + margin < values[name] < high - margin:
            found.append(f"{name} = {values[name]:.3g} is at its bound of [{low:g}, {high:g}]")
    return found


def _live(stage: Stage, values: dict[str, float]) -> list[str]:
    """Names of the coefficients and exponents whose term has not vanished."""
    names: list[str] = []
    for name, exponents in zip(stage.linear, stage.terms, strict=True):
        names += [name, *exponents] if values[name] > 0 else []
    return names


def _flat_warnings(stage: Stage, values: dict[str, float]) -> list[str]:
    """Names the direction in which the coefficients can move without visible cost, if any.

    In the logarithms of the coefficients the least-squares valley has curvature J'J; its flattest
    direction has the standard error s / sigma_min, with s the residual's standard deviation.
    """
    names = _live(stage, values)
    if not names:
        return []
    jacobian = _log_jacobian(stage, values, names)
    _, sigma, directions = np.linalg.svd(jacobian, full_matrices=False)
    freedom = max(len(stage.target) - len(values), 1)
    exponents_k = np.array([values[name] for name in stage.exponents])
    noise = float(np.sqrt(stage.solve(exponents_k[None]).rss_P[0] / freedom))
    if sigma[-1] > 1e-7 * sigma[0] and noise / sigma[-1] < _FLAT:
        return []
    weights = np.abs(directions[-1])
    involved = [name for name, weight in zip(names, weights, strict=True) if weight > 0.2]
    size = noise / max(float(sigma[-1]), 1e-300)
    change = f"by {size:.0%}" if size < 10 else "by more than a factor of 10"
    return [
        f"flat direction: {', '.join(involved)} can change together {change} within one standard "
        "error; predictions between the observations are better determined than these values"
    ]


def _log_jacobian(stage: Stage, values: dict[str, float], names: Sequence[str]) -> Array:
    """d prediction / d log value [n, len(names)], the intercept projected out where free."""
    step = 1e-5
    columns = []
    for name in names:
        ends = []
        for sign in (1.0, -1.0):
            moved = values | {name: values[name] * np.exp(sign * step)}
            exponents_Pk = np.array([[moved[exponent] for exponent in stage.exponents]])
            ends.append(
                stage.features(exponents_Pk)[0] @ [moved[linear] for linear in stage.linear]
            )
        columns.append((ends[0] - ends[1]) / (2 * step))
    jacobian = np.stack(columns, axis=1)
    return jacobian - jacobian.mean(axis=0) if stage.intercept else jacobian
