"""What a law was fitted on, and whether those are the runs that a report shows."""

import dataclasses

import pytest

from experiments import law_tables, report_evidence
from tests.law.sweep_directories import MINI_LAW, write_run, write_sweeps
from xmod_jax import records
from xmod_jax.law import observation_files, sweeps
from xmod_jax.law import observations as obs
from xmod_jax.law.terms import LawFile

SWEEPS = ["k_sweep_2k", "k_sweep_32k"]


@pytest.fixture
def law(tmp_path):
    """Writes the law of some sweeps with the files that fit leaves beside it."""

    def write(folders, loss=sweeps.Loss.CALIBRATED, files=True):
        rows = sweeps.collect(folders, loss).rows
        table = obs.Table.of(obs.observe(rows, extrapolate=True))
        columns = table.n_act, table.n_total, table.L, table.K, table.A
        predicted = MINI_LAW.delta(*columns)
        error = predicted - table.delta
        rmse = float((error**2).mean() ** 0.5)
        file = LawFile(MINI_LAW, 0.9, rmse, 0.01, len(table), {"L": (32.0, 256.0)})
        folder = tmp_path / "law"
        folder.mkdir()
        file.save(folder / "law.json")
        if files:
            (folder / report_evidence.OBSERVATIONS).write_text(observation_files.to_csv(rows))
            kinds = [
                law_tables.Predicted("fitted", table, predicted),
                law_tables.Predicted("withheld", table, predicted + 0.03, "L=32"),
            ]
            text = law_tables.predictions_csv(kinds, None)
            (folder / report_evidence.PREDICTIONS).write_text(text)
        return folder / "law.json"

    return write


def _gather(path, folders):
    return report_evidence.gather(LawFile.load(path), path, folders)


def test_a_law_of_the_runs_shown_says_so_and_shows_its_withheld_points(tmp_path, law):
    folders = write_sweeps(tmp_path, SWEEPS)
    found = _gather(law(folders), folders)
    assert found.agrees and not found.new and not found.notes
    assert found.verdict == "Fitted on all 8 observations of the runs shown."
    assert [(group.label, len(group.observed)) for group in found.points] == [
        ("fitted", 8),
        ("withheld, predicted", 8),
    ]
    withheld = found.points[1]
    assert withheld.predicted - withheld.observed == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize(
    ("fitted", "shown", "told", "new"),
    [
        (
            SWEEPS,
            SWEEPS[:1],
            "Fitted on 8 observations, among them all 4 observations of the runs shown.",
            0,
        ),
        (SWEEPS[:1], SWEEPS, "NOT fitted on the runs shown: only 4 of their 8 observations", 4),
        (SWEEPS[:1], SWEEPS[1:], "NOT fitted on the runs shown: none of their 4 observations", 4),
    ],
)
def test_a_law_of_other_runs_says_so(tmp_path, law, fitted, shown, told, new):
    write_sweeps(tmp_path, SWEEPS)
    path = law([tmp_path / name for name in fitted])
    found = _gather(path, [tmp_path / name for name in shown])
    assert found.verdict.startswith(told)
    assert found.agrees == (new == 0) and len(found.new) == new
    last = found.points[-1]
    assert (last.label == "shown here, not fitted") == (new > 0)
    if new:
        assert len(last.observed) == new and found.table is not None
        assert len(found.table) == 4 * len(shown)


def test_runs_trained_anew_are_not_those_that_were_fitted(tmp_path, law):
    folders = write_sweeps(tmp_path, SWEEPS)
    path = law(folders)
    directory = folders[0] / "xmod_a1k4"
    config = records.RunRecord.load(directory).config
    (directory / records.DONE).unlink()
    write_run(directory, config, shift=0.01)
    found = _gather(path, folders)
    assert "only 7 of their 8 observations" in found.verdict and not found.agrees
    assert [row.K for row in found.new] == [4]


def test_a_law_of_another_loss_is_recognised(tmp_path, law):
    folders = write_sweeps(tmp_path, SWEEPS)
    found = _gather(law(folders, sweeps.Loss.THRESHOLD), folders)
    assert found.agrees and "(their threshold losses)" in found.verdict


@pytest.mark.parametrize("same", [True, False])
def test_without_files_number_and_error_tell(tmp_path, law, same):
    folders = write_sweeps(tmp_path, SWEEPS)
    path = law(folders, files=False)
    if not same:
        file = LawFile.load(path)
        assert file.rmse is not None
        dataclasses.replace(file, rmse=file.rmse + 0.001).save(path)
    found = _gather(path, folders)
    assert found.agrees == same
    start = "Fitted on the 8 observations" if same else "NOT fitted on the runs shown, as far as"
    assert found.verdict.startswith(start)
    label = "fitted" if same else "shown here, not fitted"
    assert [group.label for group in found.points] == [label]


def test_files_of_another_fit_are_left_out_and_named(tmp_path, law):
    folders = write_sweeps(tmp_path, SWEEPS)
    path = law(folders)
    file = dataclasses.replace(LawFile.load(path), n_observations=7)
    dataclasses.replace(file, law=dataclasses.replace(MINI_LAW, e=0.5)).save(path)
    found = _gather(path, folders)
    assert any("observations.csv holds 8" in note for note in found.notes)
    assert any("predictions of another law" in note for note in found.notes)
    assert found.fitted is None and not found.agrees
    assert "withheld, predicted" not in {group.label for group in found.points}


@pytest.mark.parametrize("content", ["", "kind\nfitted\n", "\x00", 'kind,L\n"', "kind,L\nfitted,x"])
def test_a_damaged_file_is_a_note(tmp_path, law, content):
    folders = write_sweeps(tmp_path, SWEEPS)
    path = law(folders)
    (path.parent / report_evidence.PREDICTIONS).write_text(content)
    (path.parent / report_evidence.OBSERVATIONS).write_text(content)
    found = _gather(path, folders)
    assert any("observations.csv" in note for note in found.notes)
    assert found.agrees and [group.label for group in found.points] == ["fitted"]


@pytest.mark.parametrize("only", [["dense"], ["xmod_a1k4"]])
def test_runs_that_are_no_observation_are_not_what_was_fitted(tmp_path, law, only):
    folders = write_sweeps(tmp_path, SWEEPS)
    path = law(folders)
    found = _gather(path, [folders[0] / name for name in only])
    if only == ["dense"]:
        assert not found.agrees and found.verdict.startswith("No run shown is an observation")
    assert found.points[0].label == "fitted" and found.table is not None
