"""The scaling law's part of a report: quality of the fit, predicted against observed."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from experiments import law_figures, report_figures, report_page
from experiments.report_page import Page
from xmod_jax.errors import UserError
from xmod_jax.law import observation_files, sweeps
from xmod_jax.law import observations as obs
from xmod_jax.law.terms import COEFFICIENTS, LawFile

FILE = "law.json"
_CAPTIONS = {
    "parity": "Predicted against observed loss difference to dense at equal FLOPs.",
    "delta_by_context": "Loss difference to dense against K for each L: points and the law.",
    "delta_by_routed_tokens": "The same against L/K.",
    "delta_by_size": "Loss difference to dense against K for each N_act: points and the law.",
    "delta_by_stride": "Loss difference to dense against K for each A: points and the law.",
}


def find(folders: Sequence[pathlib.Path], given: str | None) -> list[pathlib.Path]:
    """The law files to show: the given one, or those in the folders."""
    if given is not None:
        return [pathlib.Path(given)]
    return [folder / FILE for folder in folders if (folder / FILE).is_file()]


def section(page: Page, path: pathlib.Path, runs: Sequence[pathlib.Path]) -> None:
    """Adds the law of a file, beside the observations of the given run directories.

    The observations are the file's own observations.csv where it stands beside it.

    Raises:
      UserError: the file cannot be read.
    """
    law = LawFile.load(path)
    beside = path.parent / "observations.csv"
    note, drawn = "", ""
    try:
        own = beside.is_file()
        rows = observation_files.read_csv(beside) if own else sweeps.collect(runs).rows
        table = obs.Table.of(obs.observe(rows, extrapolate=True))
        drawn = _draw(page, law, table)
    except UserError as error:
        note = report_page.paragraph(f"No figure of the law: {error}", "soft")
    page.add(
        f"Scaling law: {path}",
        report_page.facts(_quality(law)),
        report_page.table(
            ("coefficient", *COEFFICIENTS),
            [("value", *(f"{getattr(law.law, name):.5g}" for name in COEFFICIENTS))],
        ),
        report_page.listing(law.warnings, "bad") if law.warnings else "",
        drawn,
        note,
    )


def _draw(page: Page, law: LawFile, table: obs.Table) -> str:
    predicted = law.law.delta(table.n_act, table.n_total, table.L, table.K, table.A)
    points = law_figures.Points("observations", table.delta, predicted)
    drawn = law_figures.figures(table, law.law, [points], law.bootstrap)
    for figure in drawn.values():
        figure.set_size_inches(*report_figures.SIZE)
    return report_page.figures(
        *(page.figure(drawn[name], caption) for name, caption in _CAPTIONS.items() if name in drawn)
    )


def _quality(law: LawFile) -> list[tuple[str, str]]:
    """What the file says of itself, where it says it."""
    shown = lambda value: "not recorded" if value is None else f"{value:.4g}"
    ranges = [f"{name} {low:.4g} to {high:.4g}" for name, (low, high) in law.ranges.items()]
    return [
        ("observations", str(law.n_observations)),
        ("R² of the difference", shown(law.r2_delta)),
        ("RMSE, nats", shown(law.rmse)),
        ("MAE, nats", shown(law.mae)),
        ("fitted range", "; ".join(ranges) or "not recorded"),
        ("independent starts agree", "yes" if law.seeds_agree else "no"),
    ]
