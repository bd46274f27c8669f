"""`python -m experiments.diagnose`: files, table, figure, and refusals in one line."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil

import numpy as np
import pytest

from experiments import diagnostics_figure, report_diagnostics
from tests.experiments.commands import run_command
from tests.experiments.many import run_many
from tests.training import small
from xmod_jax import claims, records
from xmod_jax.config import DataConfig
from xmod_jax.data import sources
from xmod_jax.diagnostics import Diagnostics, Intervals, independent_subsets
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord
from xmod_jax.training import loop


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sweep directory with one trained X-MoD run."""
    root = tmp_path_factory.mktemp("sweep")
    config = dataclasses.replace(small.run(steps=2, eval_every=0), name="xmod_a1k4")
    with claims.claim(root / config.name):
        loop.train(config, root / config.name, lambda progress: None)
    return root


_run = functools.partial(run_command, "diagnose")


def test_a_trained_run_gets_its_file_table_and_figure(trained):
    done = _run(f"--workdir={trained}", "--sequences=8")
    assert done.returncode == 0, done.stderr
    # Two batches of four: how far it is and how long it takes, before it ends.
    assert re.search(r"\[1/1\] xmod_a1k4 +50%\|.*4/8 sequences, \S+ left", done.stderr)
    assert "8/8 sequences, 00:00 left" in done.stderr
    run = RunRecord.load(trained / "xmod_a1k4")
    stored = json.loads((run.directory / "diagnostics.json").read_text())
    assert stored["hash"] == run.hash and stored["step"] == 2
    found = report_diagnostics.read(run.directory)
    assert found is not None and found.sequences == run.config.train.eval_sequences
    (intervals,) = found.calibrated
    assert intervals.layers == 4 and intervals.count == 1
    assert sum(intervals.updates) == found.sequences * run.config.train.context_length
    # The same model on the same tokens as the run's own last evaluation.
    final = run.final
    assert final is not None
    assert intervals.coverage == pytest.approx(final["coverage"], abs=1e-5)
    assert found.threshold[0].coverage == pytest.approx(final["coverage_threshold"], abs=1e-5)
    assert found.agreement == pytest.approx(final["agreement"], abs=1e-5)
    row = done.stdout.splitlines()[1].split()
    assert row[:4] == ["xmod_a1k4", "4", "1", "calibrated"]
    assert f"{100 * (1 - 0.75**4):.2f}" in row
    for ending in ("png", "svg"):
        assert (trained / f"update_counts.{ending}").stat().st_size > 5_000


def test_data_that_moved_are_known_by_their_content(trained, tmp_path):
    run = RunRecord.load(trained / "xmod_a1k4")
    moved = dataclasses.replace(run.config, data=DataConfig("/moved/away", run.config.data.hash))
    run = dataclasses.replace(run, config=moved)
    with pytest.raises(UserError, match="no such data"):
        report_diagnostics.measure(run)
    found, _ = report_diagnostics.measure(run, source="embedded=1")
    assert found.sequences == run.config.train.eval_sequences
    other = dataclasses.replace(run.config, data=DataConfig("embedded", "0123456789abcdef"))
    with pytest.raises(UserError, match="other content"):
        report_diagnostics.measure(dataclasses.replace(run, config=other), source="embedded")


def test_a_run_in_training_is_measured_and_left_alone(trained):
    run = RunRecord.load(trained / "xmod_a1k4")
    damaged = run.directory / records.CHECKPOINTS / "99"
    damaged.mkdir()
    before = sorted(run.directory.rglob("*"))
    with claims.claim(run.directory):
        _, step = report_diagnostics.measure(run)
    assert step == run.config.train.steps
    assert sorted(run.directory.rglob("*")) == before
    damaged.rmdir()


def test_nothing_to_diagnose_is_one_line(tmp_path):
    config = small.run("dense")
    records.prepare(tmp_path / "dense", config)
    records.prepare(tmp_path / "A1K4", small.run())
    refused = _run(f"--workdir={tmp_path}")
    assert refused.returncode == 2
    lines = refused.stderr.strip().splitlines()
    assert "dense: it has no sparse layer" in refused.stderr
    assert "A1K4: it has no checkpoint" in refused.stderr
    assert [line for line in lines if line.startswith("error")] == lines[-1:]
    missing = _run(f"--workdir={tmp_path / 'nowhere'}")
    assert missing.returncode == 2 and len(missing.stderr.strip().splitlines()) == 1


