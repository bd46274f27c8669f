"""The report: complete, self-contained, escaped; one run, several seeds, none finished."""

from __future__ import annotations

import dataclasses
import functools
import html
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from experiments import registry, report_content, report_figures, runner
from experiments import report_data as data
from experiments.progress import Display
from tests.experiments.commands import ROOT, run_command
from tests.experiments.fake_training import fake_train, loss_of, trainer
from tests.law.sweep_directories import MINI_LAW, write_sweeps
from xmod_jax import records, storage
from xmod_jax.config import DataConfig, SparseStart, Start
from xmod_jax.diagnostics import Diagnostics, Intervals
from xmod_jax.errors import UserError
from xmod_jax.law.terms import LawFile

OUTSIDE = re.compile(r"(?:src|href|url|@import)\W{0,3}(?:https?:)?//", re.IGNORECASE)


def _sweep(folder, name, seed=0, only=(), failing=()):
    experiment = registry.get(name, "mini").override(seed=seed)
    runner.write_sweep(experiment, folder)
    runs = experiment.select(only)
    runner.run_all(runs, folder, trainer(failing=failing), Display(runs, io.StringIO()))
    return str(folder)


def _page(*folders, laws=()):
    return report_content.build(data.load(folders), laws)


def _text(page):
    return html.unescape(re.sub(r"<[^>]*>", " ", page))


def _titles(page):
    return re.findall(r'<svg role="img" aria-label="([^"]*)"', page)


@pytest.mark.parametrize(
    "name", ["main_556m", "mechanism_controls", "ablations", "lr_sweep", "deep_sweep"]
)
def test_every_run_of_every_architecture_is_in_the_table(name, tmp_path):
    page = _page(_sweep(tmp_path / "w", name))
    for run in registry.get(name, "mini").runs:
        row = re.search(rf'<th scope="row">{re.escape(run.name)}</th>(.*?)</tr>', page)
        assert row and f"{loss_of(run):.4f}" in row[1]
        assert f"--run={run.name}" in page
    for part in ("mini scale", "embedded", "--experiment=" + name, f"--workdir={tmp_path}/w"):
        assert part in page


