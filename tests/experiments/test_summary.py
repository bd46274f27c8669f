"""A sweep ends with a table and a figure of loss against K beside the dense reference."""

import dataclasses
import io
from typing import Any

import numpy as np
import pytest

from experiments import registry, summary
from experiments.progress import Display
from experiments.runner import Outcome, run_all
from tests.experiments.fake_training import final_record, loss_of, trainer
from xmod_jax import records


def _axes(figure) -> Any:
    return figure.axes[0]


@pytest.fixture
def swept(tmp_path):
    def run(name, only=None):
        experiment = registry.get(name, "mini")
        runs = experiment.runs if only is None else experiment.select(only)
        run_all(runs, tmp_path, trainer(), Display(runs, io.StringIO()))
        return experiment, tmp_path

    return run


def test_the_table_compares_every_run_with_dense_at_matched_flops(swept):
    experiment, workdir = swept("k_sweep_32k")
    lines = summary.write(experiment, workdir).splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:6]}
    assert list(rows) == [run.name for run in experiment.runs]
    dense, k8 = loss_of(experiment.runs[0]), loss_of(experiment.run("xmod_a1k8"))
    assert rows["xmod_a1k8"][3:9] == [
        f"{k8:.4f}",
        f"{k8 - dense:+.4f}",
        f"{k8 + 0.05:.4f}",
        f"{k8 - 0.02:.4f}",
        "0.900",
        "0.100",
    ]
    assert rows["dense"][4] == "-" and rows["dense"][7:9] == ["-", "-"]
    assert "not causal" in lines[6]


@pytest.mark.parametrize("name", ["k_sweep_32k", "scale_sweep_32k", "main_556m"])
def test_the_figure_is_written_with_one_line_for_each_curve(swept, name):
    experiment, workdir = swept(name)
    summary.write(experiment, workdir)
    assert (workdir / "loss_against_k.png").stat().st_size > 10_000
    assert (workdir / "loss_against_k.svg").read_text().startswith("<?xml")
    axes = _axes(summary.figure(experiment, summary.results(experiment, workdir)))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(axes.lines) == len(labels) and any("dense" in label for label in labels)
    looks = {(line.get_marker(), line.get_linestyle(), line.get_label()) for line in axes.lines}
    assert len(looks) == len(labels)


def _result(run, seed, loss, dense=None):
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, seed=seed))
    return summary.Result(run, {"loss_calibrated": loss}, dense)


def test_seeds_make_one_point_with_its_spread():
    experiment = registry.get("k_sweep_32k", "mini")
    rows = [
        _result(experiment.run(name), seed, loss + 0.1 * seed)
        for name, loss in (("dense", 2.5), ("xmod_a1k4", 2.4), ("xmod_a1k8", 2.3))
        for seed in range(3 if name != "xmod_a1k8" else 1)
    ]
    axes = _axes(summary.figure(experiment, rows))
    (curve,) = axes.containers
    assert list(curve.lines[0].get_xdata()) == [4, 8]
    assert list(curve.lines[0].get_ydata()) == pytest.approx([2.5, 2.3])
    bars = curve.lines[2][0].get_segments()
    assert bars[0][:, 1] == pytest.approx([2.5 - 0.1 / 3**0.5, 2.5 + 0.1 / 3**0.5])
    dense = next(line for line in axes.lines if line.get_label() == "dense")
    assert list(dense.get_ydata()) == pytest.approx([2.6, 2.6])
    assert len(axes.patches) == 1


def test_the_table_has_means_over_seeds_and_differences_paired_by_seed():
    experiment = registry.get("k_sweep_32k", "mini").override(seeds=2)
    losses = {"dense": (2.50, 2.60), "xmod_a1k4": (2.40, 2.52), "xmod_a1k8": (2.30, 2.44)}
    rows = [
        summary.Result(
            run,
            final_record(run) | {"loss_calibrated": losses[run.name][run.train.seed]},
            losses["dense"][run.train.seed],
        )
        for run in experiment.runs
        if run.name in losses
    ]
    lines = summary.table(rows).splitlines()
    assert lines[0].split()[:8] == ["run", "seeds", "K", "A", "loss", "-", "dense", "error"]
    assert lines[1].split()[:6] == ["dense", "2", "1", "0", "2.5500", "-"]
    assert lines[2].split()[:7] == ["xmod_a1k4", "2", "4", "1", "2.4600", "-0.0900", "0.0100"]
    assert lines[3].split()[:7] == ["xmod_a1k8", "2", "8", "1", "2.3700", "-0.1800", "0.0200"]
    # sqrt((0.0141^2 + 0.0283^2) / 2) / sqrt(2)
    assert lines[5].endswith("pooled over the rows it is 0.0158, the largest difference -0.1800")


