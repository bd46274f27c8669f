"""Whole runs: records, resumption after death, refusal of foreign checkpoints, lost numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from flax import nnx

from tests.training import small
from xmod_jax import records
from xmod_jax.config import DataConfig, Routing
from xmod_jax.data import pipeline, sources, vocabulary
from xmod_jax.errors import UserError
from xmod_jax.identity import config_hash
from xmod_jax.training import loop
from xmod_jax.training.checkpoint import Checkpoints, Keep, passing
from xmod_jax.training.preemption import Preempted, Watch
from xmod_jax.training.step import abstract_state, initial_state

_CHILD = """
import os, pathlib, signal, sys
from tests.training import small
from xmod_jax.training import loop

def progress(state):
    if state.step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

loop.train(small.run(), pathlib.Path(sys.argv[1]), progress)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run."""
    directory = tmp_path_factory.mktemp("run") / "whole"
    seen: list[loop.Progress] = []
    final = loop.train(small.run(), directory, seen.append)
    return directory, final, seen


def test_a_run_writes_every_record_and_its_mark(finished):
    directory, final, seen = finished
    train, evals = small.curve(directory), small.curve(directory, records.EVAL)
    assert [line["step"] for line in train] == list(range(1, 9))
    assert [line["step"] for line in evals] == [4, 8]
    assert evals[-1] == {key: final[key] for key in evals[-1]}
    assert records.status(directory) is records.Status.DONE
    for line in train:
        assert line["tokens"] == line["step"] * 64
        assert line["hardware_flops"] > line["flops"] > 0
    assert [progress.step for progress in seen] == list(range(1, 9))
    assert seen[-1].eta_s == 0 and seen[-1].tokens_per_s > 0
    assert any((directory / "tensorboard").iterdir())


def test_a_run_knows_its_data_by_content_and_keeps_its_tokenizer(finished):
    directory, _, _ = finished
    run = records.RunRecord.load(directory)
    known = sources.identified(DataConfig())
    assert run.config == dataclasses.replace(small.run(), data=known)
    assert run.hash == config_hash(run.config)
    assert vocabulary.kept_name(directory) == "bytes"


def test_a_run_goes_on_with_another_execution(finished, tmp_path):
    """Kept products, other saves and evaluations, micro-batches: the same losses to rounding."""
    whole = small.curve(finished[0])

    def leave_at_4(progress):
        if progress.step == 3:  # told of once the fourth is under way
            os.kill(os.getpid(), signal.SIGTERM)

    with Watch().signals() as watch, pytest.raises(Preempted, match="at step 4 of 8"):
        loop.train(small.run(), tmp_path / "run", leave_at_4, watch=watch)
    other = small.run(keep_products=True, accumulation=2, eval_every=2, checkpoint_every=0)
    loop.train(other, tmp_path / "run", lambda _: None)
    resumed = small.curve(tmp_path / "run")
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    np.testing.assert_allclose(
        [line["loss"] for line in resumed], [line["loss"] for line in whole], rtol=1e-4
    )
    # What the first steps took is counted as they took it.
    spent = [line["hardware_flops"] for line in resumed]
    first, last = spent[3] / 4, (spent[7] - spent[3]) / 4
    assert first == whole[0]["hardware_flops"] > last > 0
    assert spent[:4] == [line["hardware_flops"] for line in whole[:4]]
    assert records.RunRecord.load(tmp_path / "run").config.execution == other.execution


def test_every_evaluation_names_three_losses_and_they_differ(finished):
    _, final, _ = finished
    losses = [final[f"loss_{name}"] for name in ("topk", "threshold", "calibrated")]
    assert all(np.isfinite(losses)) and len(set(losses)) == 3
    assert 0 <= final["routed_threshold"] <= 1 and 0 <= final["coverage"] <= 1


def test_a_dense_run_has_one_loss_and_no_routing(tmp_path):
    final = loop.train(small.run("dense", steps=2), tmp_path / "dense", lambda _: None)
    assert final["loss_topk"] == final["loss_threshold"] == final["loss_calibrated"]
    assert final["routed_calibrated"] is None and final["jaccard"] is None


@pytest.mark.parametrize(
    "kills",
    [pytest.param((5,), id="once"), pytest.param((3, 8), id="twice", marks=pytest.mark.slow)],
)
def test_a_killed_run_resumes_on_the_uninterrupted_curve(kills, finished, tmp_path):
    directory = tmp_path / "killed"
    for step in kills:
        command = [sys.executable, "-c", _CHILD, str(directory), str(step)]
        child = subprocess.run(command, cwd=os.getcwd(), capture_output=True, timeout=300)
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]
    # What a death may leave behind: a torn last line.
    with (directory / records.TRAIN).open("a") as file:
        file.write('{"step": 99, "lo')
    loop.train(small.run(), directory, lambda _: None)
    assert small.curve(directory) == small.curve(finished[0])
    assert small.curve(directory, records.EVAL) == small.curve(finished[0], records.EVAL)


@contextlib.contextmanager
def at_step(number, moment, monkeypatch):
    """Sends this process a signal in training, in evaluation or while it waits for data."""
    ask = lambda: os.kill(os.getpid(), number)
    if moment == "training":
        yield lambda progress: ask() if progress.step == 3 else None
        return
    name = {"evaluation": "eval_batches", "data": "train_iterator"}[moment]
    make = getattr(pipeline, name)

    class Asking:
        def __init__(self, *arguments):
            self.items, self.taken = make(*arguments), 0

        def __iter__(self):
            return self

        def __next__(self):
            self.taken += 1
            if self.taken == {"evaluation": 1, "data": 6}[moment]:
                ask()
                threading.Event().wait(60)  # data that do not come
            return next(self.items)

        def __getattr__(self, name):
            return getattr(self.items, name)

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, name, Asking)
        yield lambda progress: None


@pytest.mark.parametrize(
    ("moment", "number", "step"),
    [
        ("training", signal.SIGTERM, 4),
        ("evaluation", signal.SIGUSR1, 4),
        ("data", signal.SIGTERM, 5),
    ],
)
def test_a_run_that_is_asked_to_leave_saves_and_resumes_on_the_same_curve(
    moment, number, step, finished, tmp_path, monkeypatch
):
    directory = tmp_path / "asked"
    with (
        Watch().signals() as watch,
        at_step(number, moment, monkeypatch) as progress,
        pytest.raises(Preempted, match=f"asked to leave at step {step} of 8"),
    ):
        loop.train(small.run(checkpoint_every=0), directory, progress, watch=watch)
    assert (directory / records.CHECKPOINTS / str(step)).is_dir()
    assert records.status(directory) is records.Status.UNFINISHED
    loop.train(small.run(checkpoint_every=0), directory, lambda _: None)
    assert small.curve(directory) == small.curve(finished[0])
    assert small.curve(directory, records.EVAL) == small.curve(finished[0], records.EVAL)


def test_a_run_that_is_asked_to_leave_before_it_starts_takes_no_step(tmp_path):
    with Watch().signals() as watch, pytest.raises(Preempted, match="at step 0 of 8"):
        os.kill(os.getpid(), signal.SIGTERM)
        loop.train(small.run(), tmp_path / "early", lambda _: None, watch=watch)


def test_starting_a_finished_run_again_takes_no_step(finished):
    directory, final, _ = finished
    seen: list[loop.Progress] = []
    assert loop.train(small.run(), directory, seen.append) == final
    assert seen == []


@pytest.fixture
def dying(finished, tmp_path):
    """The finished run as a death just before its DONE mark leaves it."""
    directory = tmp_path / "dying"
    shutil.copytree(finished[0], directory)
    (directory / records.DONE).unlink()
    return directory


@pytest.mark.parametrize("kept", [0, 1])
def test_a_lost_last_evaluation_is_made_again(kept, dying, finished):
    lines = (dying / records.EVAL).read_bytes().splitlines(keepends=True)
    (dying / records.EVAL).write_bytes(b"".join(lines[:kept]))
    assert loop.train(small.run(), dying, lambda _: None)["step"] == 8
    assert small.curve(dying, records.EVAL)[-1] == small.curve(finished[0], records.EVAL)[-1]


def test_the_newest_checkpoints_stay_and_those_of_an_interval_for_good(tmp_path):
    directory = tmp_path / "kept"
    loop.train(small.run(), directory, lambda _: None, keep=Keep(newest=1, every=3))
    kept = {path.name for path in (directory / records.CHECKPOINTS).iterdir() if path.is_dir()}
    assert kept == {"3", "6", "8"}


def damage(directory, steps):
    for step in steps:
        for file in (directory / records.CHECKPOINTS / str(step)).rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])


def test_a_damaged_newest_checkpoint_is_set_aside_for_the_one_before(dying, finished, caplog):
    damage(dying, [8])
    loop.train(small.run(), dying, lambda _: None)
    assert small.curve(dying) == small.curve(finished[0])
    assert "checkpoint 8 cannot be read" in caplog.text and "using 6" in caplog.text
    assert (dying / "checkpoints_damaged" / "8").is_dir()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        ValueError('Error reading "d/0.0": UNKNOWN: [OS error 5: EIO Input/output error]'),
        ValueError("UNAVAILABLE: connection reset"),
    ],
    ids=str,
)
def test_a_disk_that_fails_for_now_moves_no_checkpoint(error, dying, monkeypatch):
    before = sorted(dying.rglob("*"))

    def read(*_):
        raise ValueError("Error restoring") from error

    monkeypatch.setattr(Checkpoints, "_read", read)
    with pytest.raises(UserError, match=r"cannot be read at present .*nothing was changed"):
        loop.train(small.run(), dying, lambda _: None)
    assert not (dying / "checkpoints_damaged").exists()
    assert [path for path in before if "checkpoints" in path.parts] == [
        path for path in sorted(dying.rglob("*")) if "checkpoints" in path.parts
    ]


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "No such file"), ValueError("DATA_LOSS: checksum")]
)
def test_missing_and_damaged_files_do_not_pass(error):
    assert not passing(error)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_not_finite_are_named_when_a_checkpoint_is_read(value, tmp_path):
    config, directory = small.run(), tmp_path / "run"
    records.prepare(directory, config)
    state = initial_state(config)
    router = state.model.groups[0].sparse.router
    state.model.groups[0].sparse.router = nnx.Param(router[...].at[0, 1, 2].set(value))
    with Checkpoints(directory, config) as checkpoints:
        checkpoints.save(state, {})
    with (
        Checkpoints(directory, config, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"parameter .*router.* holds numbers that are not finite"),
    ):
        checkpoints.restore(abstract_state(config))
    assert (directory / "checkpoints" / "0").is_dir()


def test_an_optimiser_that_is_not_finite_is_named_by_who_goes_on_with_it_alone(tmp_path):
    config = small.run()
    records.prepare(tmp_path, config)
    state = initial_state(config)
    leaves, structure = jax.tree.flatten(state.optimizer)
    where = next(n for n, leaf in enumerate(leaves) if leaf.dtype == np.float32)
    leaves[where] = leaves[where].at[...].set(np.nan)
    with Checkpoints(tmp_path, config) as checkpoints:
        checkpoints.save(
            dataclasses.replace(state, optimizer=jax.tree.unflatten(structure, leaves)), {}
        )
    like = abstract_state(config)
    with (
        Checkpoints(tmp_path, config, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"the state optimizer.* that are not finite"),
    ):
        checkpoints.restore(like)
    with Checkpoints(tmp_path, config, read_only=True) as checkpoints:
        checkpoints.restore(
            dataclasses.replace(like, optimizer=None)
        )  # generation reads no optimiser


def test_when_no_checkpoint_can_be_read_nothing_is_touched(dying):
    damage(dying, [6, 8])
    before = sorted(dying.rglob("*"))
    with pytest.raises(UserError, match="no checkpoint can be read"):
        loop.train(small.run(), dying, lambda _: None)
    assert sorted(dying.rglob("*")) == before


def test_a_gap_in_the_curve_is_told(dying, caplog):
    lines = (dying / records.TRAIN).read_bytes().splitlines(keepends=True)
    (dying / records.TRAIN).write_bytes(b"".join(lines[:5]))
    loop.train(small.run(), dying, lambda _: None)
    assert "ends at step 5, the checkpoint is of step 8" in caplog.text


def test_a_checkpoint_of_another_architecture_is_refused_naming_the_difference(finished):
    directory, _, _ = finished
    config = small.run()
    other = dataclasses.replace(
        config, model=dataclasses.replace(config.model, routing=Routing(bias_scale=0.25))
    )
    difference = r"model\.routing\.bias_scale is 1\.0 there, 0\.25"
    with (
        Checkpoints(directory, other) as checkpoints,
        pytest.raises(UserError, match=difference),
    ):
        checkpoints.restore(initial_state(other))
    with pytest.raises(UserError, match="another configuration"):
        loop.train(other, directory, lambda _: None)


def test_a_checkpoint_of_other_data_is_refused(finished):
    directory, _, _ = finished
    other = dataclasses.replace(small.run(), data=DataConfig("embedded", "feedfacefeedface"))
    with (
        Checkpoints(directory, other) as checkpoints,
        pytest.raises(UserError, match="trained on other data"),
    ):
        checkpoints.restore(initial_state(other))


def test_a_loss_that_is_not_finite_stops_the_run_at_once(tmp_path):
    config = small.run()
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(
            config.train,
            optimizer=dataclasses.replace(config.train.optimizer, peak_lr=1e30, warmup=0.6),
        ),
    )
    directory = tmp_path / "lost"
    with pytest.raises(loop.RunFailed, match="not finite at step"):
        loop.train(config, directory, lambda _: None)
    failure = json.loads((directory / records.FAILED).read_text())
    assert "not finite" in failure["reason"] and failure["step"] >= 1
    assert records.status(directory) is records.Status.FAILED
    steps = [line["step"] for line in records.read_lines(directory / records.TRAIN)]
    assert steps == list(range(1, failure["step"]))


@pytest.mark.parametrize("wrong", ["context", "vocabulary"])
def test_data_that_do_not_fit_are_one_line_and_leave_no_run_behind(wrong, tmp_path):
    config, message = small.run(context_length=10_000_000), "longer than the data"
    if wrong == "vocabulary":
        backbone = dataclasses.replace(small.BACKBONE, vocab_size=100)
        model = dataclasses.replace(config.model, backbone=backbone)
        config, message = dataclasses.replace(small.run(), model=model), "--tokenizer=bytes"
    with pytest.raises(UserError, match=message):
        loop.train(config, tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()
