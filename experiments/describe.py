"""Prints what an experiment consists of: layers, parameters, FLOPs, tokens and steps of each run.

    python -m experiments.describe --experiment=main_556m --scale=paper --format=csv

FLOPs are the paper's count (forward, full attention); ``train_flops`` is phi times the tokens of
whole steps.
"""

from __future__ import annotations

import csv
import io
import sys

from absl import flags

from experiments import cli, selection, tables
from experiments.registry import Experiment
from xmod_jax import accounting
from xmod_jax.config import RunConfig

HEADER = (
    "experiment",
    "run",
    "architecture",
    "n_act",
    "K",
    "A",
    "L",
    "layers",
    "total_params",
    "active_params",
    "flops_per_token",
    "phi_ratio",
    "train_flops",
    "tokens",
    "steps",
)
TABLE_HEADER = (
    "run",
    "L",
    "layers",
    "N",
    "N_act",
    "N/N_act",
    "FLOPs/token",
    "phi ratio",
    "exposure",
    "tokens",
    "steps",
)

_FORMAT = flags.DEFINE_enum("format", "table", ["table", "csv"], "how to print")
flags.adopt_module_key_flags(selection)


def row(run: RunConfig) -> dict[str, str | int | float]:
    """One run's row of the CSV, keyed by `HEADER`; plain numbers."""
    model, train = run.model, run.train
    length = train.context_length
    return {
        "experiment": run.experiment,
        "run": run.name,
        "architecture": run.architecture,
        "n_act": accounting.n_act(model),
        "K": model.hierarchy.sparsity,
        "A": _plain(float(model.hierarchy.anchor_stride)),
        "L": length,
        "layers": model.hierarchy.depth,
        "total_params": accounting.total_parameters(model),
        "active_params": accounting.active_parameters(model),
        "flops_per_token": _plain(accounting.flops_per_token(model, length)),
        "phi_ratio": accounting.phi_ratio(model, length),
        "train_flops": accounting.training_flops(model, length, train.tokens),
        "tokens": train.tokens,
        "steps": train.steps,
    }


def to_csv(experiment: Experiment) -> str:
    """The rows of every run below `HEADER`."""
    text = io.StringIO()
    writer = csv.DictWriter(text, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(run) for run in experiment.runs)
    return text.getvalue()


def table_row(run: RunConfig) -> tuple[str, ...]:
    """One run's cells of the table, under `TABLE_HEADER`."""
    model, train = run.model, run.train
    length = train.context_length
    total, active = accounting.total_parameters(model), accounting.n_act(model)
    return (
        run.name,
        str(length),
        str(model.hierarchy.depth),
        tables.short(total),
        tables.short(active),
        f"{total / active:.2f}",
        f"{accounting.flops_per_token(model, length):.2e}",
        f"{accounting.phi_ratio(model, length):.2f}",
        f"{accounting.token_exposure(model, length):.2f}",
        tables.short(train.tokens),
        str(train.steps),
    )


def _plain(value: float) -> int | float:
    return int(value) if value.is_integer() else value


def main() -> int:
    """Prints the table or the CSV."""
    experiment = selection.selected(default_scale="paper")
    if _FORMAT.value == "csv":
        sys.stdout.write(to_csv(experiment))
    else:
        print(tables.text_table(TABLE_HEADER, [table_row(run) for run in experiment.runs]))
    for line in experiment.skipped:
        print(f"skipped {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)