def test_runs_that_share_a_k_stand_by_themselves(swept):
    experiment, workdir = swept("ablations")
    axes = _axes(summary.figure(experiment, summary.results(experiment, workdir)))
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert labels == {"dense", "X-MoD, A = 1"} | {run.name for run in experiment.runs[2:]}


def test_runs_that_share_a_k_do_not_cover_each_other():
    experiment = registry.get("ablations", "mini")
    axes = _axes(summary.figure(experiment, [_result(run, 0, 2.5) for run in experiment.runs]))
    places = [float(curve.lines[0].get_xdata()[0]) for curve in axes.containers]
    assert len(set(places)) == len(places) == 5
    assert all(abs(np.log2(place / 16)) < 0.15 for place in places)


def test_only_runs_of_one_stride_are_joined():
    experiment = registry.get("mechanism_controls", "mini")
    axes = _axes(summary.figure(experiment, [_result(run, 0, 2.5) for run in experiment.runs]))
    assert len(axes.containers) == 6
    assert all(len(curve.lines[0].get_xdata()) == 1 for curve in axes.containers)


def test_very_many_runs_of_one_k_share_an_entry_of_the_legend():
    experiment = registry.get("k_sweep_32k", "mini")
    run = experiment.run("xmod_a1k8")
    rows = []
    for number in range(100):
        train = dataclasses.replace(run.train, alignment=0.001 * (number + 1))
        rows.append(_result(dataclasses.replace(run, train=train), 0, 2.5))
    axes = _axes(summary.figure(experiment, rows))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["X-MoD, A = 1"]
    assert axes.containers[0].lines[0].get_linestyle() == "None"


def test_a_seed_is_compared_with_the_dense_run_of_its_own():
    experiment = registry.get("k_sweep_32k", "mini")
    finished = []
    for seed, loss in ((0, 2.5), (1, 2.7)):
        for run in experiment.override(seed=seed).select(["dense", "xmod_a1k8"]):
            final = final_record(run) | {"loss_calibrated": loss}
            finished.append((run, final))
    alone = experiment.override(seed=2).run("xmod_a1k8")
    results = summary.compare([*finished, (alone, final_record(alone))])
    assert [result.dense_loss for result in results] == [2.5, 2.5, 2.7, 2.7, None]


def test_no_number_is_written_as_a_machine_does():
    experiment = registry.get("k_sweep_32k", "paper")
    run = experiment.run("xmod_a1k8")
    final = final_record(run) | {"coverage": None, "jaccard": None, "tokens": 1.88e18}
    row = summary.table([summary.Result(run, final, None)]).splitlines()[1].split()
    assert row[-4:] == ["-", "-", "1.88e18", "1e20"]


def test_unfinished_sweeps_show_what_they_have(swept):
    experiment, workdir = swept("k_sweep_32k", only=["xmod_a1k4"])
    assert [result.run.name for result in summary.results(experiment, workdir)] == ["xmod_a1k4"]
    row = summary.write(experiment, workdir).splitlines()[1].split()
    assert row[0] == "xmod_a1k4" and row[4] == "-"


def test_a_sweep_without_a_finished_run_says_so(tmp_path):
    experiment = registry.get("k_sweep_32k", "mini")
    records.prepare(tmp_path / "dense", experiment.run("dense"))
    (tmp_path / "xmod_a1k2").mkdir()
    assert summary.write(experiment, tmp_path) == "no run is finished yet"


def test_the_report_names_failed_and_running_runs_and_sets_the_status(swept, capsys):
    experiment, workdir = swept("k_sweep_32k")
    assert summary.report(experiment, workdir, Outcome()) == 0
    assert summary.report(experiment, workdir, Outcome(failed={"dense": "NaN"})) == 1
    # There is something to come back for.
    outcome = Outcome(failed={"xmod_a1k2": "NaN at step 3"}, held={"dense": "host process 7"})
    assert summary.report(experiment, workdir, outcome) == 75
    told = capsys.readouterr().err
    assert "xmod_a1k2 failed: NaN at step 3 (--retry_failed" in told
    assert "dense is still running: host process 7" in told
