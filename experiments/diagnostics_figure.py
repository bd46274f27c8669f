"""How often a token is updated between two dense layers, in the paper's form.

The distribution of update counts of every model: bars at the whole numbers, since a token is
updated a whole number of times; the binomial of independent selections as marks and dashed steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments import series
from xmod_jax.diagnostics import Diagnostics, independent_subsets

COLUMNS = 3
_VISIBLE = 2e-3  # a share below this is no longer seen in the figure
_WIDTH = 0.38  # of a bar, in updates
_INDEPENDENT: dict[str, Any] = {"color": "#606060", "linewidth": 1.1}
# The hatching tells the bars apart without colour.
_CALIBRATED: dict[str, Any] = {"color": "#0072b2", "linewidth": 0.6}
_THRESHOLD: dict[str, Any] = {"color": "#f0a868", "hatch": "////", "linewidth": 0.6}


def figure(models: Mapping[str, Diagnostics], columns: int = COLUMNS) -> Figure:
    """One panel for each model and length of its intervals.

    Args:
      models: at least one, by name.
      columns: most panels in a row.
    """
    panels = [
        (name, found, index)
        for name, found in models.items()
        for index in range(len(found.calibrated))
    ]
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    drawn = Figure(figsize=(3.4 * columns, 2.6 * rows + 0.5), layout="constrained")
    grid = drawn.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, found, index) in zip(grid, panels, strict=False):
        _panel(axes, name, found, index)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    handles, labels = grid[0].get_legend_handles_labels()
    options: dict[str, Any] = {"ncols": min(3, columns + 1), "fontsize": 8, "frameon": False}
    drawn.legend(handles, labels, loc="outside lower center", **options)
    return drawn


def _panel(axes: Axes, name: str, found: Diagnostics, index: int) -> None:
    calibrated, threshold = found.calibrated[index], found.threshold[index]
    independent = independent_subsets(calibrated.layers, found.sparsity).updates
    counts = np.arange(calibrated.layers + 1)
    bars: dict[str, Any] = {"width": _WIDTH, "edgecolor": "#303030"}
    axes.bar(
        counts - _WIDTH / 2, calibrated.shares, label="calibrated threshold", **bars, **_CALIBRATED
    )
    axes.bar(counts + _WIDTH / 2, threshold.shares, label="threshold 0.5", **bars, **_THRESHOLD)
    edges = np.arange(calibrated.layers + 2) - 0.5
    axes.stairs(independent, edges, linestyle="--", **_INDEPENDENT)
    axes.plot(
        counts, independent, "D", markersize=3, label="independent (binomial)", **_INDEPENDENT
    )
    together = np.max([independent, threshold.shares, calibrated.shares], axis=0)
    axes.set_xlim(-0.6, last_visible(together) + 0.6)
    axes.set_ylim(0, None)
    title = f"{series.plain(name)}, K = {found.sparsity}, T = {calibrated.layers}"
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("updates of a token", fontsize=8)
    axes.set_ylabel("share of tokens", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    series.numbers(axes.yaxis)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def last_visible(shares: Sequence[float] | np.ndarray) -> int:
    """The largest count that is worth showing, at least 1."""
    return max(1, int(np.flatnonzero(np.asarray(shares) > _VISIBLE).max(initial=0)))
