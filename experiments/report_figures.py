"""The figures of a report. Each function returns None where the runs cannot show the figure.

Losses are held-out ones under the calibrated threshold, means over seeds; bars show one standard
error, small marks the seeds. The size is that of a phone's width, so that the text stays legible
there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments import series, tables
from experiments.report_data import Configuration
from experiments.series import Style

SIZE = (4.2, 3.6)  # inches, with a legend of two rows
# What the curves of a figure may differ in, what it is called, and its legend.
_VARIABLES: tuple[tuple[Callable[[Configuration], Any], str, str], ...] = (
    (lambda c: c.context, "L", "L = {}"),
    (lambda c: c.stride, "A", "A = {:g}"),
    (lambda c: c.family, "backbone", "{}"),
)
_NAMED = 9  # most points with a legend of their own
_LISTED = 10  # most training curves with a legend of their own
_CURVE_POINTS = 200
_SMOOTHING = 0.9  # of a training curve, per step

Value = Callable[[Configuration], float]
Configurations = Sequence[Configuration]


def architecture(configuration: Configuration) -> str:
    """What an architecture is called in legends and tables."""
    name = configuration.config.architecture
    return series.ARCHITECTURES.get(name, name)


def against_sparsity(configurations: Configurations) -> list[tuple[Figure, str]]:
    """Loss against K with captions: for each L, A and backbone, where the runs differ in it alone.

    Where no such comparison is possible, one figure of all that is sparse. Dense as level lines.
    """
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    drawn = []
    for by, name, label in _VARIABLES:
        others = [value for value, *_ in _VARIABLES if value is not by]
        fixed = lambda c, others=others: (_depth(c), *(value(c) for value in others))
        curves = _curves(_controlled(routed, fixed, by), by, lambda c: c.sparsity)
        if len(curves) > 1:
            labels = {value: label.format(value) for value in curves}
            figure = _over_sparsity(configurations, curves, labels)
            drawn.append((figure, f"Loss against K for each {name}; dense as level lines."))
    sparse = [c for c in configurations if c.sparse]
    if not drawn and len({c.sparsity for c in sparse}) > 1:
        curves = _groups(sparse, lambda c: (architecture(c), c.family, c.context, _own(c)))
        figure = _over_sparsity(configurations, curves, _labels(curves))
        drawn.append((figure, "Loss against K; dense as level lines."))
    return drawn


def _over_sparsity(configurations: Configurations, curves: dict, labels: dict) -> Figure:
    drawn, axes = _figure("token sparsity K", "Loss against K")
    for index, (value, members) in enumerate(curves.items()):
        distinct = len({c.sparsity for c in members}) == len(members)
        _curve(axes, members, lambda c: c.sparsity, index, labels[value], joined=distinct)
    levels = _dense_levels(axes, configurations, list(curves.values()))
    shown = [c for members in curves.values() for c in members]
    series.sparsities(axes, {c.sparsity for c in shown})
    return _finish(drawn, axes, [*shown, *levels])


def against_routed_tokens(configurations: Configurations) -> Figure | None:
    """Loss against L/K, the tokens of a sparse layer, a curve for each L; needs several L."""
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    chosen = _controlled(routed, lambda c: (c.family, c.stride), lambda c: c.context)
    curves = _curves(chosen, lambda c: c.context, lambda c: c.sparsity)
    if len(curves) < 2:
        return None
    drawn, axes = _figure("routed tokens of a sparse layer, L / K", "Loss against L/K")
    for index, (context, members) in enumerate(curves.items()):
        _curve(axes, members, lambda c: c.context / c.sparsity, index, f"L = {context}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.number(x)))
    return _finish(drawn, axes, [c for members in curves.values() for c in members])


def against_active(configurations: Configurations) -> Figure | None:
    """Loss against N_act at one L and A, a curve for each K; needs several sizes of backbone."""
    size = lambda c: c.accounting["n_act"]
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    chosen = _controlled(routed, lambda c: (_depth(c), c.context, c.stride), lambda c: c.family)
    curves = _curves(chosen, lambda c: c.sparsity, size)
    if not curves:
        return None
    drawn, axes = _figure("active-equivalent parameters N_act", "Loss against N_act")
    peers = {(c.family, c.context) for c in chosen}
    dense = [c for c in configurations if _is_dense(c) and (c.family, c.context) in peers]
    _curve(axes, dense, size, None, "dense")
    for index, (sparsity, members) in enumerate(curves.items()):
        _curve(axes, members, size, index, f"A{chosen[0].stride:g}K{sparsity}")
    _log_counts(axes)
    return _finish(drawn, axes, [*dense, *(c for members in curves.values() for c in members)])


def against_stride(configurations: Configurations) -> Figure | None:
    """Loss against A at one backbone and L, a curve for each K; needs several A at equal K."""
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    chosen = _controlled(routed, lambda c: (c.family, c.context), lambda c: c.stride)
    curves = _curves(chosen, lambda c: c.sparsity, lambda c: c.stride)
    if not curves:
        return None
    drawn, axes = _figure("anchor stride A", "Loss against A")
    for index, (sparsity, members) in enumerate(curves.items()):
        _curve(axes, members, lambda c: c.stride, index, f"K = {sparsity}")
    levels = _dense_levels(axes, configurations, [chosen])
    return _finish(drawn, axes, [*levels, *(c for members in curves.values() for c in members)])


def against_total(configurations: Configurations) -> Figure | None:
    """Loss against total parameters N, every architecture; X-MoD of equal A is connected.

    Few runs have their own entries in the legend, many are shown by architecture.
    """
    total = lambda c: c.accounting["total_params"]
    if len({total(c) for c in configurations}) < 2:
        return None
    drawn, axes = _figure("total parameters N", "Loss against total parameters")
    of = _name if len(configurations) <= _NAMED else architecture
    for index, name in enumerate(dict.fromkeys(map(of, configurations))):
        members = [c for c in configurations if of(c) == name]
        look = None if _is_dense(members[0]) else index
        label = name  # one entry in the legend, however many lines
        for line in _groups(members, lambda c: (c.family, c.context, _stride(c))).values():
            distinct = len({total(c) for c in line}) == len(line) > 1
            _curve(axes, line, total, look, label, joined=bool(_stride(line[0])) and distinct)
            label = ""
    _log_counts(axes)
    return _finish(drawn, axes, configurations)


def training_curves(configurations: Configurations) -> Figure | None:
    """Smoothed training loss against tokens, every seed; needs recorded steps."""
    lines = [
        (c, run, curve) for c in configurations for run in c.runs if (curve := _smoothed(run.train))
    ]
    if not lines:
        return None
    drawn, axes = _figure("training tokens", "Training loss, smoothed")
    of = architecture if len(configurations) > _LISTED else _name
    looks = {
        label: series.style(index)
        for index, label in enumerate(dict.fromkeys(of(c) for c, *_ in lines))
    }
    seen: set[str] = set()
    for configuration, _, (tokens, losses) in lines:
        label = of(configuration)
        entry = None if label in seen else series.plain(label)
        seen.add(label)
        look = looks[label]
        # Marks at different places, so that curves upon each other are told apart.
        every = (0.02 + 0.16 * list(looks).index(label) / len(looks), 0.16)
        style: dict[str, Any] = {"color": look.color, "linestyle": look.line, "marker": look.marker}
        style |= {"markersize": 4, "markevery": every}
        axes.plot(tokens, losses, linewidth=1.0, alpha=0.85, label=entry, **style)
    axes.set_ylabel("training loss (top-k), nats per token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.short(x)))
    everything = np.concatenate([losses for *_, (_, losses) in lines])
    # The first steps would press all that matters into a tenth of the figure.
    lowest, highest = everything.min(), np.quantile(everything, 0.85)
    room = max(0.05, 0.04 * (highest - lowest))
    axes.set_ylim(lowest - room, highest + room)
    series.numbers(axes.yaxis)
    return series.legend(drawn, axes)


def _figure(x_label: str, title: str) -> tuple[Figure, Axes]:
    drawn = Figure(figsize=SIZE, layout="constrained")
    axes = drawn.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(series.LOSS)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    return drawn, axes


def _finish(drawn: Figure, axes: Axes, shown: Configurations) -> Figure:
    """The loss axis of what is shown, and the legend."""
    series.frame(axes, [c.loss for c in shown if c.loss is not None])
    return series.legend(drawn, axes)


def _groups(configurations: Iterable[Configuration], key) -> dict:
    """By key, in order of the keys."""
    groups = collections.defaultdict(list)
    for configuration in configurations:
        groups[key(configuration)].append(configuration)
    return dict(sorted(groups.items()))


def _controlled(
    configurations: Configurations, fixed: Callable, by: Callable
) -> list[Configuration]:
    """Those that agree in `fixed`, where most values of `by` can be compared; empty for none."""
    groups = _groups(configurations, fixed).values()
    return max(groups, key=lambda members: len({by(c) for c in members}), default=[])


def _curves(configurations: Configurations, by: Callable, x: Callable) -> dict:
    """By value of `by`, those that have several values of `x` and so make a curve."""
    groups = _groups(configurations, by)
    return {value: cs for value, cs in groups.items() if len({x(c) for c in cs}) > 1}


def _stride(configuration: Configuration) -> float:
    """A where it means something: 0 for anything but X-MoD."""
    return configuration.stride if configuration.config.architecture == "xmod" else 0.0


def _own(configuration: Configuration) -> float:
    """A of every architecture that chooses it beside K; else 0."""
    chosen = configuration.config.architecture not in ("mod", "xmod_ablation")
    return configuration.stride if chosen else 0.0


def _depth(configuration: Configuration) -> float:
    """Active depth: backbones of another depth are another family."""
    return float(configuration.config.model.hierarchy.active_depth)


def _name(configuration: Configuration) -> str:
    return configuration.name


def _is_dense(configuration: Configuration) -> bool:
    return configuration.config.architecture == "dense"


def _labels(groups: Iterable[tuple[str, str, int, float]]) -> dict:
    """Legends that name only what differs between the curves."""
    groups = list(groups)
    families, lengths = ({group[i] for group in groups} for i in (1, 2))
    strides = {group[3] for group in groups if group[3]}
    labels = {}
    for group in groups:
        kind, family, context, stride = group
        parts = [kind]
        parts += [family] if len(families) > 1 else []
        parts += [f"A = {stride:g}"] if stride and len(strides) > 1 else []
        parts += [f"L = {context}"] if len(lengths) > 1 else []
        labels[group] = ", ".join(parts)
    return labels


def _curve(
    axes: Axes,
    members: Configurations,
    x: Value,
    index: int | None,
    label: str,
    joined: bool = True,
) -> None:
    """A series of `series.means`; `index` gives its looks, None those of dense runs."""
    members = sorted((c for c in members if c.loss is not None), key=x)
    spreads = [loss for c in members if (loss := c.loss) is not None]
    look = series.DENSE if index is None else series.style(index)
    if members:
        series.means(axes, [x(c) for c in members], spreads, look, label, joined)


def _dense_levels(
    axes: Axes, configurations: Configurations, curves: Sequence[Configurations]
) -> list[Configuration]:
    """A level line for the dense run of every curve; of several, each with its curve's looks.

    Returns the dense runs that are shown.
    """
    looks: dict[tuple[str, int], Style] = {}
    for index, members in enumerate(curves):
        looks.setdefault((members[0].family, members[0].context), series.style(index))
    shown: list[Configuration] = []
    for configuration in configurations:
        place = configuration.family, configuration.context
        if not _is_dense(configuration) or place not in looks or configuration.loss is None:
            continue
        look = series.dense_of(looks[place]) if len(looks) > 1 else series.DENSE
        label = "dense (same mark)" if len(looks) > 1 else "dense"
        series.level(axes, configuration.loss, look, "" if shown else label)
        shown.append(configuration)
    return shown


def _log_counts(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.short(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _smoothed(steps: list[dict]) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokens and running mean of the loss, thinned; None without losses."""
    pairs = [(step.get("tokens"), step.get("loss")) for step in steps]
    points = [pair for pair in pairs if None not in pair]
    if len(points) < 2:
        return None
    tokens, losses = np.array(points, float).T
    means, weight, total = [], 0.0, 0.0
    for loss in losses:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * loss
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        means.append(total / weight)
    keep = np.unique(np.linspace(0, len(tokens) - 1, _CURVE_POINTS).astype(int))
    return tokens[keep], np.array(means)[keep]
