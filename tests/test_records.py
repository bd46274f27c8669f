"""A run directory survives deaths, full disks and second workers."""

import dataclasses
import json
import math
import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.disk import largest_file
from xmod_jax import accounting, records, storage
from xmod_jax.config import (
    Backbone,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.identity import config_hash

MODEL = ModelConfig(
    Backbone(16, 4, 4, 2, 24, vocab_size=31), Hierarchy.from_name("A1K4", active_depth=6, prefix=2)
)
CONFIG = RunConfig(
    "k_sweep", "xmod_a1k4", "xmod", "tiny", "mini", MODEL, TrainConfig(32, 4, steps=8)
)


def step_records(count):
    return [{"step": step, "loss": 1 / (step + 1)} for step in range(count)]


def test_config_json_holds_hash_config_and_accounting(tmp_path):
    records.prepare(tmp_path / "run", CONFIG)
    content = json.loads((tmp_path / "run" / "config.json").read_text())
    assert set(content) == {"format", "hash", "config", "accounting"}
    run = records.RunRecord.load(tmp_path / "run")
    assert run.config == CONFIG
    assert run.hash == config_hash(CONFIG)
    assert run.accounting == accounting.summary(MODEL, 32)


def test_another_configuration_is_refused_naming_the_first_difference(tmp_path):
    records.prepare(tmp_path, CONFIG)
    before = (tmp_path / "config.json").read_bytes()
    records.prepare(tmp_path, dataclasses.replace(CONFIG, experiment="relabelled"))
    other = dataclasses.replace(CONFIG, train=TrainConfig(32, 4, steps=8, seed=3))
    with pytest.raises(UserError, match=r"train\.seed is 0 there, 3 here") as refusal:
        records.prepare(tmp_path, other)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)
    assert (tmp_path / "config.json").read_bytes() == before


@given(st.integers(0, 5), st.integers(1, 200))
def test_a_torn_last_line_is_ignored_and_removed_by_the_next_append(count, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.jsonl"
        for record in step_records(count):
            storage.append(path, record)
        whole = path.read_bytes() if count else b""
        torn = json.dumps({"step": count, "text": "y" * 300}).encode()[:cut]
        path.write_bytes(whole + torn)
        assert records.read_lines(path) == step_records(count)
        storage.append(path, {"step": count})
        assert records.read_lines(path) == [*step_records(count), {"step": count}]


@given(st.integers(0, 6), st.integers(-1, 8), st.booleans())
def test_resuming_drops_later_steps_and_repeats_none(count, step, torn):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "train.jsonl"
        for record in step_records(count):
            storage.append(path, record)
        if torn:
            with path.open("ab") as file:
                file.write(b'{"step": 9')
        records.truncate_after(path, step)
        assert records.read_lines(path) == step_records(count)[: step + 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path, value):
    path = tmp_path / "train.jsonl"
    storage.append(path, {"step": 0})
    with pytest.raises(ValueError):
        storage.append(path, {"step": 1, "deep": [{"loss": value}]})
    with pytest.raises(ValueError):
        records.mark_done(tmp_path, {"loss": value})
    assert records.read_lines(path) == [{"step": 0}]
    assert records.status(tmp_path) is records.Status.UNFINISHED


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path):
    path = tmp_path / "train.jsonl"
    storage.append(path, {"step": 0})
    with largest_file(path.stat().st_size + 5), pytest.raises(OSError) as refusal:
        storage.append(path, {"step": 1, "text": "z" * 100})
    assert str(path) in str(refusal.value)
    assert path.read_bytes().endswith(b"\n")
    storage.append(path, {"step": 1})
    assert records.read_lines(path) == [{"step": 0}, {"step": 1}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"train\.jsonl: line 2 is not JSON"):
        records.read_lines(path)


def test_status_follows_the_marks(tmp_path):
    assert records.status(tmp_path / "nowhere") is records.Status.UNFINISHED
    records.mark_failed(tmp_path, "loss is not finite at step 3", step=3)
    assert records.status(tmp_path) is records.Status.FAILED
    assert records.failure(tmp_path) == "loss is not finite at step 3"
    records.clear_failed(tmp_path)
    assert records.status(tmp_path) is records.Status.UNFINISHED
    records.mark_done(tmp_path, {"step": 8})
    assert records.status(tmp_path) is records.Status.DONE


def test_only_a_finished_run_has_a_final_evaluation(tmp_path):
    records.prepare(tmp_path, CONFIG)
    storage.append(tmp_path / records.EVAL, {"step": 4, "loss_calibrated": 2.0})
    storage.append(tmp_path / records.EVAL, {"step": 8, "loss_calibrated": 1.0})
    storage.append(tmp_path / records.TRAIN, {"step": 1, "loss": 3.0})
    run = records.RunRecord.load(tmp_path)
    assert run.final is None
    assert [record["step"] for record in run.evals] == [4, 8]
    assert run.train == [{"step": 1, "loss": 3.0}]
    final = dict.fromkeys(
        ("tokens", "flops", "loss_topk", "loss_threshold", "loss_calibrated"), 1.0
    )
    records.mark_done(tmp_path, {"step": 8} | final)
    done = records.RunRecord.load(tmp_path)
    assert done.final == {"step": 8} | final
    # The mark holds it: the lines may be lost.
    (tmp_path / records.EVAL).unlink()
    assert records.RunRecord.load(tmp_path).final == done.final


