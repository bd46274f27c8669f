"""Observations of the scaling law: losses beside the dense loss at equal FLOPs (SPEC 8).

A `Row` is a finished training, from a CSV or (`xmod_jax.law.sweeps`) from run directories. Rows
with K = 1 are the dense reference of their family and L; every other row becomes an `Observation`:
its loss minus the dense loss interpolated in log FLOPs.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import io
import itertools
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmod_jax.errors import UserError

HEADER = ("family", "L", "n_act", "n_total", "K", "A", "flops", "tokens", "loss")
_NUMBERS = HEADER[1:]

# Far beyond any training, and far from where a power of a number overflows.
_LARGEST = 1e40
_LARGEST_LOSS = 1e6

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
      A: anchor stride; of no meaning in a dense row (1 where left empty).
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
        for name in _NUMBERS:
            value = getattr(self, name)
            if not math.isfinite(value):
                return f"{name} is {value}"
            if value <= 0 and name != "loss":
                return f"{name} must be positive, got {value:g}"
            largest = _LARGEST_LOSS if name == "loss" else _LARGEST
            if abs(value) > largest or (name != "loss" and value < 1 / largest):
                return f"{name} is {value:g}: no training has that"
        if self.K < 1:
            return f"K must be at least 1, got {self.K:g}"
        if not self.dense and self.n_total < self.n_act:
            return f"n_total {self.n_total:g} is below n_act {self.n_act:g}"
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

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> Table:
        """The columns of `observations`; sorted, so that shuffled rows give the same bits."""
        rows = sorted(
            (r.L, r.n_act, r.n_total, r.K, r.A, r.tokens, o.dense_tokens, o.delta)
            for o in observations
            for r in [o.row]
        )
        columns = np.array(rows, float).reshape(-1, 8).T
        return cls(*np.ascontiguousarray(columns))

    def __len__(self) -> int:
        return len(self.delta)

    def select(self, rows: NDArray[Any]) -> Table:
        """The rows where a mask [n] is true, or those of an index array, in its order."""
        return Table(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))


def read_csv(path: pathlib.Path) -> list[Row]:
    """Reads rows from a CSV with (at least) the columns of `HEADER`; others are ignored.

    Raises:
      UserError: unreadable file, missing columns, or faulty values, naming the lines.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot read observations: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a CSV in UTF-8: {error.reason}") from error
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
    try:
        names = [name.strip() for name in reader.fieldnames or ()]
        missing = [name for name in HEADER if name not in names]
        if missing:
            raise UserError(
                f"{path}: missing column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
                f"the header is {','.join(HEADER)}"
            )
        if twice := sorted({name for name in HEADER if names.count(name) > 1}):
            raise UserError(f"{path}: column {', '.join(twice)} stands there twice: keep one")
        reader.fieldnames = names
        rows, faults = [], []
        for record in reader:
            parsed = _parse(record, f"line {reader.line_num}")
            if isinstance(parsed, Row):
                rows.append(parsed)
            else:
                faults.append(parsed)
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.line_num}: not a CSV: {error}") from error
    _refuse(f"{path}: ", faults)
    if not rows:
        raise UserError(f"{path}: no observations below the header")
    return rows


def _parse(record: dict[str | None, str | None], source: str) -> Row | str:
    """The row of a CSV record, or what is wrong with it."""
    if None in record:
        return f"{source}: more cells than columns (a decimal comma?)"
    values: dict[str, float] = {}
    for name in _NUMBERS:
        text = (record[name] or "").strip()
        if not text and name == "A" and values["K"] == 1:
            text = "1"
        try:
            values[name] = float(text)
        except ValueError:
            return f"{source}: {name} is not a number: {text!r}"
    family = (record["family"] or "").strip()
    if not family:
        return f"{source}: family is empty"
    row = Row(family=family, source=source, **values)
    fault = row.fault()
    return row if fault is None else f"{source}: {fault}"


