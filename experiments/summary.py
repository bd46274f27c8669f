"""The end of a sweep: a table and a figure of loss against K with the dense reference.

Losses are those of the causal threshold rules: calibrated (main) and 0.5 (the paper's). The top-k
loss stands beside them, labelled, because its routing sees the future.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import figure_files, planning, series, tables
from experiments.registry import Experiment
from experiments.runner import Outcome
from experiments.series import Style
from experiments.spread import Spread
from xmod_jax.config import RunConfig
from xmod_jax.identity import seedless_hash
from xmod_jax.law.observations import FLOPS_TOLERANCE
from xmod_jax.records import Record

FIGURE = "loss_against_k"
_OWN_STRIDE = ("mod", "xmod_ablation")  # whose A follows from K, or is that of their layers
_BESIDE = 0.2  # octaves of K that runs of equal K take side by side
_LEVELS = 24  # most dense runs that it names
_NAMED = 12  # most runs of equal K that the legend names
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
            if run.folder in started and (final := started[run.folder].final) is not None
        ]
    )


def compare(finished: Sequence[tuple[RunConfig, Record]]) -> list[Result]:
    """Finished runs with their last evaluations, each beside its dense reference."""
    dense = [(run, final) for run, final in finished if run.architecture == "dense"]
    return [Result(run, final, _dense_loss(run, final, dense)) for run, final in finished]


def _dense_loss(
    run: RunConfig, final: Record, dense: Sequence[tuple[RunConfig, Record]]
) -> float | None:
    """Loss of the dense run of equal family, context, data and seed that is closest in FLOPs."""
    key = lambda run: (
        run.family,
        run.train.context_length,
        run.data.content,
        run.train.seed,
    )
    distance = lambda other: abs(math.log(other["flops"] / final["flops"]))
    peers = [other for peer, other in dense if key(peer) == key(run)]
    nearest = min(peers, key=distance, default=None)
    if nearest is None or distance(nearest) > FLOPS_TOLERANCE:
        return None
    return nearest["loss_calibrated"]


def table(rows: list[Result]) -> str:
    """Text table of finished runs, under `HEADER`, with its note.

    Runs that differ in their seed alone are one row of means; the differences to dense, paired by
    seed, then have their standard error.
    """
    groups = _seeds(rows)
    several = any(len(members) > 1 for members in groups)
    header = (*HEADER[:1], "seeds", *HEADER[1:5], "error", *HEADER[5:]) if several else HEADER
    cells = []
    for members in groups:
        run, hierarchy = members[0].run, members[0].run.model.hierarchy
        delta = Spread.of(result.delta for result in members)
        cells.append(
            (
                run.name if several else run.folder,
                *([str(len(members))] if several else []),
                str(hierarchy.sparsity),
                f"{float(hierarchy.anchor_stride):g}",
                tables.fixed(_mean(members, "loss_calibrated")),
                tables.fixed(delta.mean if delta else None, sign="+"),
                *([tables.fixed(delta.error if delta else None)] if several else []),
                tables.fixed(_mean(members, "loss_threshold")),
                tables.fixed(_mean(members, "loss_topk")),
                tables.fixed(_mean(members, "coverage"), 3),
                tables.fixed(_mean(members, "jaccard"), 3),
                tables.short(members[0].final["tokens"]),
                tables.flops(members[0].final["flops"]),
            )
        )
    text = f"{tables.text_table(header, cells)}\n{NOTE}"
    return f"{text}\n{verdict}" if (verdict := _verdict(groups)) else text


def _seeds(rows: Sequence[Result]) -> list[list[Result]]:
    """Results that differ in their seed alone together, in order of appearance."""
    groups: dict[str, list[Result]] = collections.defaultdict(list)
    for result in rows:
        groups[seedless_hash(result.run)].append(result)
    return list(groups.values())


def _mean(members: Sequence[Result], key: str) -> float | None:
    found = Spread.of(result.final.get(key) for result in members)
    return found.mean if found else None


def _verdict(groups: Sequence[Sequence[Result]]) -> str:
    """How the differences to dense compare with their standard error, pooled over the rows."""
    deltas = [Spread.of(result.delta for result in members) for members in groups]
    spreads = [delta for delta in deltas if delta and delta.deviation is not None]
    if not spreads:
        return ""
    freedom = sum(len(delta.values) - 1 for delta in spreads)
    squares = sum((len(d.values) - 1) * d.deviation**2 for d in spreads if d.deviation is not None)
    deviation = math.sqrt(squares / freedom)
    error = max(deviation / math.sqrt(len(delta.values)) for delta in spreads)
    largest = max((delta.mean for delta in spreads), key=abs)
    return (
        "error: standard error over seeds of the difference to the dense run of the same seed; "
        f"pooled over the rows it is {tables.fixed(error)}, the largest difference "
        f"{tables.fixed(largest, sign='+')}"
    )


@dataclasses.dataclass(frozen=True)
class _Point:
    """One configuration: its first run and the calibrated losses of its seeds."""

    run: RunConfig
    loss: Spread

    @property
    def sparsity(self) -> int:
        return self.run.model.hierarchy.sparsity

    @property
    def curve(self) -> tuple[str, str, float]:
        """What the points of a curve have in common: family, architecture and A."""
        run = self.run
        own = run.architecture in _OWN_STRIDE
        return (
            run.family,
            run.architecture,
            0.0 if own else float(run.model.hierarchy.anchor_stride),
        )


@dataclasses.dataclass(frozen=True)
class _Curve:
    """Points in order of K, the legend, and the factor of K that sets them apart from others."""

    label: str
    points: list[_Point]
    beside: float = 1.0

    @property
    def distinct(self) -> bool:
        """Whether every K stands there once, so that a line through them means something."""
        return len({point.sparsity for point in self.points}) == len(self.points)


def _points(rows: Sequence[Result]) -> list[_Point]:
    """Results that differ in their seed alone as one point each, in order of appearance."""
    return [
        _Point(members[0].run, spread)
        for members in _seeds(rows)
        if (spread := Spread.of(result.final["loss_calibrated"] for result in members))
    ]


def _curves(points: Sequence[_Point]) -> list[_Curve]:
    """The sparse points as curves.

    Points that share a K differ in something else: a few stand side by side under their names.
    """
    families = len({point.run.family for point in points})
    sparse = [point for point in points if point.run.model.hierarchy.sparse_layers]
    sparse.sort(key=lambda point: (point.curve, point.sparsity))
    curves = []
    for common, group in itertools.groupby(sparse, lambda point: point.curve):
        curve = _Curve(_label(common, families), list(group))
        named = not curve.distinct or common[1] == "xmod_ablation"
        if named and len(curve.points) <= _NAMED:
            width = _BESIDE / len(curve.points)
            for index, point in enumerate(curve.points):
                beside = 2 ** (width * (index - (len(curve.points) - 1) / 2))
                curves.append(_Curve(point.run.name, [point], beside))
        else:
            curves.append(curve)
    return curves


def _label(curve: tuple[str, str, float], families: int) -> str:
    family, architecture, stride = curve
    name = series.ARCHITECTURES.get(architecture, architecture)
    label = f"{name}, A = {stride:g}" if stride else name
    return f"{family}: {label}" if families > 1 else label


def _draw_dense(axes: Axes, dense: Sequence[_Point], styles: Mapping[str, Style]) -> None:
    """Level lines; where there are several families each has the looks of its first curve."""
    families = len({point.run.family for point in dense})
    for index, point in enumerate(dense):
        family = point.run.family
        look = series.DENSE
        if families > 1:
            look = series.dense_of(styles.get(family, series.style(index)))
        elif len(dense) > 1:
            look = series.style(index)
        label = point.run.name if len(dense) > families else f"{family}: dense"
        label = label if index < _LEVELS else ""
        series.level(axes, point.loss, look, label if len(dense) > 1 else "dense")


def figure(experiment: Experiment, rows: Sequence[Result]) -> Figure:
    """Loss (calibrated) against K, one or several results for each K; dense as level lines.

    A series for each family, architecture and A: means over seeds with their standard error, and
    the single seeds as small marks.
    """
    drawn = Figure(figsize=(8, 5), layout="constrained")
    axes = drawn.subplots()
    points = _points(rows)
    styles: dict[str, Style] = {}
    curves = _curves(points)
    for index, curve in enumerate(curves):
        look = series.style(index)
        styles.setdefault(curve.points[0].run.family, look)
        at = [point.sparsity * curve.beside for point in curve.points]
        losses = [point.loss for point in curve.points]
        series.means(axes, at, losses, look, curve.label, joined=curve.distinct)
    dense = [point for point in points if point.run.architecture == "dense"]
    _draw_dense(axes, dense, styles)
    shown = [point for curve in curves for point in curve.points]
    series.sparsities(axes, (point.sparsity for point in shown))
    series.frame(axes, [point.loss for point in (*dense, *shown)])
    axes.set_xlabel("token sparsity K")
    axes.set_ylabel(series.LOSS)
    axes.set_title(series.plain(experiment.name) + f", {experiment.scale} scale, matched FLOPs")
    axes.grid(alpha=0.25)
    if dense or shown:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    if any(len(point.loss.values) > 1 for point in points):
        drawn.supxlabel(series.ERRORS, fontsize=8)
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