@pytest.mark.parametrize(
    "content",
    ["", "{}", '{"final": []}', '{"final": {"step": 8}}', '{"final": {"step": 8, "x": "y"}}'],
)
def test_a_done_mark_without_the_final_evaluation_is_one_line(tmp_path, content):
    records.prepare(tmp_path, CONFIG)
    (tmp_path / records.DONE).write_text(content)
    with pytest.raises(UserError, match="DONE") as refusal:
        _ = records.RunRecord.load(tmp_path).final
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "not a JSON object"),
        ('{"x": 1}', "has no step"),
        ('{"step": "two"}', "has no step"),
        ('{"step": 2, "loss": "low"}', "no number as loss"),
        ('{"step": 2, "loss": [1]}', "no number as loss"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, told):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"step": 1, "loss": null, "scale": "mini"}}\n{line}\n')
    for read in (records.read_lines, lambda path: records.truncate_after(path, 5)):
        with pytest.raises(UserError, match=f"line 2 .*{told}"):
            read(path)


def _leaves(value, path=()):
    """Paths to every value in a JSON value, containers among them."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*path, key)
        if isinstance(entry, dict | list):
            yield from _leaves(entry, (*path, key))


def _replaced(value, path, new):
    copy = json.loads(json.dumps(value))
    within = copy
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = new
    return copy


_WRONG: tuple[object, ...] = (None, True, -1, 0, 0.5, "text", [], {}, [[1]], 10**30)
_FINAL = {"step": 8} | dict.fromkeys(
    ("tokens", "flops", "loss_topk", "loss_threshold", "loss_calibrated"), 1.0
)


def _stored(directory):
    """A finished run with every file that a sweep leaves; their values by path."""
    records.prepare(directory / "run", CONFIG)
    records.mark_done(directory / "run", _FINAL)
    declared = records.DeclaredRun("run", config_hash(CONFIG))
    records.SweepRecord("k_sweep", "mini", (declared,)).write(directory)
    paths = (directory / "run/config.json", directory / "run/DONE", directory / "sweep.json")
    return {path: json.loads(path.read_text()) for path in paths}


def _read_all(directory):
    """Reads what commands read, and does with the numbers what they do."""
    (run,) = records.find_runs([directory])
    sweep = records.SweepRecord.find(directory)
    assert sweep is not None and all(declared.name.strip() for declared in sweep.runs)
    final = run.final
    assert final is not None and all(f"{final[key]:.4f}" for key in _FINAL)
    assert math.isfinite(math.log(final["flops"] * final["tokens"]))
    assert run.accounting["total_params"] / run.accounting["n_act"] > 0
    assert config_hash(run.config) and run.hash[:8]
    assert accounting.summary(run.config.model, run.config.train.context_length)


def test_any_value_of_another_kind_in_any_file_is_one_line(tmp_path):
    """Every value of every file, replaced by values of every kind: read, or refused by name."""
    refused = 0
    for path, stored in _stored(tmp_path).items():
        for place in _leaves(stored):
            for wrong in _WRONG:
                path.write_text(json.dumps(_replaced(stored, place, wrong)))
                try:
                    _read_all(tmp_path)
                except UserError as error:
                    assert path.name in str(error) and "\n" not in str(error), (place, wrong)
                    refused += 1
        path.write_text(json.dumps(stored))
    assert refused > 300
    _read_all(tmp_path)


def test_runs_are_found_in_run_and_sweep_folders_each_once(tmp_path):
    for name in ("a", "b"):
        records.prepare(tmp_path / name, CONFIG)
    found = records.find_runs([tmp_path / "b", tmp_path])
    assert [run.directory.name for run in found] == ["b", "a"]


def test_a_path_that_is_no_run_is_named(tmp_path):
    for path, why in [
        (tmp_path / "missing", "no such folder"),
        (tmp_path, "neither a run directory"),
    ]:
        with pytest.raises(UserError, match=why) as refusal:
            records.find_runs([path])
        assert str(path) in str(refusal.value)
    storage.write_json(tmp_path / records.SWEEP, {})
    with pytest.raises(UserError, match="no run yet"):
        records.find_runs([tmp_path])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"hash": "x"}',
        '{"hash": 1, "config": {}}',
        '{"hash": 1, "config": []}',
        '{"hash": 1, "config": null, "accounting": []}',
        '{"hash": NaN}',
        '{"hash": 1e999}',
        '{"hash": 1' + "0" * 400 + "}",
        '{"hash": ' + "[" * 100_000,
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    for read in (lambda: records.find_runs([tmp_path]), lambda: records.prepare(tmp_path, CONFIG)):
        with pytest.raises(UserError, match=r"config\.json|holds a run of another") as refusal:
            read()
        assert "\n" not in str(refusal.value)
