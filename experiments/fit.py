"""Fits the scaling law to sweeps or to a CSV: tables, law.json and observations.csv.

    python -m experiments.fit --workdir=runs/k_sweep_2k,runs/scale_sweep_32k,runs/anchor_sweep_32k
    python -m experiments.fit --observations=mine.csv --output=results

The CSV has the columns family,L,n_act,n_total,K,A,flops,tokens,loss; n_act and n_total are counts
of parameters (embedding and head included), L is in tokens. Rows with K = 1 are the dense reference
of their family and L; several with different flops make its curve.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments import cli, law_tables
from xmod_jax import records
from xmod_jax.errors import UserError
from xmod_jax.law import fit as fitting
from xmod_jax.law import observations as obs
from xmod_jax.law import sweeps, validate
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import LawFile

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
_OUTPUT = flags.DEFINE_string(
    "output", None, "Folder for law.json and observations.csv; default: beside the input."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the search.", lower_bound=0)
_STARTS = flags.DEFINE_integer(
    "starts", 3, "Independent searches, which must agree.", lower_bound=1
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
    rows = _read(_WORKDIR.value or [str(_OBSERVATIONS.value)])
    observations = _observe(rows)
    table = obs.Table.of(observations)
    search = Search(seed=_SEED.value, starts=_STARTS.value)
    result = fitting.fit(table, search)
    folder = _output_folder()
    marked = [o.row.source for o in observations if o.extrapolated]
    if marked:
        told = f"dense reference extrapolated for {len(marked)} rows: {', '.join(marked)}"
        result = dataclasses.replace(result, warnings=(*result.warnings, told))
    _tell(result, table)
    reduced, validated = _validate(table, search)
    if _BEYOND.value:
        validated["beyond"] = _predict_beyond(result, rows)
    candidate = _try_candidate(table, search, reduced) if _CANDIDATE.value else {}
    _write(folder, rows, table, result, validated, candidate)


def _output_folder() -> pathlib.Path:
    """The folder to write to; made, and found writable, before the long part begins."""
    beside = _OBSERVATIONS.value or _WORKDIR.value[0]
    default = pathlib.Path(beside).parent if _OBSERVATIONS.value else pathlib.Path(beside)
    folder = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else default
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: cannot be written to: choose another folder with --output=DIR")
    return folder


def _read(paths: Sequence[str]) -> list[obs.Row]:
    if _OBSERVATIONS.value:
        return [row for path in paths for row in obs.read_csv(pathlib.Path(path))]
    collected = sweeps.collect([pathlib.Path(path) for path in paths], _LOSS.value)
    for note in collected.notes:
        print(f"note: {note}")
    return collected.rows


def _observe(rows: Sequence[obs.Row]) -> list[obs.Observation]:
    return obs.observe(rows, _EXTRAPOLATE.value, _TOLERANCE.value)


def _tell(result: fitting.Fit, table: obs.Table) -> None:
    print(law_tables.coefficients(result, len(table)))
    print(law_tables.residuals(result, table))
    if not result.seeds_agree:
        print("The fit is NOT settled: independent starts of the search disagree.")
    for warning in result.warnings:
        print(f"warning: {warning}")


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


def _predict_beyond(result: fitting.Fit, rows: Sequence[obs.Row]) -> dict[str, Any]:
    """Predicts the rows of --beyond; dense rows of the fitted input serve as well."""
    new = _read(_BEYOND.value)
    dense = [row for row in new if row.dense]
    known = {(row.family, row.L) for row in dense}
    dense += [row for row in rows if row.dense and (row.family, row.L) not in known]
    table = obs.Table.of(_observe([row for row in new if not row.dense] + dense))
    predicted = result.predict(table)
    print(law_tables.beyond(table, predicted))
    quality = fitting.Quality.of(table.delta, predicted)
    return {"rows": len(table), "rmse": quality.rmse, "mae": quality.mae}


def _try_candidate(
    table: obs.Table, search: Search, reduced: Sequence[validate.Prediction]
) -> dict[str, Any]:
    print("Candidate with the exposure term P_D:")
    result = fitting.fit(table, search, candidate=True)
    _tell(result, table)
    predictions = _withhold(table, search, candidate=True)
    print(law_tables.validation(predictions))
    dropped = validate.dropping_supported(reduced, predictions)
    verdict = "is supported" if dropped else "is NOT supported"
    print(f"Dropping P_D {verdict} by the groups withheld.")
    return {
        "law": dataclasses.asdict(result.law),
        "exposure": dataclasses.asdict(result.exposure) if result.exposure else {},
        "rmse": result.quality.rmse,
        "validated": validate.record(predictions),
        "dropping_supported": dropped,
    }


def _write(
    folder: pathlib.Path,
    rows: Sequence[obs.Row],
    table: obs.Table,
    result: fitting.Fit,
    validated: dict[str, Any],
    candidate: dict[str, Any],
) -> None:
    law_file = LawFile(
        law=result.law,
        **dataclasses.asdict(result.quality),
        n_observations=len(table),
        ranges=fitting.ranges(table),
        validated=validated,
        seeds_agree=result.seeds_agree,
        warnings=result.warnings,
        candidate=candidate,
    )
    written = [folder / "law.json"]
    law_file.save(written[0])
    table_path = folder / "observations.csv"
    # A user's own file of that name is the input and stays as they wrote it.
    own = _OBSERVATIONS.value and table_path.exists() and table_path.samefile(_OBSERVATIONS.value)
    if not own:
        records.write_atomically(table_path, obs.to_csv(rows).encode())
        written.append(table_path)
    print(f"wrote {' and '.join(map(str, written))}")


if __name__ == "__main__":
    cli.run(main)
