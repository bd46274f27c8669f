"""Figures about the scaling law, as the paper draws them.

Every function returns a `Figure`; `write` saves them as PNG and SVG. Points are observations, lines
the law along the same hierarchies. Colours go from dark to light with the variable in the legend.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from experiments import figure_files, series, tables
from experiments.series import Style
from xmod_jax.law import identifiability
from xmod_jax.law.observations import Table
from xmod_jax.law.terms import Draws, Law

Array = NDArray[np.float64]

SIZE = (6.4, 4.8)  # inches
BAND = 0.02  # nats, of the parity plot
_LABELS = {"K": "token sparsity K", "L/K": "routed tokens of a sparse layer, L / K"}
_DELTA = "loss minus dense, nats (equal FLOPs)"


@dataclasses.dataclass(frozen=True)
class Points:
    """Points of a parity plot: their name in the legend, observed and predicted Delta [n]."""

    label: str
    observed: Array
    predicted: Array


def figures(
    table: Table,
    law: Law,
    parity_points: Sequence[Points],
    draws: Draws | None = None,
    size: tuple[float, float] = SIZE,
) -> dict[str, Figure]:
    """All figures by file name; those whose sweep is not among the observations are left out.

    Args:
      table: the fitted observations.
      law: the law fitted to them.
      parity_points: what the parity plot shows.
      draws: for bands around the curves.
      size: of a figure with two rows of legend, in inches.
    """
    by_context = _sweep(table, "L", table.n_act)
    drawn = {
        "delta_by_context": curves(by_context, law, "L", "K", draws, size),
        "delta_by_routed_tokens": curves(by_context, law, "L", "L/K", draws, size),
        "delta_by_size": curves(_sweep(table, "n_act", table.L), law, "n_act", "K", draws, size),
        "delta_by_stride": curves(_stride_sweep(table), law, "A", "K", draws, size),
        "parity": parity(parity_points, size),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def curves(
    table: Table,
    law: Law,
    by: str,
    against: str,
    draws: Draws | None = None,
    size: tuple[float, float] = SIZE,
) -> Figure | None:
    """Delta against K or L/K, a curve for each value of a variable; None for an empty table.

    Args:
      table: observations that differ in `by`, K and the N that follows from them.
      law: drawn as lines between the smallest and largest K of a curve.
      by: ``"L"``, ``"n_act"`` or ``"A"``.
      against: ``"K"`` or ``"L/K"``.
      draws: for bands.
      size: in inches, with two rows of legend.
    """
    if not len(table):
        return None
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots()
    column = identifiability.one_size(table.n_act) if by == "n_act" else getattr(table, by)
    values = np.unique(column)
    colors = colormaps["viridis"](np.linspace(0, 0.85, len(values)))
    for index, (value, color) in enumerate(zip(values, colors, strict=True)):
        rows = table.select(column == value)
        written = tables.short(value) if by == "n_act" else tables.number(value)
        look = dataclasses.replace(series.style(index), color=to_hex(color))
        _curve(axes, rows, law, against, look, f"{_name(by)} = {written}", draws)
    axes.axhline(0, color="black", linewidth=0.8, label="dense")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tables.number(x)))
    series.numbers(axes.yaxis)
    axes.set_xlabel(_LABELS[against])
    axes.set_ylabel(_DELTA, fontsize=9)
    axes.grid(alpha=0.25)
    return series.legend(drawn, axes)


def _curve(
    axes: Axes, rows: Table, law: Law, against: str, look: Style, label: str, draws: Draws | None
) -> None:
    order = np.argsort(rows.K, kind="stable")
    rows = rows.select(order)
    scale = rows.L[0] if against == "L/K" else None
    x = lambda K: K if scale is None else scale / K
    marks: dict[str, Any] = {"marker": look.marker, "markersize": 4}
    axes.plot(x(rows.K), rows.delta, color=look.color, linestyle="", **marks)
    # The legend shows the mark and the line together; drawn, one is the data, one the law.
    axes.plot([], [], color=look.color, linestyle=look.line, label=label, **marks)
    K = np.geomspace(rows.K[0], rows.K[-1], 100)
    # N grows linearly with K at a given stride, so between two observations it is known.
    N = np.interp(K, rows.K, rows.n_total)
    at = rows.n_act[0], N, rows.L[0], K, rows.A[0]
    axes.plot(x(K), law.delta(*at), color=look.color, linestyle=look.line, linewidth=1.4)
    if draws is not None:
        low, high = draws.interval(draws.delta(*at))
        axes.fill_between(x(K), low, high, color=look.color, alpha=0.15, linewidth=0)


def parity(points: Sequence[Points], size: tuple[float, float] = SIZE) -> Figure | None:
    """Predicted against observed Delta with the band of +-0.02 nats; None without points."""
    points = [group for group in points if len(group.observed)]
    if not points:
        return None
    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots()
    everything = np.concatenate([np.concatenate([p.observed, p.predicted]) for p in points])
    low, high = everything.min() - BAND, everything.max() + BAND
    line = np.array([low, high])
    axes.fill_between(line, line - BAND, line + BAND, color="grey", alpha=0.2, linewidth=0)
    axes.plot(line, line, color="grey", linewidth=0.8, label=f"equal, ±{BAND:g} nats")
    for index, group in enumerate(points):
        inside = np.mean(np.abs(group.predicted - group.observed) <= BAND)
        axes.plot(
            group.observed,
            group.predicted,
            linestyle="",
            marker=series.style(index).marker,
            markersize=4.5,
            markerfacecolor="none" if index else series.style(index).color,
            color=series.style(index).color,
            label=f"{group.label}: {len(group.observed)}, {inside:.0%} in the band",
        )
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    series.numbers(axes.xaxis)
    series.numbers(axes.yaxis)
    axes.set_xlabel("observed Delta, nats")
    axes.set_ylabel("predicted Delta, nats")
    axes.grid(alpha=0.25)
    return series.legend(drawn, axes)


def write(drawn: Mapping[str, Figure], folder: pathlib.Path) -> list[pathlib.Path]:
    """Saves each figure as ``NAME.png`` and ``NAME.svg``; returns the paths of the PNGs.

    The same figures give the same bytes.
    """
    return [figure_files.save(figure, folder, name) for name, figure in drawn.items()]


def _name(by: str) -> str:
    return {"n_act": "N_act"}.get(by, by)


def _sweep(table: Table, by: str, others: Array) -> Table:
    """A = 1 rows of the one value of `others` with most values of `by`; empty if never two."""
    reference = table.select(identifiability.is_reference_stride(table))
    others = identifiability.one_size(others[identifiability.is_reference_stride(table)])
    values = identifiability.one_size(getattr(reference, by))
    return _widest(reference, values, others)


def _stride_sweep(table: Table) -> Table:
    """Rows of the one N_act and L with most strides; empty if never two."""
    place = np.stack([identifiability.one_size(table.n_act), table.L], axis=1)
    _, places = np.unique(place, axis=0, return_inverse=True)
    return _widest(table, table.A, places.reshape(-1))


def _widest(table: Table, values: Array, places: NDArray) -> Table:
    """The rows of the place with most distinct `values`; none where that is one value."""
    counts = {place: len(np.unique(values[places == place])) for place in np.unique(places)}
    best = max(counts, key=lambda place: counts[place], default=None)
    if best is None or counts[best] < 2:
        return table.select(np.zeros(len(table), bool))
    return table.select(places == best)
