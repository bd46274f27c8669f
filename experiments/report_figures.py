"""The figures of a report. Each function returns None where the runs cannot show the figure.

Losses are held-out ones under the calibrated threshold, means over seeds; bars show one standard
deviation. The size is that of a phone's width, so that the text stays legible there.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from experiments import tables
from experiments.report_data import Configuration

SIZE = (4.2, 3.6)  # inches
LOSS = "held-out loss, nats per token"
ARCHITECTURES = {
    "dense": "dense",
    "mod": "MoD",
    "xmod": "X-MoD",
    "moe": "MoE",
    "routed_ffn": "Routed-FFN",
    "selected_q_full_kv": "Selected-Q/full-KV",
    "xmod_ablation": "X-MoD ablation",
}
# What the curves of a figure may differ in, what it is called, and its legend.
_VARIABLES: tuple[tuple[Callable[[Configuration], Any], str, str], ...] = (
    (lambda c: c.context, "L", "L = {}"),
    (lambda c: c.stride, "A", "A = {:g}"),
    (lambda c: c.family, "backbone", "{}"),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_NAMED = 9  # most points with a legend of their own
_LISTED = 10  # most training curves with a legend of their own
_CURVE_POINTS = 200
_SMOOTHING = 0.9  # of a training curve, per step

Value = Callable[[Configuration], float]
Configurations = Sequence[Configuration]


def architecture(configuration: Configuration) -> str:
    """What an architecture is called in legends and tables."""
    name = configuration.config.architecture
    return ARCHITECTURES.get(name, name)


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
        curves = _groups(sparse, lambda c: (architecture(c), c.family, c.context, _stride(c)))
        figure = _over_sparsity(configurations, curves, _labels(curves))
        drawn.append((figure, "Loss against K; dense as level lines."))
    return drawn


def _over_sparsity(configurations: Configurations, curves: dict, labels: dict) -> Figure:
    drawn, axes = _figure("token sparsity K", "Loss against K")
    for index, (value, members) in enumerate(curves.items()):
        _curve(axes, members, lambda c: c.sparsity, f"C{index % 10}", index, labels[value])
    _dense_levels(axes, configurations, list(curves.values()))
    _log2(axes, {c.sparsity for members in curves.values() for c in members})
    return _finish(drawn, axes)


def against_routed_tokens(configurations: Configurations) -> Figure | None:
    """Loss against L/K, the tokens of a sparse layer, a curve for each L; needs several L."""
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    chosen = _controlled(routed, lambda c: (c.family, c.stride), lambda c: c.context)
    curves = _curves(chosen, lambda c: c.context, lambda c: c.sparsity)
    if len(curves) < 2:
        return None
    drawn, axes = _figure("routed tokens of a sparse layer, L / K", "Loss against L/K")
    for index, (context, members) in enumerate(curves.items()):
        ratio = lambda c: c.context / c.sparsity
        _curve(axes, members, ratio, f"C{index % 10}", index, f"L = {context}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    return _finish(drawn, axes)


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
    _curve(axes, dense, size, "black", len(_MARKERS) - 1, "dense")
    for index, (sparsity, members) in enumerate(curves.items()):
        label = f"A{chosen[0].stride:g}K{sparsity}"
        _curve(axes, members, size, f"C{index % 10}", index, label)
    _log_counts(axes)
    return _finish(drawn, axes)


def against_stride(configurations: Configurations) -> Figure | None:
    """Loss against A at one backbone and L, a curve for each K; needs several A at equal K."""
    routed = [c for c in configurations if c.config.architecture == "xmod"]
    chosen = _controlled(routed, lambda c: (c.family, c.context), lambda c: c.stride)
    curves = _curves(chosen, lambda c: c.sparsity, lambda c: c.stride)
    if not curves:
        return None
    drawn, axes = _figure("anchor stride A", "Loss against A")
    for index, (sparsity, members) in enumerate(curves.items()):
        _curve(axes, members, lambda c: c.stride, f"C{index % 10}", index, f"K = {sparsity}")
    _dense_levels(axes, configurations, [chosen])
    return _finish(drawn, axes)


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
        color = "black" if _is_dense(members[0]) else f"C{index % 10}"
        label = name  # one entry in the legend, however many lines
        for line in _groups(members, lambda c: (c.family, c.context, _stride(c))).values():
            joined = "-" if _stride(line[0]) and len(line) > 1 else ""
            _curve(axes, line, total, color, index, label, linestyle=joined)
            label = ""
    _log_counts(axes)
    return _finish(drawn, axes)


def training_curves(configurations: Configurations) -> Figure | None:
    """Smoothed training loss against tokens, every seed; needs recorded steps."""
    lines = [
        (c, run, curve) for c in configurations for run in c.runs if (curve := _smoothed(run.train))
    ]
    if not lines:
        return None
    drawn, axes = _figure("training tokens", "Training loss, smoothed")
    several = len(configurations) > _LISTED
    of = architecture if several else _name
    colors = {
        label: f"C{i % 10}" for i, label in enumerate(dict.fromkeys(of(c) for c, *_ in lines))
    }
    seen: set[str] = set()
    for configuration, _, (tokens, losses) in lines:
        label = of(configuration)
        entry = None if label in seen else label
        seen.add(label)
        axes.plot(tokens, losses, color=colors[label], linewidth=1.0, alpha=0.85, label=entry)
    axes.set_ylabel("training loss (top-k), nats per token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.short(x)))
    everything = np.concatenate([losses for *_, (_, losses) in lines])
    # The first steps would press all that matters into a tenth of the figure.
    axes.set_ylim(everything.min() - 0.05, np.quantile(everything, 0.85))
    return _finish(drawn, axes)


def _figure(x_label: str, title: str) -> tuple[Figure, Axes]:
    drawn = Figure(figsize=SIZE, layout="constrained")
    axes = drawn.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(LOSS)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    return drawn, axes


def _finish(drawn: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        widest = max(map(len, labels))
        columns = 1 if widest > 32 else 2 if widest > 16 else 3
        drawn.legend(
            handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False
        )
    return drawn


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
    color: str,
    index: int,
    label: str,
    linestyle: str = "-",
) -> None:
    """Means over seeds, with bars of one standard deviation where there are several."""
    members = sorted(members, key=x)
    losses = [c.loss for c in members]
    deviations = [loss.deviation or 0.0 if loss else 0.0 for loss in losses]
    axes.errorbar(
        [x(c) for c in members],
        [loss.mean if loss else np.nan for loss in losses],
        yerr=deviations if any(deviations) else None,
        color=color,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4.5,
        linewidth=1.4,
        linestyle=linestyle,
        capsize=2.5,
        label=label or None,
    )


def _dense_levels(
    axes: Axes, configurations: Configurations, curves: Sequence[Configurations]
) -> None:
    """A level line for the dense run of every curve; of several, each in its curve's colour."""
    colors: dict[tuple[str, int], str] = {}
    for index, members in enumerate(curves):
        colors.setdefault((members[0].family, members[0].context), f"C{index % 10}")
    label: str | None = "dense"
    for configuration in configurations:
        place = configuration.family, configuration.context
        if not _is_dense(configuration) or place not in colors or configuration.loss is None:
            continue
        color = colors[place] if len(colors) > 1 else "black"
        level = configuration.loss.mean
        axes.axhline(level, color=color, linewidth=1.1, linestyle="-.", label=label)
        label = None


def _log2(axes: Axes, ticks: set[int]) -> None:
    axes.set_xscale("log", base=2)
    shown = sorted(ticks)
    if len(shown) > 8:  # neighbours such as 18 and 20 would run into each other
        shown = [tick for tick in shown if tick & (tick - 1) == 0 or tick == shown[-1]]
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _log_counts(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.short(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _smoothed(steps: list[dict]) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokens and running mean of the loss, thinned; None without losses."""
    points = [(step["tokens"], step["loss"]) for step in steps if {"tokens", "loss"} <= step.keys()]
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
