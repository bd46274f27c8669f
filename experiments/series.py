"""What the figures of losses have in common: looks of a series, means over seeds, axes, labels.

Every series has a marker and line style of its own, so that figures read without colour. The
colours are those that colour-blind readers tell apart.
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, NullLocator
from numpy.typing import NDArray

from experiments import tables
from experiments.spread import Spread

ARCHITECTURES = {
    "dense": "dense",
    "mod": "MoD",
    "xmod": "X-MoD",
    "moe": "MoE",
    "routed_ffn": "Routed-FFN",
    "selected_q_full_kv": "Selected-Q/full-KV",
    "xmod_ablation": "X-MoD ablation",
}
LOSS = "held-out loss, nats per token"
ERRORS = "Bars and bands: standard error over seeds; small marks: single seeds."
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_LINES = ("-", "--", "-.", ":")
_ROW = 0.18  # inches of height that a row of a legend takes
_LABEL = 40  # most characters of a name in a figure
_SMALLEST_SPAN = 2e-3  # nats; below it, losses are equal
_LABELLED = 12  # most ticks of K, evenly spread
_MOST_SPAN = 2.0  # times the lowest loss: what lies above is beside the figure


@dataclasses.dataclass(frozen=True)
class Style:
    """Looks of a series: `color`, `marker` and `line` as Matplotlib takes them."""

    color: str
    marker: str
    line: str | tuple[int, tuple[int, ...]]


def style(index: int) -> Style:
    """The looks of the series `index`: marker and line style are together its own up to 44."""
    return Style(
        _COLORS[index % len(_COLORS)],
        _MARKERS[index % len(_MARKERS)],
        _LINES[index % len(_LINES)],
    )


DENSE = Style("#000000", "*", (0, (7, 2, 1, 2, 1, 2)))


def dense_of(curve: Style) -> Style:
    """The looks of the dense reference of one curve among several."""
    return dataclasses.replace(curve, line=DENSE.line)


def plain(text: str) -> str:
    """A name as a label: never a formula, never hidden, one line of at most 40 characters."""
    shown = "".join(" " if unicodedata.category(c)[0] == "C" else c for c in text)
    if len(shown) > _LABEL:
        shown = f"{shown[: _LABEL - 16]}…{shown[-15:]}"
    # Matplotlib sets what stands between dollars, and hides what begins with an underscore.
    return shown.replace("$", r"\$").replace("_", " _", 1 if shown.startswith("_") else 0)


def means(
    axes: Axes,
    x: Sequence[float],
    spreads: Sequence[Spread],
    look: Style,
    label: str,
    joined: bool = True,
) -> None:
    """A series: means over seeds with bars of a standard error, single seeds as small marks.

    Args:
      axes: where.
      x: abscissae.
      spreads: losses at each of them.
      look: of the series.
      label: in the legend; empty for none.
      joined: connect the means.
    """
    errors = [spread.error or 0.0 for spread in spreads]
    axes.errorbar(
        x,
        [spread.mean for spread in spreads],
        yerr=errors if any(errors) else None,
        color=look.color,
        marker=look.marker,
        markersize=5,
        linewidth=1.4,
        linestyle=look.line if joined else "",
        capsize=2.5,
        label=plain(label) if label else None,
    )
    singles = [
        (at, value)
        for at, spread in zip(x, spreads, strict=True)
        if len(spread.values) > 1
        for value in spread.values
    ]
    if singles:
        marks: dict[str, Any] = {"color": look.color, "marker": look.marker, "markersize": 2.5}
        axes.plot(*zip(*singles, strict=True), linestyle="", alpha=0.55, **marks)


def level(axes: Axes, spread: Spread, look: Style, label: str) -> None:
    """A dense reference: a level line with its standard error, marked where it meets the edges."""
    across = axes.get_yaxis_transform()
    marks: dict[str, Any] = {"transform": across, "color": look.color, "clip_on": False}
    marks |= {"marker": look.marker, "markerfacecolor": "none"}
    name = plain(label) if label else None
    line: dict[str, Any] = {"linewidth": 1.1, "linestyle": look.line, "markersize": 5}
    axes.plot([0, 1], [spread.mean] * 2, label=name, **line, **marks)
    if spread.error:
        ends = spread.mean - spread.error, spread.mean + spread.error
        axes.axhspan(*ends, color=look.color, alpha=0.12, linewidth=0)
        axes.plot([1] * len(spread.values), spread.values, linestyle="", markersize=2.5, **marks)


def frame(axes: Axes, spreads: Sequence[Spread]) -> None:
    """Limits and numbers of the loss axis: equal losses are level, far ones beside the figure."""
    losses = [value for spread in spreads for value in spread.values]
    if losses:
        lowest = min(losses)
        inside = [v for v in losses if v <= lowest + max(_MOST_SPAN * abs(lowest), 1.0)]
        room = max((max(inside) - lowest) * 0.06, _SMALLEST_SPAN)
        axes.set_ylim(lowest - room, max(inside) + room)
        if far := len(losses) - len(inside):
            told = f"{far} above the figure, up to {tables.number(max(losses))}"
            place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top"}
            box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            axes.text(0.98, 0.97, told, fontsize=8, bbox=box, **place)
    numbers(axes.yaxis)


def legend(drawn: Figure, axes: Axes) -> Figure:
    """Puts the legend below the axes, where it covers nothing; the figure grows from the third row.

    A column takes what its longest label needs.
    """
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        width, height = drawn.get_size_inches()
        columns = max(1, min(4, len(labels), int(width / (0.5 + 0.075 * max(map(len, labels))))))
        rows = -(-len(labels) // columns)
        drawn.set_size_inches(width, height + _ROW * max(0, rows - 2))
        options: dict[str, Any] = {"ncols": columns, "fontsize": 8, "frameon": False}
        drawn.legend(handles, labels, loc="outside lower center", **options)
    return drawn


def sparsities(axes: Axes, values: Iterable[int]) -> None:
    """A logarithmic axis of K whose ticks are the given K, without those that would collide."""
    ticks = sorted(set(values))
    if not ticks:
        axes.set_xticks([])  # level lines alone
        return
    axes.set_xscale("log", base=2)
    low, high = ticks[0] / 1.15, ticks[-1] * 1.15
    axes.set_xlim(low, high)
    apart = math.log2(high / low) / _LABELLED
    shown: list[int] = []
    # The ends and powers of two come first, the others where there is room.
    for tick in sorted(ticks, key=lambda k: (k not in (ticks[0], ticks[-1]), k & (k - 1) != 0, k)):
        if all(abs(math.log2(tick / other)) >= apart for other in shown):
            shown.append(tick)
    axes.set_xticks(shown, [str(tick) for tick in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def numbers(axis: Axis) -> None:
    """Ticks as people write numbers: no offset beside the axis, no signed powers."""
    axis.set_major_formatter(_Plain())


class _Plain(Formatter):
    """As few digits as tell the ticks apart."""

    def __call__(self, value: float, position: int | None = None) -> str:
        return tables.number(value)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        ticks = np.sort(np.asarray(values, float))
        if np.abs(ticks).max(initial=0) >= 1e6:
            digits = next((d for d in range(3, 10) if _distinct(ticks, d)), 10)
            return [tables.number(value, digits) for value in values]
        step = np.diff(ticks).min(initial=np.inf)
        rounded = (d for d in range(9) if np.abs(np.round(ticks, d) - ticks).max() < 1e-3 * step)
        decimals = next(rounded, 9) if len(ticks) else 0
        # Adding 0 makes a zero of a negative one.
        return [f"{round(value, decimals) + 0.0:.{decimals}f}" for value in values]


def _distinct(ticks: NDArray[np.float64], digits: int) -> bool:
    return len({tables.number(tick, digits) for tick in ticks}) == len(set(ticks))
