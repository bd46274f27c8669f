"""The end of a sweep: a table and a figure of loss against K with the dense reference.

Losses are those of the causal threshold rules: calibrated (main) and 0.5 (the paper's). The top-k
loss stands beside them, labelled, because its routing sees the future.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments import figure_files, planning, tables
from experiments.registry import Experiment
from experiments.runner import Outcome
from xmod_jax.config import RunConfig
from xmod_jax.law.observations import FLOPS_TOLERANCE
from xmod_jax.records import Record

FIGURE = "loss_against_k"
HEADER = (
    "run",
    "K",
    "A",
    "loss",
    "- dense",
    "loss at 0.5",
    "top-k*",
    "coverage",
    "overlap",
    "tokens",
    "FLOPs",
)
NOTE = (
    "loss: calibrated threshold, nats per token; - dense: minus the dense loss at equal FLOPs; "
    "overlap: Jaccard of adjacent sparse layers; * not causal, for reference only"
)
# Record key: legend, line style. The first is the main line.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "loss_calibrated": ("calibrated threshold", {"linewidth": 2.0, "marker": "o"}),
    "loss_threshold": ("threshold 0.5", {"linewidth": 0.9, "linestyle": "--", "marker": "."}),
    "loss_topk": ("top-k (not causal)", {"linewidth": 0.9, "linestyle": ":", "marker": "."}),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run: its configuration, last evaluation, and the dense loss it competes with.

    `dense_loss` is the calibrated loss of the dense run of equal family, context and FLOPs (to a
    step or two); None while that is not finished.
    """

    run: RunConfig
    final: Record
    dense_loss: float | None

    @property
    def delta(self) -> float | None:
        """Loss minus the dense loss; None for a dense run or without a finished reference."""
        if self.dense_loss is None or self.run.architecture == "dense":
            return None
        return self.final["loss_calibrated"] - self.dense_loss


def results(experiment: Experiment, workdir: pathlib.Path) -> list[Result]:
    """The finished runs of an experiment in its work directory, in the experiment's order."""
    started = planning.started(experiment.runs, workdir)
    return compare(
        [
            (run, final)
            for run in experiment.runs
            if run.name in started and (final := started[run.name].final) is not None
        ]
    )


def compare(finished: Sequence[tuple[RunConfig, Record]]) -> list[Result]:
    """Finished runs with their last evaluations, each beside its dense reference."""
    dense = [(run, final) for run, final in finished if run.architecture == "dense"]
    return [Result(run, final, _dense_loss(run, final, dense)) for run, final in finished]


def _dense_loss(
    run: RunConfig, final: Record, dense: Sequence[tuple[RunConfig, Record]]
) -> float | None:
    """Loss of the dense run of equal family, context and data that is closest in FLOPs."""
    key = lambda run: (run.family, run.train.context_length, run.data)
    distance = lambda other: abs(math.log(other["flops"] / final["flops"]))
    peers = [other for peer, other in dense if key(peer) == key(run)]
    nearest = min(peers, key=distance, default=None)
    if nearest is None or distance(nearest) > FLOPS_TOLERANCE:
        return None
    return nearest["loss_calibrated"]


def _cell(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def table(rows: list[Result]) -> str:
    """Text table of finished runs, under `HEADER`, with its note."""
    cells = []
    for result in rows:
        run, final = result.run, result.final
        hierarchy = run.model.hierarchy
        cells.append(
            (
                run.name,
                str(hierarchy.sparsity),
                f"{float(hierarchy.anchor_stride):g}",
                f"{final['loss_calibrated']:.4f}",
                _cell(result.delta, "+.4f"),
                f"{final['loss_threshold']:.4f}",
                f"{final['loss_topk']:.4f}",
                _cell(final.get("coverage"), ".3f"),
                _cell(final.get("jaccard"), ".3f"),
                tables.short(final["tokens"]),
                f"{final['flops']:.3g}",
            )
        )
    return f"{tables.text_table(HEADER, cells)}\n{NOTE}"


def _group(result: Result) -> tuple[str, str, float]:
    run = result.run
    return run.family, run.architecture, float(run.model.hierarchy.anchor_stride)


def _label(group: tuple[str, str, float], families: int) -> str:
    family, architecture, stride = group
    name = {"xmod": "X-MoD", "mod": "MoD"}.get(architecture, architecture)
    label = f"{name}, A = {stride:g}" if architecture == "xmod" else name
    return f"{family}: {label}" if families > 1 else label


def _draw_group(axes: Axes, rows: list[Result], label: str, color: str) -> None:
    sparsities = [result.run.model.hierarchy.sparsity for result in rows]
    for key, (_, style) in LOSSES.items():
        losses = [result.final[key] for result in rows]
        main = key == "loss_calibrated"
        axes.plot(sparsities, losses, color=color, label=label if main else None, **style)


def _draw_dense(axes: Axes, rows: list[Result], colors: dict[str, str]) -> None:
    """Level lines; where there are several families each has the colour of its first curve."""
    families = {result.run.family for result in rows}
    for result in rows:
        family = result.run.family
        several = len(families) > 1
        axes.axhline(
            result.final["loss_calibrated"],
            color=colors.get(family, "black") if several else "black",
            linewidth=1.2,
            linestyle="-.",
            label=f"{family}: dense" if several else "dense",
        )


def _legend(axes: Axes, losses: bool) -> None:
    handles, _ = axes.get_legend_handles_labels()
    if losses:
        for legend, style in LOSSES.values():
            handles.append(Line2D([], [], color="grey", label=legend, **style))
    axes.legend(handles=handles, fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))


def figure(experiment: Experiment, rows: list[Result]) -> Figure:
    """Loss against K: a colour for each family, architecture and A; dense runs as level lines."""
    drawn = Figure(figsize=(8, 5), layout="constrained")
    axes = drawn.subplots()
    dense = [result for result in rows if result.run.architecture == "dense"]
    sparse = [result for result in rows if result.run.model.hierarchy.sparse_layers]
    sparse.sort(key=lambda result: (_group(result), result.run.model.hierarchy.sparsity))
    families = len({result.run.family for result in rows})
    colors: dict[str, str] = {}
    for index, (group, members) in enumerate(itertools.groupby(sparse, _group)):
        color = f"C{index % 10}"
        colors.setdefault(group[0], color)
        _draw_group(axes, list(members), _label(group, families), color)
    _draw_dense(axes, dense, colors)
    ticks = sorted({result.run.model.hierarchy.sparsity for result in sparse})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("token sparsity K")
    axes.set_ylabel("held-out loss, nats per token")
    axes.set_title(f"{experiment.name}, {experiment.scale} scale, matched FLOPs")
    axes.grid(alpha=0.25)
    _legend(axes, bool(sparse))
    return drawn


def write(experiment: Experiment, workdir: pathlib.Path) -> str:
    """Draws ``loss_against_k.png`` and ``.svg`` in the work directory; returns the table."""
    rows = results(experiment, workdir)
    if not rows:
        return "no run is finished yet"
    drawn = figure(experiment, rows)
    figure_files.save(drawn, workdir, FIGURE)
    return f"{table(rows)}\nfigure: {workdir / FIGURE}.png and .svg"


def report(experiment: Experiment, workdir: pathlib.Path, outcome: Outcome) -> int:
    """Prints what came out of the sweep; returns the exit status."""
    print(write(experiment, workdir))
    for name, holder in outcome.held.items():
        print(f"{name} is still running: {holder}", file=sys.stderr)
    for name, reason in outcome.failed.items():
        print(f"{name} failed: {reason} (--retry_failed tries again)", file=sys.stderr)
    return outcome.status