def test_flags_and_folders_of_any_kind_end_in_one_line(trained, tmp_path):
    (tmp_path / "file").write_text("no folder")
    broken = tmp_path / "broken"
    shutil.copytree(trained / "xmod_a1k4", broken)
    (broken / records.CONFIG).write_text("{")
    empty = tmp_path / "empty"
    shutil.copytree(trained / "xmod_a1k4", empty)
    for path in (empty / records.CHECKPOINTS).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    cases = [
        ([], "--workdir is missing"),
        ([f"--workdir={tmp_path / 'file'}"], "file"),
        ([f"--workdir={tmp_path / 'nowhere'}"], "nowhere"),
        ([f"--workdir={broken}"], "config.json"),
        ([f"--workdir={empty}"], "checkpoint"),
        ([f"--workdir={trained},,"], "empty part"),
        ([f"--workdir={trained}", "--sequences=0"], "sequences"),
        ([f"--workdir={trained}", "--sequences=many"], "sequences"),
        ([f"--workdir={trained}", "extra"], "unexpected argument"),
    ]
    for said, (arguments, text) in zip(
        run_many("diagnose", [arguments for arguments, _ in cases]), cases, strict=True
    ):
        assert said.status == 2 and text in said.last, (arguments, said)
        assert "Traceback" not in said.stderr


def test_more_sequences_than_there_are_is_said(trained, monkeypatch, capsys):
    """And the time that is left is that of those there are."""
    run = RunRecord.load(trained / "xmod_a1k4")
    whole = sources.load(run.config.data)
    assert isinstance(whole, sources.Dataset)
    short = dataclasses.replace(whole, heldout=whole.heldout[:100])
    monkeypatch.setattr(sources, "load", lambda data: short)
    found, _ = report_diagnostics.measure(run, 1000)
    told = capsys.readouterr().err
    assert found.sequences == 6  # of 16 tokens, and a target behind the last
    assert "the held-out data has 6 sequences, not 1000" in told
    assert "6/6 sequences, 00:00 left" in told


def test_half_written_checkpoints_are_none(tmp_path):
    config = small.run()
    records.prepare(tmp_path, config)
    (tmp_path / records.CHECKPOINTS / "2.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(UserError, match="no whole checkpoint"):
        report_diagnostics.measure(RunRecord.load(tmp_path))


def test_a_broken_file_is_named(tmp_path):
    assert report_diagnostics.read(tmp_path) is None
    (tmp_path / "diagnostics.json").write_text('{"sparsity": 4}')
    with pytest.raises(UserError, match=r"diagnostics\.json: not diagnostics"):
        report_diagnostics.read(tmp_path)


def _diagnostics(layers: int, sparsity: int) -> Diagnostics:
    updates = tuple(int(share * 1e6) for share in independent_subsets(layers, sparsity).updates)
    intervals = (Intervals(layers, 2, 0.6, 0.03, updates),)
    return Diagnostics(sparsity, 8, intervals, intervals, 0.98)


def test_shares_stand_at_whole_numbers_of_updates_alone():
    found = _diagnostics(16, 16)
    axes = diagnostics_figure.figure({"a": found}).axes[0]
    calibrated, threshold = axes.containers
    for bars, intervals in ((calibrated, found.calibrated[0]), (threshold, found.threshold[0])):
        middles = [bar.get_x() + bar.get_width() / 2 for bar in bars]
        assert [round(middle) for middle in middles] == list(range(17))
        assert [bar.get_height() for bar in bars] == pytest.approx(list(intervals.shares))
    (independent,) = axes.lines
    assert np.asarray(independent.get_xdata()).tolist() == list(range(17))
    assert independent.get_linestyle() == "None"


def test_a_panel_for_each_model_and_length_told_apart_without_colour():
    short = _diagnostics(8, 4)
    both = dataclasses.replace(
        short,
        calibrated=(*_diagnostics(16, 4).calibrated, *short.calibrated),
        threshold=(*_diagnostics(16, 4).threshold, *short.threshold),
    )
    figure = diagnostics_figure.figure({"a": _diagnostics(16, 16), "$_b": both})
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == ["a, K = 16, T = 16", r"\$_b, K = 4, T = 16", r"\$_b, K = 4, T = 8"]
    for axes in figure.axes[:3]:
        assert [bars[0].get_hatch() for bars in axes.containers] == [None, "////"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels) == ["calibrated threshold", "independent (binomial)", "threshold 0.5"]


def test_collapse_is_visible_at_both_ends():
    updates = np.zeros(17)
    updates[[0, 16]] = 0.9, 0.1
    assert diagnostics_figure.last_visible(updates) == 16
    assert diagnostics_figure.last_visible(independent_subsets(48, 16).updates) < 12
