"""`python -m experiments.fit`: tables, files, and refusals in one line."""

import collections
import csv
import dataclasses
import functools
import json

import pytest

from tests.experiments.commands import refusal, run_command
from tests.law.grid import TABLE8, paper_rows
from tests.law.sweep_directories import write_sweeps
from xmod_jax.law.observation_files import read_csv, to_csv
from xmod_jax.law.terms import LawFile

QUICK = ("--novalidate", "--bootstrap=0")
FIGURES = ("context", "routed_tokens", "size", "stride")


_run = functools.partial(run_command, "fit", timeout=120)
_refused = functools.partial(refusal, "fit")


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "observations.csv"
    path.write_text(to_csv(paper_rows()))
    return path


def test_csv_to_law_and_tables(table, tmp_path):
    done = _run(f"--observations={table}", f"--output={tmp_path / 'out'}", "--bootstrap=0")
    assert done.returncode == 0, done.stderr
    law = LawFile.load(tmp_path / "out" / "law.json")
    assert law.law.rho_N == pytest.approx(TABLE8["rho_N"], rel=1e-3)
    assert law.n_observations == 101 and list(law.ranges["L"]) == [2048, 32768]
    assert (tmp_path / "out" / "observations.csv").read_text() == table.read_text()
    for text in ("rho_N", "101 observations", "L=2048", "A=0.5", "K=20", "all groups withheld"):
        assert text in done.stdout
    assert set(law.validated) == {"L", "n_act", "A"}
    assert law.validated["L"]["rmse"] < 1e-6
    assert "warning" not in done.stdout


