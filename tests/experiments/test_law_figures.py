import dataclasses
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import figure_files, law_figures
from experiments.law_figures import Points
from tests.disk import largest_file
from tests.law.grid import paper_rows
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.terms import Draws, Law

TABLE = Table.of(observe(paper_rows()))
POINTS = Points("fitted", TABLE.delta, TABLE.delta + 0.01)


def _labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def _lines(figure, marked):
    """Curves of points (marked) or of the law."""
    drawn = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    return [line for line in drawn if (line.get_linestyle() == "None") == marked]


def test_curves_are_told_apart_without_colour():
    for name, figure in law_figures.figures(TABLE, Law.paper(), [POINTS, POINTS]).items():
        handles: list[Any] = figure.legends[0].legend_handles
        looks = {(handle.get_marker(), handle.get_linestyle()) for handle in handles}
        assert len(looks) == len(handles), name


def test_every_figure_shows_the_observations_of_its_sweep():
    drawn = law_figures.figures(TABLE, Law.paper(), [POINTS])
    curves = {name: _labels(figure) for name, figure in drawn.items() if name != "parity"}
    assert curves["delta_by_context"][:2] == ["L = 2048", "L = 4096"]
    assert len(curves["delta_by_context"]) == 6 and len(curves["delta_by_size"]) == 5
    assert curves["delta_by_size"][0] == "N_act = 162M"
    assert curves["delta_by_stride"][:3] == ["A = 0.5", "A = 1", "A = 2"]
    assert curves["delta_by_routed_tokens"] == curves["delta_by_context"]
    shown = sum(len(line.get_xdata()) for line in _lines(drawn["delta_by_context"], True))
    assert shown == 51


def test_curves_of_the_law_pass_through_observations_made_from_it():
    figure = law_figures.figures(TABLE, Law.paper(), [POINTS])["delta_by_stride"]
    points = _lines(figure, True)
    for dots, curve in zip(points, _lines(figure, False), strict=False):
        at = np.interp(dots.get_xdata(), curve.get_xdata(), curve.get_ydata())
        np.testing.assert_allclose(at, dots.get_ydata(), atol=5e-4)


def test_routed_tokens_are_the_context_over_K():
    figure = law_figures.figures(TABLE, Law.paper(), [POINTS])["delta_by_routed_tokens"]
    assert set(_lines(figure, True)[0].get_xdata()) == {
        2048 / k for k in (2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20)
    }


def test_parity_counts_the_points_in_the_band():
    far = Points("beyond", np.array([0.0, 0.0]), np.array([0.019, 0.021]))
    figure = law_figures.parity([POINTS, far, Points("none", np.zeros(0), np.zeros(0))])
    labels = _labels(figure)
    assert labels[1:] == ["fitted: 101, 100% in the band", "beyond: 2, 50% in the band"]
    assert law_figures.parity([]) is None


def test_sweeps_that_are_not_there_are_left_out():
    drawn = law_figures.figures(TABLE.select(TABLE.L == 2048), Law.paper(), [POINTS])
    assert set(drawn) == {"parity"}


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_bands_come_from_the_draws(level):
    laws = tuple(dataclasses.replace(Law.paper(), e=e) for e in (0.0, 0.01, 0.03))
    draws = Draws(laws, 0, level, 0.008, 13)
    figure = law_figures.figures(TABLE, Law.paper(), [POINTS], draws)["delta_by_size"]
    assert len(figure.axes[0].collections) == 4


def test_files_are_written_twice_alike(tmp_path):
    written = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        drawn = law_figures.figures(TABLE, Law.paper(), [POINTS])
        paths = law_figures.write({"parity": drawn["parity"]}, folder)
        assert paths == [folder / "parity.png"]
        written.append([(folder / f"parity.{end}").read_bytes() for end in ("png", "svg")])
    assert written[0] == written[1]


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path):
    figure = Figure()
    figure.subplots().plot([0, 1])
    path = figure_files.save(figure, tmp_path, "a")
    before = path.read_bytes()
    with largest_file(100), pytest.raises(OSError):
        figure_files.save(figure, tmp_path, "a")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.png", "a.svg"]
