"""The scaling law's part of a report: what it rests on, its errors, predicted against observed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import law_figures, report_evidence, report_figures, report_page, tables
from experiments.report_evidence import Evidence
from experiments.report_page import Page
from xmod_jax.law.terms import COEFFICIENTS, LawFile

FILE = report_evidence.LAW
_CAPTIONS = {
    "parity": "Predicted against observed loss difference to dense at equal FLOPs.",
    "delta_by_context": "Loss difference to dense against K for each L: points {} and the law.",
    "delta_by_routed_tokens": "Loss difference to dense against L/K: points {} and the law.",
    "delta_by_size": "Loss difference to dense against K for each N_act: points {} and the law.",
    "delta_by_stride": "Loss difference to dense against K for each A: points {} and the law.",
}
_NAMES = {
    "n_act": "N_act",
    "n_total/n_act": "N/N_act",
    "dense_tokens": "tokens of the dense reference",
    "K_strided": "K where A is not 1",
}
_GROUPS = ("withheld", "rows", "RMSE, nats", "mean error, nats")
_NOT_RECORDED = "not recorded"


def find(folders: Sequence[pathlib.Path], given: str | None) -> list[pathlib.Path]:
    """The law files to show: the given one, or those in the folders."""
    if given is not None:
        return [pathlib.Path(given)]
    return [folder / FILE for folder in folders if (folder / FILE).is_file()]


def section(page: Page, path: pathlib.Path, runs: Sequence[pathlib.Path]) -> None:
    """Adds the law of a file: its quality, what it was fitted on, its points and those of the runs.

    Raises:
      UserError: the file cannot be read.
    """
    law = LawFile.load(path)
    evidence = report_evidence.gather(law, path, runs)
    held_out = _held_out(law.validated)
    page.add(
        f"Scaling law: {path}",
        report_page.paragraph(evidence.verdict, "" if evidence.agrees else "bad"),
        report_page.facts(_quality(law)),
        _coefficients(law),
        report_page.listing(law.warnings, "bad") if law.warnings else "",
        report_page.heading("Held-out errors"),
        report_page.table(_GROUPS, held_out, "Errors of withheld groups")
        if held_out
        else report_page.paragraph("No group was withheld when this law was fitted.", "soft"),
        _draw(page, law, evidence),
        "".join(report_page.paragraph(note, "soft") for note in evidence.notes),
    )


def _draw(page: Page, law: LawFile, evidence: Evidence) -> str:
    table, size = evidence.table, report_figures.SIZE
    drawn = {}
    if table is not None:
        drawn = law_figures.figures(table, law.law, evidence.points, law.bootstrap, size)
    elif (parity := law_figures.parity(evidence.points, size)) is not None:
        drawn = {"parity": parity}
    which = "shown here" if evidence.new else "fitted"
    if law.bootstrap is not None:
        which += f", band: {law.bootstrap.level:.0%} interval of the law"
    return report_page.figures(
        *(
            page.figure(drawn[name], caption.format(f"({which})"))
            for name, caption in _CAPTIONS.items()
            if name in drawn
        )
    )


def _coefficients(law: LawFile) -> str:
    """The coefficients, with the ends of their intervals where they were drawn."""
    rows = [("value", *(tables.number(getattr(law.law, name)) for name in COEFFICIENTS))]
    if (draws := law.bootstrap) is not None:
        values = draws.coefficients()
        ends = [draws.interval(values[name]) for name in COEFFICIENTS]
        for which, index in (("low", 0), ("high", 1)):
            label = f"{draws.level:.0%} interval, {which}"
            rows.append((label, *(tables.number(float(end[index])) for end in ends)))
    return report_page.table(("coefficient", *COEFFICIENTS), rows, "Coefficients of the law")


def _quality(law: LawFile) -> list[tuple[str, str]]:
    """What the file says of itself, where it says it."""
    ranges = [_range(name, *ends) for name, ends in law.ranges.items()]
    facts = [
        ("observations fitted", str(law.n_observations)),
        ("R² of the difference", _known(law.r2_delta)),
        ("RMSE on them, nats", _known(law.rmse)),
        ("MAE on them, nats", _known(law.mae)),
        ("RMSE on withheld ones, nats", _withheld(law.validated)),
        ("fitted range", "; ".join(ranges) or _NOT_RECORDED),
        ("independent starts agree", "yes" if law.seeds_agree else "no"),
    ]
    if law.bootstrap is None:
        return [*facts, ("intervals", "none were drawn")]
    draws = law.bootstrap
    noise = f"one training lies {tables.number(draws.noise)} nats around the law"
    told = f"{draws.level:.0%}, from {len(draws.laws)} draws over {draws.clusters} sweeps; {noise}"
    return [*facts, ("intervals", told)]


def _withheld(validated: Mapping[str, Any]) -> str:
    errors = {
        _NAMES.get(name, name): found["rmse"]
        for name, found in validated.items()
        if isinstance(found, Mapping) and _is_number(found.get("rmse"))
    }
    return "; ".join(f"{name}: {_error(value)}" for name, value in errors.items()) or _NOT_RECORDED


def _range(name: str, low: float, high: float) -> str:
    write = tables.short if name in ("n_act", "dense_tokens") else tables.number
    return f"{_NAMES.get(name, name)} {write(low)} to {write(high)}"


def _known(value: Any) -> str:
    return tables.number(value) if _is_number(value) else _NOT_RECORDED


def _error(value: Any, sign: str = "") -> str:
    return tables.fixed(value, sign=sign) if _is_number(value) else tables.UNKNOWN


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held_out(validated: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Rows under `_GROUPS`: for every variable its groups and all of them together.

    What a law.json by another hand holds in another form is left out.
    """
    rows: list[tuple[str, ...]] = []
    for variable, found in validated.items():
        if not isinstance(found, Mapping):
            continue
        groups = [group for group in _list(found.get("groups")) if isinstance(group, Mapping)]
        for group in groups:
            label = f"{_NAMES.get(variable, variable)} = {_value(variable, group.get('value'))}"
            if refused := group.get("refused"):
                rows.append((f"{label}, not predicted: {refused}", "-", "-", "-"))
                continue
            error = group.get("mean_error")
            rows.append(
                (label, _known(group.get("rows")), _error(group.get("rmse")), _error(error, "+"))
            )
        name = (
            "beyond the range"
            if variable == "beyond"
            else f"every {_NAMES.get(variable, variable)}"
        )
        counts = [count for group in groups if isinstance(count := group.get("rows"), int)]
        count = found.get("rows", sum(counts))
        rows.append((name, _known(count), _error(found.get("rmse")), "-"))
    return rows


def _list(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _value(variable: str, value: Any) -> str:
    if variable == "n_act" and isinstance(value, int | float):
        return tables.short(value)
    return _known(value)
