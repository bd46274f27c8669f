"""Fits the scaling law to sweeps or to a CSV: tables, law.json, figures, predictions.

    python -m experiments.fit --workdir=runs/k_sweep_2k,runs/scale_sweep_32k,runs/anchor_sweep_32k
    python -m experiments.fit --observations=mine.csv --output=results --bootstrap=200

It leaves law.json (with the bootstrap draws that `experiments.design` makes intervals of),
observations.csv, predictions.csv (every row as fitted, as predicted with its group withheld, and
rows beyond the range) and the figures as PNG and SVG.

The CSV has the columns family,L,n_act,n_total,K,A,flops,tokens,loss; n_act and n_total are counts
of parameters (embedding and head included), L and tokens are in tokens, flops in FLOPs, loss in
nats a token. Rows with K = 1 are the dense reference of their family and L, whatever their A;
several with different flops make its curve, several at one compute are averaged. Semicolons, tabs
and decimal commas are read too. Rows that look like other units or stand out from the law are
named, and nothing is left out.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from experiments import cli, law_figures, law_tables
from xmod_jax import storage
from xmod_jax.errors import UserError
from xmod_jax.law import (
    bootstrap,
    identifiability,
    observation_files,
    outliers,
    plausible,
    sweeps,
    validate,
)
from xmod_jax.law import fit as fitting
from xmod_jax.law import observations as obs
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import LEVEL, Draws, LawFile

_WORKDIR = flags.DEFINE_list("workdir", [], "Run or sweep directories, comma-separated.")
_OBSERVATIONS = flags.DEFINE_string("observations", None, "CSV of observations, instead.")
_BEYOND = flags.DEFINE_list(
    "beyond",
    [],
    "Run or sweep directories, or one CSV, of the same kind: rows outside the fitted range, never "
    "fitted, predicted by the law as fitted. Their dense reference may stand in either input.",
)
_LOSS = flags.DEFINE_enum_class(
    "loss",
    sweeps.Loss.CALIBRATED,
    sweeps.Loss,
    "Which loss of a run is fitted: calibrated or threshold (0.5, the paper's), both causal; or "
    "topk, which is not. A CSV has one loss.",
)
_OUTPUT = flags.DEFINE_string("output", None, "Folder for the files; default: beside the input.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed of search and bootstrap.", lower_bound=0)
_STARTS = flags.DEFINE_integer(
    "starts", 3, "Independent searches, which must agree.", lower_bound=1
)
_BOOTSTRAP = flags.DEFINE_integer(
    "bootstrap", 200, "Draws of the cluster bootstrap over sweeps; 0: no intervals.", lower_bound=0
)
_LEVEL = flags.DEFINE_float(
    "level", LEVEL, "Coverage of the intervals.", lower_bound=0.01, upper_bound=0.999
)
_VALIDATE = flags.DEFINE_bool(
    "validate", True, "Withhold every L, N_act and A in turn, refit and predict it."
)
_CANDIDATE = flags.DEFINE_bool(
    "candidate", False, "Also fit the law with the exposure term P_D and say whether it earns it."
)
_EXTRAPOLATE = flags.DEFINE_bool(
    "extrapolate_dense", False, "Continue dense curves beyond their FLOPs, and mark such rows."
)
_TOLERANCE = flags.DEFINE_float(
    "flops_tolerance",
    obs.FLOPS_TOLERANCE,
    "Share of FLOPs by which a row may lie outside its dense curve (rounding to whole steps).",
    lower_bound=0.0,
)


def main() -> None:
    """Fits, validates, prints the tables, writes the files."""
    if bool(_WORKDIR.value) == bool(_OBSERVATIONS.value):
        raise UserError("give either --workdir=DIR,... or --observations=FILE.csv")
    if not math.isfinite(_TOLERANCE.value):
        raise UserError(f"--flops_tolerance={_TOLERANCE.value} is not a number")
    rows, unusual = _read(_WORKDIR.value or [str(_OBSERVATIONS.value)])
    observations = _observe(rows)
    table = obs.Table.of(observations)
    # Before the long part: they may be faulty.
    identifiability.require_determined(table, _CANDIDATE.value)
    beyond, unusual_beyond = _table_beyond(rows) if _BEYOND.value else (None, [])
    search = Search(seed=_SEED.value, starts=_STARTS.value)
    result = _fit(observations, search, [*unusual, *unusual_beyond])
    folder = _output_folder()
    draws = _draw(table, result)
    predicted = [law_tables.Predicted("fitted", table, result.predict(table))]
    reduced, validated = _validate(table, search)
    predicted += law_tables.withheld(table, reduced)
    if beyond is not None:
        predicted.append(_predict_beyond(result, beyond))
        validated["beyond"] = _quality_record(predicted[-1])
    candidate, more = _try_candidate(table, search, reduced) if _CANDIDATE.value else ({}, [])
    law_file = LawFile(
        law=result.law,
        **dataclasses.asdict(result.quality),
        n_observations=len(table),
        ranges=fitting.ranges(table),
        validated=validated,
        seeds_agree=result.seeds_agree,
        warnings=result.warnings,
        candidate=candidate,
        bootstrap=draws,
    )
    _write(folder, rows, law_file, predicted)
    if warnings := law_tables.repeated((*result.warnings, *more)):
        print(warnings)


def _fit(
    observations: Sequence[obs.Observation], search: Search, unusual: Sequence[str]
) -> fitting.Fit:
    """The law, told with its warnings: what is unusual, and which rows stand out."""
    table = obs.Table.of(observations)
    result = fitting.fit(table, search)
    odd = outliers.find(observations, result, search)
    told = [*unusual, *plausible.differences(observations), *_extrapolated(observations)]
    told += outliers.sentences(odd, result) if odd else []
    result = dataclasses.replace(result, warnings=(*result.warnings, *told))
    _tell(result, table)
    if odd is not None and odd.without is not None:
        print("Without the rows that stand out:")
        print(law_tables.coefficients(odd.without, len(table) - len(odd.rows)))
    return result


def _output_folder() -> pathlib.Path:
    if _OUTPUT.value:
        return cli.output_folder(_OUTPUT.value)
    if _OBSERVATIONS.value:
        return cli.output_folder(pathlib.Path(_OBSERVATIONS.value).parent)
    return cli.output_folder(_WORKDIR.value[0])


def _read(paths: Sequence[str], beyond: bool = False) -> tuple[list[obs.Row], list[str]]:
    """The rows of directories or of a CSV, and what is unusual about them."""
    if not _OBSERVATIONS.value:
        collected = sweeps.collect([pathlib.Path(path) for path in paths], _LOSS.value)
        for note in collected.notes:
            print(f"note: {note}")
        return collected.rows, []
    rows = [row for path in paths for row in _read_csv(path, beyond)]
    return rows, plausible.warnings(rows)


def _read_csv(path: str, beyond: bool) -> list[obs.Row]:
    rows = observation_files.read_csv(pathlib.Path(path))
    if not beyond:
        return rows
    # Lines of two files are told apart.
    return [dataclasses.replace(row, source=f"{path}, {row.source}") for row in rows]


def _observe(rows: Sequence[obs.Row]) -> list[obs.Observation]:
    observations = obs.observe(rows, _EXTRAPOLATE.value, _TOLERANCE.value)
    repeats = [place for place in obs.dense_places(rows) if len(place) > 1]
    if repeats:
        names = "; ".join(" = ".join(row.source for row in place) for place in repeats[:8])
        more = f"; and {len(repeats) - 8} more" if len(repeats) > 8 else ""
        print(f"note: dense rows at one compute count as their mean: {names}{more}")
    return observations


def _extrapolated(observations: Sequence[obs.Observation], shown: int = 8) -> list[str]:
    """Tells of dense references beyond their range."""
    marked = [o.row.source for o in observations if o.extrapolated]
    more = f" and {len(marked) - shown} more" if len(marked) > shown else ""
    told = (
        f"dense reference extrapolated for {len(marked)} rows (its loss held constant where the "
        f"curve has one compute): {', '.join(marked[:shown])}{more}"
    )
    return [told] if marked else []


def _tell(result: fitting.Fit, table: obs.Table) -> None:
    print(law_tables.coefficients(result, len(table)))
    print(law_tables.residuals(result, table))
    if not result.seeds_agree:
        print("The fit is NOT settled: independent starts of the search disagree.")
    for warning in result.warnings:
        print(f"warning: {warning}")


def _draw(table: obs.Table, result: fitting.Fit) -> Draws | None:
    if not _BOOTSTRAP.value:
        return None

    def progress(numbers: Iterable[int]) -> tqdm[int]:
        return tqdm(numbers, desc="bootstrap", leave=False, disable=None)

    draws = bootstrap.draw(
        table, result, _BOOTSTRAP.value, _SEED.value, _LEVEL.value, progress=progress
    )
    print(law_tables.intervals(result, draws))
    return draws


def _withhold(table: obs.Table, search: Search, candidate: bool) -> list[validate.Prediction]:
    def progress(groups: Sequence[validate.Group]) -> tqdm[validate.Group]:
        return tqdm(groups, desc="withholding groups", leave=False, disable=None)

    return validate.withhold(table, search, candidate, progress)


def _validate(table: obs.Table, search: Search) -> tuple[list[validate.Prediction], dict[str, Any]]:
    if not (_VALIDATE.value or _CANDIDATE.value):
        return [], {}
    predictions = _withhold(table, search, candidate=False)
    print(law_tables.validation(predictions))
    return predictions, validate.record(predictions)


def _table_beyond(rows: Sequence[obs.Row]) -> tuple[obs.Table, list[str]]:
    """The rows of --beyond, dense ones of the input serving too, and what is unusual there."""
    new, unusual = _read(_BEYOND.value, beyond=True)
    dense = [row for row in new if row.dense]
    known = {(row.family, row.L) for row in dense}
    dense += [row for row in rows if row.dense and (row.family, row.L) not in known]
    observations = _observe([row for row in new if not row.dense] + dense)
    return obs.Table.of(observations), unusual + _extrapolated(observations)


def _predict_beyond(result: fitting.Fit, table: obs.Table) -> law_tables.Predicted:
    predicted = result.predict(table)
    print(law_tables.beyond(table, predicted))
    return law_tables.Predicted("beyond", table, predicted)


def _quality_record(predicted: law_tables.Predicted) -> dict[str, Any]:
    quality = fitting.Quality.of(predicted.table.delta, predicted.delta)
    return {"rows": len(predicted.table), "rmse": quality.rmse, "mae": quality.mae}


def _try_candidate(
    table: obs.Table, search: Search, reduced: Sequence[validate.Prediction]
) -> tuple[dict[str, Any], list[str]]:
    """What law.json keeps of the candidate, and its fit's warnings."""
    print("Candidate with the exposure term P_D:")
    result = fitting.fit(table, search, candidate=True)
    _tell(result, table)
    predictions = _withhold(table, search, candidate=True)
    print(law_tables.validation(predictions))
    compared = validate.compare(reduced, predictions)
    print(law_tables.dropping(compared))
    record = {
        "law": dataclasses.asdict(result.law),
        "exposure": dataclasses.asdict(result.exposure) if result.exposure else {},
        "rmse": result.quality.rmse,
        "validated": validate.record(predictions),
        "dropping_supported": compared.supported,
        "compared": {"groups": compared.groups, "rows": compared.rows},
    }
    return record, [f"candidate with P_D: {warning}" for warning in result.warnings]


