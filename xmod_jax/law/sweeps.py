"""Rows of the scaling law from run and sweep directories."""

from __future__ import annotations

import collections
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from xmod_jax import records
from xmod_jax.config import RunConfig
from xmod_jax.errors import UserError
from xmod_jax.identity import seedless_hash
from xmod_jax.law.observations import Row, dense_places, refuse

# What the law describes; MoD, MoE and the controls have no K and A in its sense.
_DESCRIBED = ("dense", "xmod")


class Loss(enum.StrEnum):
    """Which of a run's validation losses is fitted.

    Calibrated (causal) is the default: at mini scale the paper's 0.5 threshold is still
    uncalibrated after a few hundred steps and adds noise that is not the architecture's. Threshold
    is the paper's, causal at 0.5. Top-k is not causal. A dense run has one loss.
    """

    CALIBRATED = "calibrated"
    THRESHOLD = "threshold"
    TOPK = "topk"


@dataclasses.dataclass(frozen=True)
class Collected:
    """Rows of the finished runs, and notes on the runs left out or merged, a line each."""

    rows: list[Row]
    notes: list[str]


def collect(paths: Iterable[pathlib.Path], loss: Loss = Loss.CALIBRATED) -> Collected:
    """Reads the finished dense and X-MoD runs of run and sweep directories.

    The same training met in several sweeps counts once; trainings that differ in the seed alone
    become one row with their mean loss.

    Raises:
      UserError: no such directory, no finished run, runs whose losses cannot be compared, or a file
        of a run that cannot be read.
    """
    runs = records.find_runs(paths)
    finished = [run for run in runs if run.final is not None]
    fresh = [run for run in finished if run.config.start is None]
    used = [run for run in fresh if run.config.architecture in _DESCRIBED]
    notes = []
    if len(fresh) < len(finished):
        # Their FLOPs do not count what their weights had cost before.
        notes.append(
            f"left out {len(finished) - len(fresh)} runs that start from another's weights"
        )
    if len(finished) < len(runs):
        notes.append(f"left out {len(runs) - len(finished)} runs that are not finished")
    if others := sorted({run.config.architecture for run in fresh} - set(_DESCRIBED)):
        notes.append(
            f"left out {len(fresh) - len(used)} runs that the law does not describe "
            f"({', '.join(others)})"
        )
    if not used:
        where = ", ".join(map(str, paths))
        raise UserError(f"{where}: no finished dense or X-MoD run: let the sweep finish first")
    _require_comparable(used)
    distinct = {run.hash: run for run in reversed(used)}
    if len(distinct) < len(used):
        notes.append(f"{len(used) - len(distinct)} runs stand in several sweeps and count once")
    replicates: dict[str, list[records.RunRecord]] = collections.defaultdict(list)
    for run in reversed(distinct.values()):
        replicates[seedless_hash(run.config)].append(run)
    rows = [_row(group, loss) for group in replicates.values()]
    refuse(
        "dense runs at one compute that are no seeds of one training (another recipe?), so that "
        "neither is the reference; fit each recipe on its own: ",
        [" = ".join(row.source for row in same) for same in dense_places(rows) if len(same) > 1],
    )
    if len(rows) < len(distinct):
        notes.append(f"{len(distinct)} runs make {len(rows)} rows: the mean over seeds")
    return Collected(rows, notes)


def _require_comparable(runs: Sequence[records.RunRecord]) -> None:
    """Refuses runs whose held-out losses are of different texts, or of different scales."""
    keys: dict[str, Callable[[RunConfig], str]] = {
        "scales": lambda config: config.scale,
        "data": lambda config: config.data.content,
    }
    for what, key in keys.items():
        first: dict[str, records.RunRecord] = {}
        for run in runs:
            first.setdefault(key(run.config), run)
        if len(first) > 1:
            which = ", ".join(f"{value} in {run.directory}" for value, run in first.items())
            raise UserError(
                f"the runs mix {what} ({which}), so their losses cannot be compared: fit each on "
                "its own"
            )


def _row(group: Sequence[records.RunRecord], loss: Loss) -> Row:
    """One row of runs that differ in their seed alone."""
    run, finals = group[0], [run.final for run in group if run.final is not None]
    hierarchy = run.config.model.hierarchy
    return Row(
        family=run.config.family,
        L=run.config.train.context_length,
        n_act=float(run.accounting["n_act"]),
        n_total=float(run.accounting["total_params"]),
        K=hierarchy.sparsity,
        A=float(hierarchy.anchor_stride) or 1.0,
        flops=float(finals[0]["flops"]),
        tokens=float(finals[0]["tokens"]),
        loss=float(np.mean([final[f"loss_{loss}"] for final in finals])),
        source=str(run.directory) if len(group) == 1 else f"{run.directory} (mean of seeds)",
    )
