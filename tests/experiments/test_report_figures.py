"""A figure of each kind from made-up records: legible, with units, told apart without colour."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.container import BarContainer, ErrorbarContainer

from experiments import diagnostics_figure, law_figures, registry, report_figures, summary
from experiments import report_data as data
from tests.law.grid import paper_rows
from tests.law.sweep_directories import write_run, write_sweeps
from xmod_jax import records, storage
from xmod_jax.diagnostics import Diagnostics, Intervals, independent_subsets
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.terms import Law


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """Every sweep of the law and a main comparison of three seeds, with training curves."""
    root = tmp_path_factory.mktemp("sweeps")
    folders = write_sweeps(root)
    for seed in range(3):
        experiment = registry.get("main_556m", "mini").override(seed=seed)
        for config in experiment.runs:
            directory = root / f"main{seed}" / config.name
            write_run(directory, config, shift=0.01 * seed)
            for step in range(1, 20):
                record = {"step": step, "tokens": 1000 * step, "loss": 2.5 + 3 / step}
                storage.append(directory / records.TRAIN, record)
        folders.append(root / f"main{seed}")
    sweeps = data.load([str(folder) for folder in folders])
    main = next(sweep for sweep in sweeps if sweep.experiment == "main_556m")
    return {"all": data.together(sweeps), "main": main.finished}


def _diagnostics():
    updates = tuple(int(1e6 * share) for share in independent_subsets(32, 8).updates)
    passes = (Intervals(32, 4, 0.6, 0.1, updates),)
    return Diagnostics(8, 8, passes, passes, 0.9)


def _law(name):
    table = Table.of(observe(paper_rows()))
    points = [law_figures.Points(label, table.delta, table.delta) for label in ("a", "b", "c")]
    return law_figures.figures(table, Law.paper(), points, size=report_figures.SIZE)[name]


def _summary(name):
    experiment = registry.get(name, "mini")
    rows = [
        summary.Result(run, {"loss_calibrated": 2.5 + 0.01 * index + 0.02 * seed}, None)
        for seed in range(3)
        for index, run in enumerate(experiment.override(seed=seed).runs)
    ]
    return summary.figure(experiment, rows)


KINDS: dict[str, Callable[[Any], Any]] = {
    "all_0": lambda c: report_figures.against_sparsity(c["all"])[0][0],
    "all_1": lambda c: report_figures.against_sparsity(c["all"])[1][0],
    "all_2": lambda c: report_figures.against_sparsity(c["all"])[2][0],
    "main": lambda c: report_figures.against_sparsity(c["main"])[0][0],
    "routed_tokens": lambda c: report_figures.against_routed_tokens(c["all"]),
    "active": lambda c: report_figures.against_active(c["all"]),
    "stride": lambda c: report_figures.against_stride(c["all"]),
    "total": lambda c: report_figures.against_total(c["all"]),
    "total_main": lambda c: report_figures.against_total(c["main"]),
    "training": lambda c: report_figures.training_curves(c["main"]),
    "summary_k": lambda _: _summary("k_sweep_32k"),
    "summary_scale": lambda _: _summary("scale_sweep_32k"),
    "summary_main": lambda _: _summary("main_556m"),
    "summary_ablations": lambda _: _summary("ablations"),
    "summary_lr": lambda _: _summary("lr_sweep"),
    "parity": lambda _: _law("parity"),
    "delta_by_context": lambda _: _law("delta_by_context"),
    "delta_by_routed_tokens": lambda _: _law("delta_by_routed_tokens"),
    "delta_by_size": lambda _: _law("delta_by_size"),
    "updates": lambda _: diagnostics_figure.figure({"xmod_a4k8": _diagnostics()}, columns=1),
}


def _box(text):
    box = text.get_window_extent()
    return box.x0, box.x1, box.y0, box.y1


def _look(handle: Any) -> tuple[object, ...]:
    """All of an entry's looks but its colour."""
    if isinstance(handle, BarContainer):
        return "bar", handle[0].get_hatch()
    line: Any = handle.lines[0] if isinstance(handle, ErrorbarContainer) else handle
    # Matplotlib keeps the pattern of dashes apart from the style's name.
    return line.get_marker(), line.get_linestyle(), str(line._unscaled_dash_pattern)


def _apart(boxes, low, high):
    ordered = sorted((box[low], box[high]) for box in boxes)
    return all(left[1] <= right[0] for left, right in itertools.pairwise(ordered))


@pytest.mark.parametrize("kind", KINDS)
def test_labels_neither_overlap_nor_leave_the_figure(kind, configurations):
    figure = KINDS[kind](configurations)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    ticks = {}
    for axis, low, high in ((axes.xaxis, 0, 1), (axes.yaxis, 2, 3)):
        ends = sorted(axis.get_view_interval())
        ticks[axis] = [
            _box(tick.label1)
            for tick in axis.get_major_ticks()
            if tick.label1.get_text() and ends[0] <= tick.get_loc() <= ends[1]
        ]
        assert _apart(ticks[axis], low, high), axis.axis_name
        written = [label.get_text() for label in axis.get_ticklabels()]
        assert not any("e+" in text or "nan" in text for text in written)
    legends = [*figure.legends, *filter(None, [axes.get_legend()])]
    texts = [axes.xaxis.label, axes.yaxis.label, axes.title]
    boxes = [_box(text) for text in [*texts, *legends] if text.get_window_extent().width]
    width, height = figure.bbox.width, figure.bbox.height
    for left, right, bottom, top in [*boxes, *itertools.chain(*ticks.values())]:
        assert left >= -1 and right <= width + 1 and bottom >= -1 and top <= height + 1


@pytest.mark.parametrize("kind", KINDS)
def test_axes_name_their_units_and_series_differ_without_colour(kind, configurations):
    figure = KINDS[kind](configurations)
    (axes,) = figure.axes
    assert "nats" in axes.get_ylabel() or axes.get_ylabel() == "share of tokens"
    assert axes.get_xlabel()
    assert (figure.legends or [axes.get_legend()])[0].get_texts()
    handles, _ = axes.get_legend_handles_labels()
    looks = list(map(_look, handles))
    assert len(set(looks)) == len(looks) > 0


def test_means_over_seeds_have_their_standard_error(configurations):
    figure = report_figures.against_total(configurations["main"])
    assert figure is not None
    series: list[Any] = list(figure.axes[0].containers)
    assert len(series) == 6
    for curve in series:
        ((bar,),) = (part.get_segments() for part in curve.lines[2])
        assert np.ptp(bar[:, 1]) == pytest.approx(2 * 0.01 / 3**0.5)