def _write(
    folder: pathlib.Path,
    rows: Sequence[obs.Row],
    law_file: LawFile,
    predicted: Sequence[law_tables.Predicted],
) -> None:
    written = [folder / "law.json", folder / "predictions.csv"]
    law_file.save(written[0])
    text = law_tables.predictions_csv(predicted, law_file.bootstrap)
    storage.write_atomically(written[1], text.encode())
    table_path = folder / "observations.csv"
    # A user's own file of that name is the input and stays as they wrote it.
    own = _OBSERVATIONS.value and table_path.exists() and table_path.samefile(_OBSERVATIONS.value)
    if not own:
        storage.write_atomically(table_path, observation_files.to_csv(rows).encode())
        written.append(table_path)
    drawn = law_figures.figures(
        predicted[0].table, law_file.law, _points(predicted), law_file.bootstrap
    )
    written += law_figures.write(drawn, folder)
    print(f"wrote {', '.join(map(str, written))} (and each figure as .svg)")


def _points(predicted: Sequence[law_tables.Predicted]) -> list[law_figures.Points]:
    """The groups of the parity plot: one for each kind of prediction."""
    points = []
    for kind in dict.fromkeys(group.kind for group in predicted):
        groups = [group for group in predicted if group.kind == kind]
        observed = np.concatenate([group.table.delta for group in groups])
        points.append(
            law_figures.Points(kind, observed, np.concatenate([group.delta for group in groups]))
        )
    return points


if __name__ == "__main__":
    cli.run(main)