def test_the_page_asks_for_nothing_and_its_ids_are_unique(tmp_path):
    page = _page(_sweep(tmp_path / "w", "main_556m"))
    assert not OUTSIDE.search(re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert not re.search(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    for word in ("<script", "<link", "<img", "<iframe", "<metadata", "<?xml", "<!DOCTYPE svg"):
        assert word not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)
    assert {ref for ref in re.findall(r'(?:url\(|href=")#([\w.-]+)', page)} <= set(ids)
    assert "prefers-color-scheme:dark" in page and 'name="viewport"' in page
    # Every colour of a figure has a value in both modes.
    for color in set(re.findall(r"var\((--f-\w+)\)", page)):
        assert page.count(f"{color}:#") == 2


def test_moe_is_compared_with_dense_at_equal_flops(tmp_path):
    (sweep,) = data.load([_sweep(tmp_path / "w", "main_556m")])
    reference, *others = sweep.configurations
    assert reference.name == "dense" and reference.delta is None
    assert {c.config.architecture for c in others} == {"mod", "moe", "xmod"}
    for configuration in others:
        expected = loss_of(configuration.config) - loss_of(reference.config)
        assert configuration.delta is not None
        assert configuration.delta.mean == pytest.approx(expected)


def test_seeds_become_mean_and_spread(tmp_path):
    folders = [_sweep(tmp_path / f"w{seed}", "k_sweep_32k", seed) for seed in (0, 1)]
    path = tmp_path / "w1" / "xmod_a1k8"
    shifted = json.loads((path / records.EVAL).read_text()) | {"loss_calibrated": 2.2}
    (path / records.EVAL).write_text(json.dumps(shifted) + "\n")
    records.mark_done(path, shifted)
    (sweep,) = data.load(folders)
    found = {c.name: c for c in sweep.configurations}
    assert len(found) == len(registry.get("k_sweep_32k", "mini").runs)
    loss = found["xmod_a1k8"].loss
    assert loss is not None and loss.mean == pytest.approx(2.1)
    assert loss.deviation == pytest.approx(0.2 / 2**0.5)
    text = _text(report_content.build([sweep]))
    assert "2.1000 ± 0.1414" in text and "0, 1" in text
    assert "--seed=0" in text and "--seed=1" in text


def test_the_same_training_in_two_folders_counts_once(tmp_path):
    folders = [_sweep(tmp_path / name, "k_sweep_32k") for name in ("a", "b")]
    (sweep,) = data.load(folders)
    assert sweep.repeated == len(sweep.configurations)
    assert all(len(c.results) == 1 for c in sweep.configurations)


def test_failed_and_missing_runs_are_named_with_their_reason(tmp_path):
    folder = _sweep(
        tmp_path / "w", "k_sweep_32k", only=["dense", "xmod_a1k2"], failing=["xmod_a1k2"]
    )
    text = _text(_page(folder))
    assert "xmod_a1k2: failed: loss is not finite at step 2" in text
    assert "not started: xmod_a1k4, xmod_a1k8, xmod_a1k16" in text
    assert "1 of 5 finished" in text


def test_one_run_is_enough(tmp_path):
    _sweep(tmp_path / "w", "k_sweep_32k", only=["xmod_a1k4"])
    page = _page(str(tmp_path / "w" / "xmod_a1k4"))
    assert "xmod_a1k4" in page and report_content.NOTHING not in page


def test_without_a_finished_run_one_line_says_so(tmp_path):
    experiment = registry.get("k_sweep_32k", "mini")
    records.prepare(tmp_path / "dense", experiment.run("dense"))
    storage.append(tmp_path / "dense" / records.TRAIN, {"step": 7, "tokens": 7, "loss": 3.0})
    text = _text(_page(str(tmp_path)))
    assert text.count(report_content.NOTHING) == 1
    assert f"dense: unfinished, step 7 of {experiment.run('dense').train.steps}" in text


def test_names_are_escaped(tmp_path):
    folder = tmp_path / "<b>&'\"w"
    _sweep(folder, "k_sweep_32k", only=["dense", "xmod_a1k2"])
    records.clear_failed(folder / "xmod_a1k2")
    (folder / "xmod_a1k2" / records.DONE).unlink()
    records.mark_failed(folder / "xmod_a1k2", "<script>alert(1)</script>")
    page = _page(str(folder))
    assert "<script" not in page and "<b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_figures_that_several_sweeps_allow_stand_first(tmp_path):
    folders = [str(path) for path in write_sweeps(tmp_path)]
    page = _page(*folders)
    together = page[: page.index("k_sweep_2k, mini scale</h2>")]
    for title in (
        "K for each L;",
        "K for each A;",
        "K for each backbone;",
        "L/K",
        "active-equivalent",
        "stride A",
        "total parameters",
    ):
        assert any(title in found for found in _titles(together)), title
    assert len(re.findall(r"<section", page)) == len(folders) + 1


def _legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_differ_in_one_thing_alone(tmp_path):
    sweeps = data.load([str(path) for path in write_sweeps(tmp_path)])
    everything = data.together(sweeps)
    by_context, by_stride, by_size = (f for f, _ in report_figures.against_sparsity(everything))
    lengths = sorted({c.context for c in everything})
    assert _legend(by_context)[-5:] == [f"L = {length}" for length in lengths]
    assert _legend(by_stride)[1:] == [f"A = {a}" for a in ("0.5", "1", "2", "3", "4", "5")]
    assert len(_legend(by_size)) == 5
    stride = report_figures.against_stride(everything)
    assert stride is not None and _legend(stride)[1:] == [f"K = {k}" for k in (4, 8, 12, 16)]
    size = report_figures.against_active(everything)
    assert size is not None and _legend(size)[0] == "dense"


def test_law_and_diagnostics_are_shown_where_they_are(tmp_path):
    folders = [str(path) for path in write_sweeps(tmp_path)]
    law = tmp_path / "k_sweep_2k" / "law.json"
    LawFile(MINI_LAW, 0.99, 0.001, 0.001, 47, {"L": (32.0, 256.0)}).save(law)
    counts = (5, 3, 2)
    passes = (Intervals(2, 4, 0.5, 0.25, counts),)
    record = Diagnostics(2, 10, passes, passes, 0.9).record()
    storage.write_json(tmp_path / "k_sweep_2k" / "xmod_a1k2" / "diagnostics.json", record)
    page = _page(*folders, laws=[law])
    assert "Scaling law" in page and "0.99" in page
    assert any("Predicted against observed" in title for title in _titles(page))
    assert any("Updates of a token: xmod_a1k2" in title for title in _titles(page))
    assert "90.00" in page and "25.00" in page


def test_runs_of_an_older_definition_are_pointed_out(tmp_path):
    folder = tmp_path / "w"
    _sweep(folder, "k_sweep_32k", only=["dense"])
    assert "differs from what trained" not in _page(str(folder))
    run = registry.get("k_sweep_32k", "mini").run("dense")
    older = dataclasses.replace(run, train=dataclasses.replace(run.train, alignment=0.5))
    records.prepare(folder / "older" / "dense", older)
    assert "differs from what trained" in _page(str(folder / "older"))


def test_rerun_commands_carry_what_changes_the_run(tmp_path):
    plain = registry.get("k_sweep_32k", "mini")
    run = plain.override(seed=3, keep_products=True, budget=0.7).run("xmod_a1k4")
    start = Start("/runs/the dense", "0123456789abcdef", 8, SparseStart.COPIED)
    records.prepare(tmp_path / run.name, dataclasses.replace(run, start=start))
    page = html.unescape(_page(str(tmp_path)))
    assert "differs from what trained" not in page
    sweep, single = (
        line for line in page.splitlines() if f"--workdir={tmp_path}" in line and "--seed" in line
    )
    for command in (sweep, single):
        for flag in ("--seed=3", "--keep_products=true", "--budget=0.7"):
            assert flag in command
    assert "--start_from='/runs/the dense' --start_sparse=copied" in single
    assert "--run=xmod_a1k4" in single and "--start_from" not in sweep


def test_data_of_other_content_are_told_and_never_compared(tmp_path):
    folder = tmp_path / "w"
    dense, sparse = registry.get("k_sweep_32k", "mini").override(data="prep").runs[:2]
    for run, content in ((dense, "a" * 16), (sparse, "b" * 16)):
        run = dataclasses.replace(run, data=DataConfig("prep", content))
        fake_train(run, folder / run.name, lambda _: None)
    (sweep,) = data.load([str(folder)])
    assert [configuration.delta for configuration in sweep.finished] == [None, None]
    assert "losses on different texts" in _page(str(folder))


def test_faulty_files_beside_the_runs_are_named(tmp_path):
    folder = tmp_path / "w"
    _sweep(folder, "k_sweep_32k", only=["dense", "xmod_a1k2"])
    for path, content in (
        (folder / records.SWEEP, '{"experiment": "k_sweep_32k", "scale": "mini", "runs": [3]}'),
        (folder / "xmod_a1k2/diagnostics.json", '{"calibrated": []}'),
        (folder / "xmod_a1k2/diagnostics.json", "[]"),
        (folder / "dense" / records.DONE, '{"final": {"step": 1, "flops": 0}}'),
    ):
        before = path.read_text() if path.exists() else None
        path.write_text(content)
        with pytest.raises(UserError, match=path.name):
            _page(str(folder))
        if before is None:
            path.unlink()
        else:
            path.write_text(before)


_command = functools.partial(run_command, "report")


def test_a_folder_whose_name_is_not_utf8_is_reported(tmp_path):
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    _sweep(folder, "k_sweep_32k", only=["dense"])
    done = subprocess.run(
        [sys.executable, "-m", "experiments.report", b"--workdir=" + os.fsencode(folder)],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert b"1 of 1 runs finished" in done.stdout
    assert "dense" in (folder / "report.html").read_text(encoding="utf-8")


def test_the_command_writes_the_page_and_refuses_in_one_line(tmp_path):
    folder = _sweep(tmp_path / "w", "k_sweep_32k", only=["dense"])
    done = _command(f"--workdir={folder}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {folder}/report.html: 1 of 1 runs finished\n"
    first = (tmp_path / "w" / "report.html").read_bytes()
    assert first == _page(folder).encode()
    for wrong in (
        [],
        [f"--workdir={tmp_path}/nowhere"],
        [f"--workdir={folder}", "--law=none.json"],
    ):
        refused = _command(*wrong)
        assert refused.returncode == 2
        assert len(refused.stderr.strip().splitlines()) == 1
