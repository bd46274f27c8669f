"""A sweep ends with a table and a figure of loss against K beside the dense reference."""

import io

import pytest

from experiments import registry, summary
from experiments.progress import Display
from experiments.runner import Outcome, run_all
from tests.experiments.fake_training import loss_of, trainer
from xmod_jax import records


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
def test_the_figure_is_written_with_dense_and_all_three_losses(swept, name):
    experiment, workdir = swept(name)
    summary.write(experiment, workdir)
    assert (workdir / "loss_against_k.png").stat().st_size > 10_000
    assert (workdir / "loss_against_k.svg").read_text().startswith("<?xml")
    axes = summary.figure(experiment, summary.results(experiment, workdir)).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    texts = " | ".join(text.get_text() for text in legend.get_texts())
    for expected in ("dense", "calibrated threshold", "threshold 0.5", "top-k (not causal)"):
        assert expected in texts


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