def to_csv(rows: Sequence[Row]) -> str:
    """The text that `read_csv` reads back to the same values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow([row.family, *(_shortest(getattr(row, name)) for name in _NUMBERS)])
    return out.getvalue()


def _shortest(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else repr(float(value))


def observe(
    rows: Sequence[Row], extrapolate: bool = False, tolerance: float = FLOPS_TOLERANCE
) -> list[Observation]:
    """Pairs every sparse row with the dense loss at its FLOPs, family and L.

    Between two dense rows the loss is linear in log FLOPs. Up to `tolerance` (relative FLOPs)
    beyond the ends, the end's loss counts.

    Args:
      rows: dense (K = 1) and sparse rows.
      extrapolate: continue the curve's last segment beyond its range and mark the observation,
        instead of refusing.
      tolerance: share of FLOPs by which a row may lie outside the dense curve.

    Raises:
      UserError: faulty, duplicated or uncovered rows, naming them.
    """
    _refuse("", [f"{row.source}: {fault}" for row in rows if (fault := row.fault())])
    _refuse_duplicates(rows)
    curves: dict[tuple[str, float], list[Row]] = collections.defaultdict(list)
    for row in rows:
        if row.dense:
            curves[row.family, row.L].append(row)
    sparse = [row for row in rows if not row.dense]
    if not sparse:
        raise UserError("no sparse observations: every row has K = 1")
    _refuse(
        "no dense reference (a row with K = 1 of the same family and L) for ",
        [
            f"{row.source} ({row.family}, L={row.L:g})"
            for row in sparse
            if (row.family, row.L) not in curves
        ],
    )
    observations, outside = [], []
    for row in sparse:
        curve = sorted(curves[row.family, row.L], key=lambda dense: dense.flops)
        low, high = curve[0].flops, curve[-1].flops
        covered = low * (1 - tolerance) <= row.flops <= high * (1 + tolerance)
        if not covered and not extrapolate:
            outside.append(f"{row.source} ({row.flops:.4g} FLOPs, dense {low:.4g} to {high:.4g})")
        loss = _at_flops(curve, [dense.loss for dense in curve], row.flops, covered)
        log_tokens = [math.log(dense.tokens) for dense in curve]
        # Beyond the ends the tokens of equal FLOPs are known: the dense phi does not change.
        tokens = math.exp(_at_flops(curve, log_tokens, row.flops, clamp=False))
        observations.append(Observation(row, loss, tokens, not covered))
    _refuse(
        "the dense reference does not cover the FLOPs (train dense runs there, or allow "
        "extrapolation) of ",
        outside,
    )
    return observations


def _at_flops(curve: Sequence[Row], values: Sequence[float], flops: float, clamp: bool) -> float:
    """Value at `flops` on a curve sorted by FLOPs, linear in log FLOPs; constant if one point."""
    x, y = np.log([row.flops for row in curve]), np.array(values)
    at = math.log(flops)
    if clamp or len(curve) == 1 or x[0] <= at <= x[-1]:
        return float(np.interp(at, x, y))
    first, second = (0, 1) if at < x[0] else (-2, -1)
    slope = (y[second] - y[first]) / (x[second] - x[first])
    return float(y[first] + slope * (at - x[first]))


def _refuse_duplicates(rows: Sequence[Row]) -> None:
    def key(row: Row) -> tuple[object, ...]:
        # Two dense losses at one place of a curve contradict each other whatever their size.
        place = (row.family, row.L, row.flops)
        return place if row.dense else (*place, row.n_act, row.n_total, row.K, row.A, row.tokens)

    groups: dict[tuple[object, ...], list[str]] = collections.defaultdict(list)
    for row in rows:
        groups[(row.dense, *key(row))].append(row.source)
    _refuse(
        "duplicated observations (keep one row of each, or their mean): ",
        [" = ".join(sources) for sources in groups.values() if len(sources) > 1],
    )


def _refuse(prefix: str, faults: Sequence[str], shown: int = 8) -> None:
    """Raises one line that names the faults, the first `shown` of them in full."""
    if faults:
        more = f"; and {len(faults) - shown} more" if len(faults) > shown else ""
        raise UserError(prefix + "; ".join(itertools.islice(faults, shown)) + more)
