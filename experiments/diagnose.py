"""Measures what the routers of trained models do, from their newest checkpoints.

    python -m experiments.diagnose --workdir=DIR[,DIR...]

Takes run and sweep directories. Each run with sparse layers gets a diagnostics.json: coverage,
overlap of consecutive layers and the distribution of update counts between dense layers under the
calibrated and the 0.5 threshold, and the agreement of top-k with the 0.5 threshold. Prints a table
beside the references of independent selection, and draws update_counts.png and .svg in the first
work directory.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from experiments import cli, diagnostics_figure, figure_files, report_diagnostics, trained
from xmod_jax import records
from xmod_jax.diagnostics import Diagnostics
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord

FIGURE = "update_counts"

_WORKDIR = flags.DEFINE_list("workdir", [], "run or sweep directories, comma-separated")
_SEQUENCES = flags.DEFINE_integer(
    "sequences", None, "held-out sequences (default: as many as the run evaluates)", lower_bound=1
)
_DATA = flags.DEFINE_string(
    "data", None, "where the runs' data lie now, if they moved (default: where they were)"
)


def main() -> None:
    """Diagnoses every run that has a checkpoint; writes, prints, draws."""
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: give run or sweep directories, comma-separated")
    runs = _with_checkpoint(records.find_runs(_WORKDIR.value))
    folder = pathlib.Path(_WORKDIR.value[0])
    for directory in (folder, *(run.directory for run in runs)):
        if not os.access(directory, os.W_OK):  # found after the work, it would be lost
            raise UserError(f"{directory}: cannot be written to: diagnose keeps its results there")
    found: dict[str, Diagnostics] = {}
    # A name may stand in several directories.
    repeated = len({run.config.name for run in runs}) < len(runs)
    for place, run in enumerate(runs, 1):
        label = str(run.directory) if repeated else run.config.name
        title = f"[{place}/{len(runs)}] {label}"
        found[label], step = report_diagnostics.measure(run, _SEQUENCES.value, title, _DATA.value)
        report_diagnostics.write(run, found[label], step)
    print(report_diagnostics.table(found))
    print(f"figure: {draw(found, folder)}.png and .svg")


def _with_checkpoint(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs that can be diagnosed; tells of the others.

    Raises:
      UserError: there is none.
    """
    able = []
    for run in runs:
        if not run.config.model.hierarchy.groups:
            print(f"left out {run.directory}: it has no sparse layer", file=sys.stderr)
        elif not trained.has_checkpoint(run):
            print(f"left out {run.directory}: it has no checkpoint yet", file=sys.stderr)
        else:
            able.append(run)
    if not able:
        raise UserError(
            f"{', '.join(_WORKDIR.value)}: no run with sparse layers and a checkpoint: train one "
            "first"
        )
    return able


def draw(models: Mapping[str, Diagnostics], folder: pathlib.Path) -> pathlib.Path:
    """Draws the update counts as png and svg in `folder`; returns their path without ending."""
    drawn = diagnostics_figure.figure(models)
    return figure_files.save(drawn, folder, FIGURE).with_suffix("")


if __name__ == "__main__":
    cli.run(main)
