"""What figures have in common: looks, means over seeds, axes and labels that people can read."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from experiments import series
from experiments.spread import Spread


def _axes():
    drawn = Figure()
    return drawn, drawn.subplots()


def _ticks(axis):
    return axis.get_major_formatter().format_ticks(axis.get_majorticklocs())


def test_every_series_has_a_mark_and_a_line_of_its_own():
    looks = [series.style(index) for index in range(44)]
    assert len({(look.marker, look.line) for look in looks}) == 44
    assert len({look.marker for look in looks[:11]}) == 11
    assert len({look.color for look in looks[:7]}) == 7
    assert series.DENSE.marker not in {look.marker for look in looks}


def test_colours_are_legible_on_white():
    for index in range(7):
        red, green, blue = to_rgb(series.style(index).color)
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.7


def test_a_series_shows_means_standard_errors_and_every_seed():
    _, axes = _axes()
    spreads = [Spread((2.0, 2.2)), Spread((3.0,))]
    series.means(axes, [4, 8], spreads, series.style(0), "X-MoD")
    (container,) = axes.containers
    line = container.lines[0]
    assert list(line.get_xdata()) == [4, 8] and list(line.get_ydata()) == [2.1, 3.0]
    (bars,) = container.lines[2]
    low, high = sorted(bars.get_segments()[0][:, 1])
    assert (low, high) == pytest.approx((2.0, 2.2))  # deviation 0.1414, of two seeds 0.1
    singles = axes.lines[-1]
    assert sorted(singles.get_ydata()) == [2.0, 2.2] and set(singles.get_xdata()) == {4}
    assert singles.get_markersize() < line.get_markersize()


def test_single_seeds_have_neither_bars_nor_small_marks():
    _, axes = _axes()
    series.means(axes, [4, 8], [Spread((2.0,)), Spread((3.0,))], series.style(0), "X-MoD")
    assert len(axes.lines) == 1 and not axes.containers[0].has_yerr


def test_a_dense_level_has_a_band_of_its_standard_error():
    _, axes = _axes()
    series.level(axes, Spread((2.0, 2.2)), series.DENSE, "dense")
    assert list(axes.lines[0].get_ydata()) == [2.1, 2.1]
    (band,) = axes.patches
    ends = band.get_extents().transformed(axes.transData.inverted())
    assert (ends.y0, ends.y1) == pytest.approx((2.0, 2.2))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("xmod_a1k8", "xmod_a1k8"),
        ("$\\frac{$ costs $5", r"\$\frac{\$ costs \$5"),
        ("_hidden", " _hidden"),
        ("two\nlines\x00", "two lines "),
        ("\ud800", " "),
        ("x" * 300, "x" * 24 + "…" + "x" * 15),
    ],
)
def test_any_name_is_a_label(name, shown):
    assert series.plain(name) == shown
    drawn, axes = _axes()
    axes.plot([1], [1], "o", label=series.plain(name))
    assert len(series.legend(drawn, axes).legends[0].get_texts()) == 1
    drawn.savefig(io.BytesIO(), format="svg")


@pytest.mark.parametrize(
    ("losses", "ticks"),
    [
        ((2.5, 2.5), "2.5000"),
        ((2.5, 2.5 + 1e-9), "2.5000"),
        ((1e9, 1.4e9), "1.2e9"),
        ((0.0, 0.0), "0.0000"),
        ((-0.4, 0.4), "0.0"),
        ((9e4, 9.5e4), "92000"),
    ],
)
def test_the_loss_axis_reads_as_people_write(losses, ticks):
    drawn, axes = _axes()
    spreads = [Spread((loss,)) for loss in losses]
    series.means(axes, range(1, len(losses) + 1), spreads, series.style(0), "a")
    series.frame(axes, spreads)
    drawn.draw_without_rendering()
    written = _ticks(axes.yaxis)
    assert ticks in written and len(set(written)) == len(written)
    assert not any("e+" in tick or not tick.isascii() for tick in written)
    assert axes.yaxis.get_offset_text().get_text() == ""


def test_a_diverged_run_does_not_press_the_others_together():
    _, axes = _axes()
    spreads = [Spread((loss,)) for loss in (2.3, 2.5, 9000.0)]
    series.means(axes, [2, 4, 8], spreads, series.style(0), "a")
    series.frame(axes, spreads)
    assert axes.get_ylim()[1] < 2.6
    assert [text.get_text() for text in axes.texts] == ["1 above the figure, up to 9000"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([8], ["8"]),
        ([2, 4, 8, 16], ["2", "4", "8", "16"]),
        ([3, 7, 100], ["3", "7", "100"]),
        ([2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20], None),
        (list(range(2, 130)), None),
    ],
)
def test_ticks_of_k_are_given_ones_that_do_not_collide(values, shown):
    drawn, axes = _axes()
    series.sparsities(axes, values)
    drawn.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    if shown is not None:
        assert sorted(labels, key=int) == shown
    assert {int(label) for label in labels} <= set(values)
    assert {str(min(values)), str(max(values))} <= set(labels)
    boxes = sorted(tuple(x.get_window_extent().intervalx) for x in axes.get_xticklabels())
    assert all(left[1] < right[0] for left, right in itertools.pairwise(boxes))


@pytest.mark.parametrize(("count", "length"), [(3, 5), (12, 12), (7, 40), (1, 40)])
def test_a_legend_fits_below_its_figure(count, length):
    drawn = Figure(figsize=(4.2, 3.6), layout="constrained")
    axes = drawn.subplots()
    for index in range(count):
        axes.plot([1], [1], label=f"{index}".ljust(length, "x"))
    series.legend(drawn, axes)
    drawn.draw_without_rendering()
    box = drawn.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= drawn.bbox.width + 1
    assert axes.get_window_extent().height > 1.5 * drawn.dpi
    assert not np.isnan(axes.get_ylim()).any()