def test_bootstrap_figures_and_predictions_are_left_for_others(tmp_path):
    rows = paper_rows(noise=0.008)
    inside = [row for row in rows if row.K != 20]
    (tmp_path / "in.csv").write_text(to_csv(inside))
    (tmp_path / "new.csv").write_text(to_csv([row for row in rows if row.K == 20]))
    paths = [f"--observations={tmp_path / 'in.csv'}", f"--beyond={tmp_path / 'new.csv'}"]
    done = _run(*paths, "--bootstrap=6", "--level=0.8", "--seed=3", "--starts=1")
    assert done.returncode == 0, done.stderr
    assert "80% interval (6 draws)" in done.stdout and "13 sweeps resampled" in done.stdout
    draws = LawFile.load(tmp_path / "law.json").bootstrap
    assert draws is not None and (len(draws.laws), draws.level, draws.seed) == (6, 0.8, 3)
    for name in (*(f"delta_by_{figure}" for figure in FIGURES), "parity"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    with open(tmp_path / "predictions.csv", newline="") as file:
        predictions = list(csv.DictReader(file))
    kinds = collections.Counter(row["kind"] for row in predictions)
    assert kinds["fitted"] == 93 and kinds["beyond"] == 8 and kinds["withheld"] > 93
    for row in predictions:
        assert (row["low"] == "") == (row["kind"] == "withheld") == (row["group"] != "")
        assert abs(float(row["observed"]) - float(row["predicted"])) < 0.05


def test_flags_that_are_no_numbers_or_folders_are_one_line(table):
    assert "--flops_tolerance=nan" in _refused(f"--observations={table}", "--flops_tolerance=nan")
    assert "has an empty part" in _refused("--workdir=somewhere,")


def test_the_input_is_not_overwritten(table):
    untidy = table.read_text().replace("family,L", "family, L")
    table.write_text(untidy)
    done = _run(f"--observations={table}", *QUICK)
    assert done.returncode == 0, done.stderr
    assert table.read_text() == untidy
    assert json.loads((table.parent / "law.json").read_text())["r2_delta"] == pytest.approx(1)


def test_one_sweep_does_not_determine_the_law_and_says_what_does(tmp_path):
    path = write_sweeps(tmp_path, ["k_sweep_32k"])[0]
    message = _refused(f"--workdir={path}")
    for name in ("distinct L", "k_sweep_2k", "scale_sweep_32k", "anchor_sweep_32k"):
        assert name in message
    assert not (path / "law.json").exists()


def test_sweeps_to_law_beside_the_first(tmp_path):
    paths = write_sweeps(tmp_path)
    done = _run(f"--workdir={','.join(map(str, paths))}", "--loss=threshold", *QUICK)
    assert done.returncode == 0, done.stderr
    assert LawFile.load(paths[0] / "law.json").rmse == pytest.approx(0, abs=1e-6)
    assert any(row.dense for row in read_csv(paths[0] / "observations.csv"))


def test_extrapolated_references_are_refused_or_marked(table, tmp_path):
    table.write_text(table.read_text().replace(",1.5e+20,", ",9e+19,"))
    assert "does not cover" in _refused(f"--observations={table}")
    output = f"--output={tmp_path / 'out'}"
    done = _run(f"--observations={table}", "--extrapolate_dense", *QUICK, output)
    assert done.returncode == 0, done.stderr
    assert "extrapolated for 101 rows" in done.stdout
    assert LawFile.load(tmp_path / "out" / "law.json").warnings


def test_rows_beyond_the_range_are_predicted_and_not_fitted(tmp_path):
    rows = paper_rows()
    inside = [row for row in rows if not (row.L == 2048 and row.K == 3)]
    (tmp_path / "in.csv").write_text(to_csv(inside))
    (tmp_path / "out.csv").write_text(to_csv([row for row in rows if row not in inside]))
    done = _run(f"--observations={tmp_path / 'in.csv'}", f"--beyond={tmp_path / 'out.csv'}", *QUICK)
    assert done.returncode == 0, done.stderr
    law = LawFile.load(tmp_path / "law.json")
    assert law.n_observations == 100 and law.validated["beyond"]["rows"] == 1
    assert law.validated["beyond"]["rmse"] < 1e-6


def test_candidate_is_compared_on_withheld_groups(tmp_path):
    rows = [row for row in paper_rows(noise=0.008) if row.L in (2048, 32768) and row.A < 3]
    path = tmp_path / "in.csv"
    path.write_text(to_csv([row for row in rows if row.family in ("556M", "165M")]))
    done = _run(f"--observations={path}", "--candidate", "--starts=1", "--bootstrap=0")
    assert done.returncode == 0, done.stderr
    assert "Dropping P_D is" in done.stdout and "groups that both laws predict" in done.stdout
    candidate = LawFile.load(tmp_path / "law.json").candidate
    assert candidate["exposure"]["v"] >= 0 and isinstance(candidate["dropping_supported"], bool)
    assert 0 < candidate["compared"]["groups"] < candidate["compared"]["rows"]


def test_a_candidate_that_cannot_be_determined_is_refused_before_the_long_part(tmp_path):
    rows = [dataclasses.replace(row, tokens=1e10) for row in paper_rows()]
    path = tmp_path / "in.csv"
    path.write_text(to_csv(rows))
    done = run_command("fit", f"--observations={path}", "--candidate", timeout=120)
    assert done.returncode == 2 and "distinct dense token counts" in done.stderr
    assert done.stdout == ""


def test_what_is_wrong_or_unusual_is_counted_and_told_again_at_the_end(tmp_path):
    """A loss of 9.5 among the others, seeds of a dense row, and another spelling of the table."""
    rows = paper_rows(noise=0.008, seed=1)
    rows[30] = dataclasses.replace(rows[30], loss=9.5)
    dense = next(row for row in rows if row.dense)
    rows.append(dataclasses.replace(dense, flops=dense.flops * (1 + 1e-9), loss=dense.loss + 0.1))
    path = tmp_path / "in.csv"
    path.write_text("# ours\n" + to_csv(rows).replace(",", ";").replace(".", ","))
    done = _run(f"--observations={path}", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "note: dense rows at one compute count as their mean" in done.stdout
    law = LawFile.load(tmp_path / "law.json")
    last = done.stdout.strip().splitlines()[-len(law.warnings) - 1 :]
    assert last == [f"{len(law.warnings)} warnings:", *(f"warning: {w}" for w in law.warnings)]
    told = done.stdout
    assert "losses far from the others'" in told and "line 33 (9.5)" in told
    assert "1 row stands out" in told and "line 33 (loss 9.5, +" in told
    assert (
        "Without the rows that stand out:" in told and "100 observations: R2 on Delta 0.99" in told
    )
    assert law.n_observations == 101 and law.r2_delta is not None and law.r2_delta < 0.5
    assert list(law.ranges["flops"]) == [1e20, 1e20]


def test_a_curve_of_one_dense_row_is_continued_and_marked(tmp_path):
    rows = [row for row in paper_rows() if not (row.dense and row.flops > 1e20)]
    path = tmp_path / "in.csv"
    path.write_text(to_csv(rows))
    done = _run(f"--observations={path}", "--extrapolate_dense", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "held constant" in done.stdout and "and 93 more" in done.stdout


def test_lines_of_another_file_are_named_with_it(tmp_path):
    rows = paper_rows()
    (tmp_path / "in.csv").write_text(to_csv([row for row in rows if row.K != 20]))
    new = [dataclasses.replace(row, loss=9.5) for row in rows if row.K == 20][:1]
    (tmp_path / "new.csv").write_text(to_csv(new + [row for row in rows if row.K == 18]))
    paths = [f"--observations={tmp_path / 'in.csv'}", f"--beyond={tmp_path / 'new.csv'}"]
    done = _run(*paths, *QUICK)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'new.csv'}, line 2 (9.5)" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("e+20,", "e+05,", "looks like PFLOP"),
        (",2048,", ",2,", "L in thousands"),
        ("556M,32768,", "556M,32768;", "missing column"),
        ("loss\n", "loss\n\x00", "null characters"),
    ],
)
def test_a_faulty_table_is_one_line(table, old, new, words):
    text = table.read_text()
    if words == "missing column":
        text = text.replace(",loss", "", 1)
    table.write_text(text.replace(old, new))
    assert words in _refused(f"--observations={table}")
    assert not (table.parent / "law.json").exists()


def test_mistakes_are_one_line(table, tmp_path):
    assert "give either" in _refused()
    assert "loss" in _refused(f"--observations={table}", "--loss=best")
    (tmp_path / "file").write_text("")
    assert "file" in _refused(f"--observations={table}", f"--output={tmp_path / 'file' / 'x'}")
