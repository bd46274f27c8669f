"""What a law rests on: the observations it was fitted on, and the runs that a report shows.

`fit` leaves observations.csv and predictions.csv beside law.json. They count only where they belong
to this law: files get mixed when a folder is fitted twice or a law is copied.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.law_figures import Points
from xmod_jax.errors import UserError
from xmod_jax.law import observation_files, sweeps
from xmod_jax.law import observations as obs
from xmod_jax.law.observations import Row, Table
from xmod_jax.law.terms import Law, LawFile

LAW = "law.json"
OBSERVATIONS = "observations.csv"
PREDICTIONS = "predictions.csv"
_KINDS = {"fitted": "fitted", "withheld": "withheld, predicted", "beyond": "beyond the range"}
_DIGITS = 6  # to which two records of one training agree
_CLOSE = 1e-6  # nats, between a law's prediction and its record


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A law's observations beside those of the runs shown.

    Attributes:
      fitted: the rows it was fitted on, dense references with them; None where no file tells.
      shown: the rows of the runs shown, dense references with them; may be empty.
      new: those of `shown` that are sparse and were not fitted, as far as known.
      verdict: one sentence on how the two relate.
      agrees: whether the runs shown are all among what was fitted.
      points: what the parity plot shows.
      notes: what could not be read, or belongs to another law; a sentence each.
    """

    fitted: list[Row] | None
    shown: list[Row]
    new: list[Row]
    verdict: str
    agrees: bool
    points: list[Points]
    notes: list[str]

    @property
    def table(self) -> Table | None:
        """What the curves show: the fitted rows, the runs shown where they were not fitted."""
        rows = self.shown if self.new or self.fitted is None else self.fitted
        return _table(rows)


def gather(law: LawFile, path: pathlib.Path, runs: Sequence[pathlib.Path]) -> Evidence:
    """Reads what stands beside a law's file and in the run directories shown."""
    notes: list[str] = []
    fitted = _fitted(law, path.parent / OBSERVATIONS, notes)
    shown, new, agrees, verdict = _compare(law, fitted, runs, notes)
    points = _predictions(law.law, path.parent / PREDICTIONS, notes)
    if not points and fitted is not None and (table := _table(fitted)):
        points = [_points("fitted", law.law, table)]
    if agrees and not points and (table := _table(shown)):
        points = [_points("fitted", law.law, table)]
    dense = [row for row in shown if row.dense]
    if new and (table := _table([*new, *dense])):
        points.append(_points("shown here, not fitted", law.law, table))
    return Evidence(fitted, shown, new, verdict, agrees, points, notes)


def _fitted(law: LawFile, path: pathlib.Path, notes: list[str]) -> list[Row] | None:
    """The rows beside the law, if they can be those it was fitted on."""
    if not path.is_file():
        return None
    try:
        rows = observation_files.read_csv(path)
    except UserError as error:
        notes.append(str(error))
        return None
    found = sum(not row.dense for row in rows)
    if found != law.n_observations:
        notes.append(
            f"{path} holds {found} observations, the law was fitted on {law.n_observations}: it "
            "belongs to another fit and is left out."
        )
        return None
    return rows


def _compare(
    law: LawFile, fitted: list[Row] | None, runs: Sequence[pathlib.Path], notes: list[str]
) -> tuple[list[Row], list[Row], bool, str]:
    """Rows of the runs, those not fitted, whether all were, and a sentence that says so."""
    kinds: dict[str, list[Row]] = {}
    try:
        kinds = {loss: sweeps.collect(runs, loss).rows for loss in sweeps.Loss}
    except UserError as error:
        notes.append(f"The runs shown give no observation: {error}")
    sparse = {loss: [row for row in rows if not row.dense] for loss, rows in kinds.items()}
    if not any(sparse.values()):
        told = "No run shown is an observation of a law (a finished X-MoD): it was fitted on others"
        return next(iter(kinds.values()), []), [], False, f"{told}."
    if fitted is None:
        return _compare_quality(law, kinds, sparse)
    known = {_key(row) for row in fitted}
    new = {loss: [row for row in rows if _key(row) not in known] for loss, rows in sparse.items()}
    loss = min(new, key=lambda name: len(new[name]))
    count, unknown = len(sparse[loss]), len(new[loss])
    which = "" if loss == sweeps.Loss.CALIBRATED else f" (their {loss} losses)"
    if not unknown:
        others = f"{law.n_observations} observations, among them " * (count < law.n_observations)
        told = f"Fitted on {others}all {count} observations of the runs shown{which}."
    else:
        which = "none" if unknown == count else f"only {count - unknown}"
        told = (
            f"NOT fitted on the runs shown: {which} of their {count} observations stands among the "
            f"{law.n_observations} that were fitted."
        )
    return kinds[loss], new[loss], not unknown, told


def _compare_quality(
    law: LawFile, kinds: dict[str, list[Row]], sparse: dict[str, list[Row]]
) -> tuple[list[Row], list[Row], bool, str]:
    """`_compare` where no file names the rows: their number and the recorded error must agree."""
    for loss, rows in kinds.items():
        table = _table(rows)
        if table is None or law.rmse is None or len(table) != law.n_observations:
            continue
        error = _points("", law.law, table)
        rmse = float(np.sqrt(np.mean((error.predicted - error.observed) ** 2)))
        if abs(rmse - law.rmse) < _CLOSE:
            told = f"Fitted on the {len(table)} observations of the runs shown ({loss} losses)"
            return rows, [], True, f"{told}: their number and their error agree."
    first = next(iter(kinds))
    told = (
        f"NOT fitted on the runs shown, as far as {LAW} tells: it rests on {law.n_observations} "
        f"observations with another error than the {len(sparse[first])} here, and no "
        f"{OBSERVATIONS} stands beside it."
    )
    return kinds[first], sparse[first], False, told


def _key(row: Row) -> tuple[object, ...]:
    numbers = (row.L, row.n_act, row.n_total, row.K, row.A, row.flops, row.loss)
    return (row.family, *(f"{number:.{_DIGITS}g}" for number in numbers))


def _table(rows: Sequence[Row]) -> Table | None:
    """The sparse rows that have a dense reference; None where none has."""
    places = {(row.family, row.L) for row in rows if row.dense}
    usable = [row for row in rows if (row.family, row.L) in places]
    if all(row.dense for row in usable):
        return None
    try:
        return Table.of(obs.observe(usable, extrapolate=True))
    except UserError:
        return None


def _points(label: str, law: Law, table: Table) -> Points:
    predicted = law.delta(table.n_act, table.n_total, table.L, table.K, table.A)
    return Points(label, table.delta, predicted)


def _predictions(law: Law, path: pathlib.Path, notes: list[str]) -> list[Points]:
    """The predictions beside the law by kind; none where they are another law's."""
    if not path.is_file():
        return []
    names = ("n_act", "n_total", "L", "K", "A", "observed", "predicted")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                (row["kind"], *(float(row[name]) for name in names)) for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        notes.append(f"{path} cannot be read: {error}")
        return []
    found = []
    for kind, label in _KINDS.items():
        columns = np.array([row[1:] for row in rows if row[0] == kind], float).reshape(-1, 7).T
        if not columns.size or not np.isfinite(columns).all():
            continue
        *place, observed, predicted = columns
        if kind != "withheld" and np.abs(law.delta(*place) - predicted).max() > _CLOSE:
            notes.append(f"{path} holds the predictions of another law and is left out.")
            return []
        found.append(Points(label, observed, predicted))
    return found
