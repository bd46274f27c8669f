"""Observations in CSV files: one finished training a line, with the columns of `HEADER`."""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Sequence

from xmod_jax.errors import UserError
from xmod_jax.law import delimited, numerals, plausible
from xmod_jax.law.observations import HEADER, NUMBERS, Row, refuse

_COUNTS = ("L", "n_act", "n_total", "flops", "tokens")


def read_csv(path: pathlib.Path) -> list[Row]:
    """Reads rows from a CSV with (at least) the columns of `HEADER`; others are ignored.

    What spreadsheets make of a CSV is read too: see `delimited.read` and `numerals.number`.

    Raises:
      UserError: unreadable file, missing columns, or faulty values, naming the lines.
    """
    records = delimited.read(path, HEADER)
    commas = numerals.decimal_commas(record.cells[name] for record in records for name in NUMBERS)
    rows, faults = [], []
    for record in records:
        try:
            rows.append(_row(record, commas))
        except ValueError as error:
            faults.append(f"line {record.line}: {error}")
    refuse(f"{path}: ", faults)
    if not rows:
        raise UserError(f"{path}: no observations below the header")
    return rows


def _row(record: delimited.Record, decimal_commas: bool) -> Row:
    """The row of a line; ValueError tells what is wrong with it."""
    if record.fault is not None:
        raise ValueError(record.fault)
    values: dict[str, float] = {}
    for name in NUMBERS:
        text = record.cells[name]
        if name == "A" and values["K"] == 1:
            values[name] = 1.0  # whatever stands there means nothing
            continue
        try:
            values[name] = numerals.number(text, name in _COUNTS, decimal_commas)
        except ValueError as error:
            hint = " (write it out, as 5.56e8)" if text[:1].isdigit() else ""
            raise ValueError(f"{name} is not a number: {text[:40]!r}{hint}") from error
    if not record.cells["family"]:
        raise ValueError("family is empty")
    row = Row(family=record.cells["family"], source=f"line {record.line}", **values)
    if fault := row.fault() or plausible.fault(row):
        raise ValueError(fault)
    return row


def to_csv(rows: Sequence[Row]) -> str:
    """The text that `read_csv` reads back to the same values."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for row in rows:
        writer.writerow([row.family, *(_shortest(getattr(row, name)) for name in NUMBERS)])
    return out.getvalue()


def _shortest(value: float) -> str:
    whole = float(value).is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else repr(float(value))
