"""Fits the scaling law to sweeps or to a CSV: tables, law.json and observations.csv.

    python -m experiments.fit --workdir=runs/k_sweep_2k,runs/scale_sweep_32k,runs/anchor_sweep_32k
    python -m experiments.fit --observations=mine.csv --output=results

The CSV has the columns family,L,n_act,n_total,K,A,flops,tokens,loss; n_act and n_total are counts
of parameters (embedding and head included), L is in tokens. Rows with K = 1 are the dense reference
of their family and L; several with different flops make its curve.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from absl import flags

from experiments import cli
from xmod_jax.errors import UserError
from xmod_jax.law import fit as fitting
from xmod_jax.law import identifiability, sweeps
from xmod_jax.law import observations as obs
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import COEFFICIENTS, Law, LawFile, write_atomically

_WORKDIR = flags.DEFINE_list("workdir", [], "Run or sweep directories, comma-separated.")
_OBSERVATIONS = flags.DEFINE_string("observations", None, "CSV of observations, instead.")
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
    """Fits, prints the tables, writes the files."""
    rows = _read_rows()
    observations = obs.observe(rows, _EXTRAPOLATE.value, _TOLERANCE.value)
    table = obs.Table.of(observations)
    result = fitting.fit(table, Search(seed=_SEED.value))
    warnings = list(result.warnings)
    if marked := [o.row.source for o in observations if o.extrapolated]:
        warnings.append(f"dense reference extrapolated for {len(marked)} rows: {', '.join(marked)}")
    print(_coefficient_table(result.law, len(table), result.quality))
    print(_residual_table(result.law, table))
    if not result.seeds_agree:
        print("The fit is NOT settled: independent starts of the search disagree.")
    for warning in warnings:
        print(f"warning: {warning}")
    _write(rows, table, result, warnings)


def _read_rows() -> list[obs.Row]:
    if bool(_WORKDIR.value) == bool(_OBSERVATIONS.value):
        raise UserError("give either --workdir=DIR,... or --observations=FILE.csv")
    if _OBSERVATIONS.value:
        return obs.read_csv(pathlib.Path(_OBSERVATIONS.value))
    collected = sweeps.collect([pathlib.Path(path) for path in _WORKDIR.value], _LOSS.value)
    for note in collected.notes:
        print(f"note: {note}")
    return collected.rows


def _write(
    rows: Sequence[obs.Row], table: obs.Table, result: fitting.Fit, warnings: Sequence[str]
) -> None:
    source = pathlib.Path(_OBSERVATIONS.value or _WORKDIR.value[0])
    beside = source.parent if _OBSERVATIONS.value else source
    folder = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else beside
    quality = result.quality
    law_file = LawFile(
        law=result.law,
        r2_delta=quality.r2_delta,
        rmse=quality.rmse,
        mae=quality.mae,
        n_observations=len(table),
        ranges=fitting.ranges(table),
        seeds_agree=result.seeds_agree,
        warnings=tuple(warnings),
    )
    written = [folder / "law.json"]
    law_file.save(written[0])
    table_path = folder / "observations.csv"
    # A user's own file of that name is the input and stays as they wrote it.
    if not (table_path.exists() and source.is_file() and table_path.samefile(source)):
        write_atomically(table_path, obs.to_csv(rows))
        written.append(table_path)
    print(f"wrote {' and '.join(map(str, written))}")


def _coefficient_table(law: Law, count: int, quality: fitting.Quality) -> str:
    paper = Law.paper()
    lines = ["coefficient        fitted         paper"]
    lines += [f"{n:<11}{getattr(law, n):>14.6g}{getattr(paper, n):>14.6g}" for n in COEFFICIENTS]
    lines.append(
        f"{count} observations: R2 on Delta {quality.r2_delta:.4f}, RMSE {quality.rmse:.5f} nats, "
        f"MAE {quality.mae:.5f} nats\n"
    )
    return "\n".join(lines)


def _residual_table(law: Law, table: obs.Table) -> str:
    """Residuals (observed minus fitted Delta, in nats) of every group of equal L, N_act, A, K."""
    residual = table.delta - law.delta(table.n_act, table.n_total, table.L, table.K, table.A)
    lines = ["group               rows      mean      RMSE    largest   mean Delta"]
    for name in ("L", "n_act", "A", "K"):
        tolerance = identifiability.N_ACT_TOLERANCE if name == "n_act" else 0.0
        values = getattr(table, name)
        for value in identifiability.distinct(values, tolerance):
            mask = (values >= value) & (values <= value * (1 + tolerance))
            part = residual[mask]
            label = f"{name}={value:.6g}"
            lines.append(
                f"{label:<18}{len(part):>6}{part.mean():>10.4f}{np.sqrt(np.mean(part**2)):>10.4f}"
                f"{np.abs(part).max():>11.4f}{table.delta[mask].mean():>13.4f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
