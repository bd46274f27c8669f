"""How often a token is updated between two dense layers, in the paper's form.

The distribution of update counts of every model: markers at the integers, a smooth curve through
their heights, the binomial of independent selections dashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy.interpolate import PchipInterpolator

from xmod_jax.diagnostics import Diagnostics, independent_subsets

COLUMNS = 3
_POINTS = 24  # of a curve between two integers
_VISIBLE = 2e-3  # a share below this is no longer seen in the figure
_INDEPENDENT: dict[str, Any] = {"color": "#808080", "linestyle": "--", "linewidth": 1.2}
_CALIBRATED: dict[str, Any] = {"color": "C0", "linewidth": 1.8, "marker": "o"}
_THRESHOLD: dict[str, Any] = {"color": "C1", "linewidth": 1.0, "marker": "s"}


def smooth(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A curve through the heights of counts 0 ... T, monotone between them.

    It never leaves the range of its two neighbours, so it neither falls below 0 nor adds a peak.

    Args:
      shares: [T + 1] shares of tokens.

    Returns:
      Abscissae and heights of the curve.
    """
    counts = np.arange(len(shares))
    fine = np.linspace(0, len(shares) - 1, _POINTS * (len(shares) - 1) + 1)
    return fine, PchipInterpolator(counts, shares)(fine)


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
    _curve(axes, independent, "independent (binomial)", **_INDEPENDENT)
    _curve(axes, threshold.shares, "threshold 0.5", **_THRESHOLD)
    _curve(axes, calibrated.shares, "calibrated threshold", **_CALIBRATED)
    together = np.max([independent, threshold.shares, calibrated.shares], axis=0)
    axes.set_xlim(-0.3, last_visible(together) + 0.6)
    axes.set_ylim(0, None)
    axes.set_title(f"{name}, K = {found.sparsity}, T = {calibrated.layers}", fontsize=9)
    axes.set_xlabel("updates of a token", fontsize=8)
    axes.set_ylabel("share of tokens", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)


def last_visible(shares: Sequence[float] | np.ndarray) -> int:
    """The largest count that is worth showing, at least 1."""
    return max(1, int(np.flatnonzero(np.asarray(shares) > _VISIBLE).max(initial=0)))


def _curve(
    axes: Axes, shares: np.ndarray, label: str, marker: str | None = None, **style: Any
) -> None:
    every = _POINTS if marker else None
    axes.plot(*smooth(shares), marker=marker, markevery=every, markersize=3.5, label=label, **style)
