"""What an experiment consists of, run by run: the rows of `describe` and of a sweep's plan."""

from __future__ import annotations

import csv
import io

from experiments import tables
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
    # Other programs read the columns by place: a new one stands last.
    "exposure",
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
        "exposure": accounting.token_exposure(model, length),
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
        tables.flops(accounting.flops_per_token(model, length)),
        f"{accounting.phi_ratio(model, length):.2f}",
        f"{accounting.token_exposure(model, length):.2f}",
        tables.short(train.tokens),
        str(train.steps),
    )


def _plain(value: float) -> int | float:
    return int(value) if value.is_integer() else value
