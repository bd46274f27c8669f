"""Observations of the scaling law: losses beside the dense loss at equal FLOPs (SPEC 8).

A `Row` is a finished training, from a CSV (`xmod_jax.law.observation_files`) or from run
directories (`xmod_jax.law.sweeps`). Rows with K = 1 are the dense reference of their family and L;
those at one compute are averaged. Every other row becomes an `Observation`: its loss minus the
dense loss interpolated in log FLOPs.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmod_jax.errors import UserError

HEADER = ("family", "L", "n_act", "n_total", "K", "A", "flops", "tokens", "loss")
NUMBERS = HEADER[1:]

# Far beyond any training, and far from where a power of a number overflows.
_LARGEST = 1e40
_LARGEST_LOSS = 1e6

# Dense rows whose FLOPs differ relatively by no more than this are one place of their curve:
# repeats with other seeds, or numbers that another program rounded.
SAME_FLOPS = 1e-3
# Of a curve that is continued, the end's slope is taken over at least this ratio of FLOPs: between
# nearer rows it would be that of their noise.
_SPAN = 1.1
# Sizes of one model: routers and gates apart, what people count in or leave out differs less.
_ONE_SIZE = 0.1

# Runs at matched FLOPs differ by the rounding to whole steps; the dense curve is held constant
# over this share beyond its ends (at a slope of 0.1 nats per e-fold it is worth 0.002 nats).
FLOPS_TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Row:
    """One finished training.

    Attributes:
      family: backbone family; it and L choose the dense reference.
      L: context length in tokens.
      n_act: active-equivalent parameters, embedding and head included.
      n_total: total parameters N, embedding and head included.
      K: token sparsity; 1 for a dense row.
      A: anchor stride; of no meaning in a dense row.
      flops: training compute C = phi * tokens (SPEC 5), in FLOPs.
      tokens: training tokens.
      loss: validation loss in nats.
      source: where the row stands, for messages: a line of a CSV or a run directory.
    """

    family: str
    L: float
    n_act: float
    n_total: float
    K: float
    A: float
    flops: float
    tokens: float
    loss: float
    source: str

    @property
    def dense(self) -> bool:
        """Whether the row belongs to the dense reference."""
        return self.K == 1

    def fault(self) -> str | None:
        """What is wrong with the values, or None."""
        for name in NUMBERS:
            if name == "A" and self.dense:
                continue
            value = getattr(self, name)
            if not math.isfinite(value):
                return f"{name} is {value}"
            if value <= 0:
                told = " (the loss itself, not its difference to dense)" * (name == "loss")
                return f"{name} must be positive, got {value:g}{told}"
            largest = _LARGEST_LOSS if name == "loss" else _LARGEST
            if abs(value) > largest or (name != "loss" and value < 1 / largest):
                return f"{name} is {value:g}: no training has that"
        if self.K < 1:
            return f"K must be at least 1, got {self.K:g} (K = 8 routes one token in 8)"
        if not self.dense and self.n_total < self.n_act:
            return f"n_total {self.n_total:g} is below n_act {self.n_act:g}: exchanged?"
        return None


@dataclasses.dataclass(frozen=True)
class Observation:
    """A sparse row with its dense reference.

    Attributes:
      row: the sparse row.
      dense_loss: dense loss in nats at the row's FLOPs, family and L.
      dense_tokens: training tokens of the dense reference there.
      extrapolated: whether the dense reference was continued beyond its range.
    """

    row: Row
    dense_loss: float
    dense_tokens: float
    extrapolated: bool

    @property
    def delta(self) -> float:
        """Matched-FLOPs residual in nats; negative where sparse depth wins."""
        return self.row.loss - self.dense_loss


@dataclasses.dataclass(frozen=True)
class Table:
    """Observations as float64 columns [n], in an order that does not depend on the input's."""

    L: NDArray[np.float64]
    n_act: NDArray[np.float64]
    n_total: NDArray[np.float64]
    K: NDArray[np.float64]
    A: NDArray[np.float64]
    tokens: NDArray[np.float64]
    dense_tokens: NDArray[np.float64]
    delta: NDArray[np.float64]
    flops: NDArray[np.float64]

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> Table:
        """The columns of `observations`; sorted, so that shuffled rows give the same bits."""
        rows = [_columns(observation) for observation in in_order(observations)]
        columns = np.array(rows, float).reshape(-1, len(dataclasses.fields(cls))).T
        return cls(*np.ascontiguousarray(columns))

    def __len__(self) -> int:
        return len(self.delta)

    def select(self, rows: NDArray[Any]) -> Table:
        """The rows where a mask [n] is true, or those of an index array, in its order."""
        return Table(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))


def in_order(observations: Iterable[Observation]) -> list[Observation]:
    """The observations in the order of a `Table`'s rows."""
    return sorted(observations, key=_columns)


def _columns(observation: Observation) -> tuple[float, ...]:
    row = observation.row
    sizes = (row.L, row.n_act, row.n_total, row.K, row.A)
    return (*sizes, row.tokens, observation.dense_tokens, observation.delta, row.flops)


def observe(
    rows: Sequence[Row], extrapolate: bool = False, tolerance: float = FLOPS_TOLERANCE
) -> list[Observation]:
    """Pairs every sparse row with the dense loss at its FLOPs, family and L.

    Between two dense rows the loss is linear in log FLOPs. Up to `tolerance` (relative FLOPs)
    beyond the ends, the end's loss counts.

    Args:
      rows: dense (K = 1) and sparse rows.
      extrapolate: continue the curve beyond its range, by the slope of its end, and mark the
        observation, instead of refusing. A curve of one row has no slope: its loss stays.
      tolerance: share of FLOPs by which a row may lie outside the dense curve.

    Raises:
      UserError: faulty, duplicated or uncovered rows, naming them.
    """
    refuse("", [f"{row.source}: {fault}" for row in rows if (fault := row.fault())])
    sparse = [row for row in rows if not row.dense]
    if not sparse:
        raise UserError("no sparse observations: every row has K = 1")
    _refuse_duplicates(sparse)
    curves = dense_curves(rows)
    refuse(
        "no dense reference (a row with K = 1 of the same family and L) for ",
        [
            f"{row.source} ({row.family}, L={row.L:g})"
            for row in sparse
            if (row.family, row.L) not in curves
        ],
    )
    observations, outside = [], []
    for row in sparse:
        curve = curves[row.family, row.L]
        low, high = curve[0].flops, curve[-1].flops
        covered = low * (1 - tolerance) <= row.flops <= high * (1 + tolerance)
        if not covered and not extrapolate:
            outside.append(f"{row.source} ({row.flops:.4g} FLOPs, dense {low:.4g} to {high:.4g})")
        loss = _loss_at(curve, row.flops, continued=not covered)
        observations.append(Observation(row, loss, _tokens_at(curve, row.flops), not covered))
    refuse(
        "the dense reference does not cover the FLOPs (train dense runs there, or allow "
        "extrapolation) of ",
        outside,
    )
    return observations


def dense_curves(rows: Iterable[Row]) -> dict[tuple[str, float], list[Row]]:
    """The dense rows by family and L, by growing FLOPs; those at one compute as their mean.

    Raises:
      UserError: rows at one compute that are no repeats, since their models differ in size.
    """
    curves: dict[tuple[str, float], list[Row]] = {}
    for repeats in dense_places(rows):
        row = repeats[0]
        curves.setdefault((row.family, row.L), []).append(_mean(repeats))
    return curves


def dense_places(rows: Iterable[Row]) -> list[list[Row]]:
    """The dense rows grouped by family, L and FLOPs (within `SAME_FLOPS`), by growing FLOPs."""
    places: list[list[Row]] = []
    dense = [row for row in rows if row.dense]
    for row in sorted(dense, key=lambda row: (row.family, row.L, row.flops)):
        first = places[-1][0] if places else None
        same = first is not None and (first.family, first.L) == (row.family, row.L)
        if first is not None and same and row.flops <= first.flops * (1 + SAME_FLOPS):
            places[-1].append(row)
        else:
            places.append([row])
    return places


def _mean(repeats: Sequence[Row]) -> Row:
    """One dense row of several at one compute."""
    if len(repeats) == 1:
        return repeats[0]
    sizes = [row.n_act for row in repeats]
    names = " = ".join(row.source for row in repeats)
    if max(sizes) > min(sizes) * (1 + _ONE_SIZE):
        raise UserError(
            f"{names}: dense rows of one family, L and compute have {min(sizes):g} to "
            f"{max(sizes):g} parameters (n_act): give every size a family of its own"
        )
    flops, tokens, loss = (
        math.fsum(values) / len(repeats)
        for values in zip(*((row.flops, row.tokens, row.loss) for row in repeats), strict=True)
    )
    named = f"mean of {names}"
    return dataclasses.replace(repeats[0], flops=flops, tokens=tokens, loss=loss, source=named)


def _loss_at(curve: Sequence[Row], flops: float, continued: bool) -> float:
    """Dense loss at `flops` on a curve by growing FLOPs, linear in log FLOPs.

    Beyond the ends it is constant, or `continued` by the slope between the end and the nearest row
    that is far enough from it.
    """
    x, y = np.log([row.flops for row in curve]), np.array([row.loss for row in curve])
    at = math.log(flops)
    end, inner = (0, x > x[0] + math.log(_SPAN)) if at < x[0] else (-1, x < x[-1] - math.log(_SPAN))
    if not continued or x[0] <= at <= x[-1] or not inner.any():
        return float(np.interp(at, x, y))
    other = np.flatnonzero(inner)[end]
    slope = (y[other] - y[end]) / (x[other] - x[end])
    return float(y[end] + slope * (at - x[end]))


def _tokens_at(curve: Sequence[Row], flops: float) -> float:
    """Training tokens of the dense model at `flops`, log-linear in FLOPs.

    Beyond the ends FLOPs per token stay, as they do for one model.
    """
    x, y = np.log([row.flops for row in curve]), [math.log(row.tokens) for row in curve]
    at = math.log(flops)
    inside = min(max(at, float(x[0])), float(x[-1]))
    return math.exp(float(np.interp(inside, x, y)) + (at - inside))


def _refuse_duplicates(sparse: Sequence[Row]) -> None:
    groups: dict[tuple[object, ...], list[str]] = collections.defaultdict(list)
    for row in sparse:
        place = (row.family, row.L, row.flops, row.n_act, row.n_total, row.K, row.A, row.tokens)
        groups[place].append(row.source)
    refuse(
        "duplicated observations (keep one row of each, or their mean): ",
        [" = ".join(sources) for sources in groups.values() if len(sources) > 1],
    )


def refuse(prefix: str, faults: Sequence[str], shown: int = 8, length: int = 400) -> None:
    """Raises one line that names the faults, the first of them in full; none: does nothing.

    At most `shown` are named, and no more once the line has `length` characters.
    """
    if not faults:
        return
    named = faults[:1]
    for fault in faults[1:shown]:
        if len("; ".join(named)) < length:
            named = [*named, fault]
    more = f"; and {len(faults) - len(named)} more" if len(faults) > len(named) else ""
    raise UserError(prefix + "; ".join(named) + more)
