"""Several workers of a sweep: every run once, on cores of its own; ends as one worker does."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import threading

import pytest

from experiments import registry, workers
from experiments.progress import Display
from tests.training import small
from xmod_jax import records
from xmod_jax.config import DataConfig
from xmod_jax.errors import UserError
from xmod_jax.training.checkpoint import NEWEST
from xmod_jax.training.preemption import Preempted

RUNS = tuple(
    dataclasses.replace(small.run("dense", steps=3, seed=s), name="dense", suffix=suffix)
    for s, suffix in ((0, ""), (1, "_seed1"))
)
needs_two_cores = pytest.mark.skipif(len(workers.cores()) < 2, reason="one core")


def job(tmp_path, runs=RUNS):
    return workers.Job(tuple(runs), tmp_path, False, NEWEST)


def train(tmp_path, runs=RUNS, stream=None):
    display = Display(runs, stream or io.StringIO(), 2)
    return workers.train(job(tmp_path, runs), 2, display)


@needs_two_cores
def test_two_workers_train_every_run_once(tmp_path):
    stream = io.StringIO()
    outcome = train(tmp_path, stream=stream)
    assert outcome.done == ["dense", "dense_seed1"] and not outcome.failed and not outcome.held
    for run in RUNS:
        curve = small.curve(tmp_path / run.folder)
        assert [line["step"] for line in curve] == [1, 2, 3]
    shown = stream.getvalue()
    assert "[1/2] " in shown and "[2/2] " in shown


@needs_two_cores
def test_a_mistake_that_a_worker_finds_ends_the_sweep_in_its_words(tmp_path):
    wrong = [dataclasses.replace(run, data=DataConfig("nowhere")) for run in RUNS]
    with pytest.raises(UserError, match="--data=nowhere: no such data"):
        train(tmp_path, wrong)


@needs_two_cores
def test_a_worker_that_is_killed_is_told_and_the_other_saves(tmp_path, monkeypatch):
    long = [dataclasses.replace(small.run("dense", steps=10**6), name=name) for name in "ab"]
    killed = threading.Event()
    display = Display(long, io.StringIO(), 2)
    begin = workers._Worker._begin

    def kill_the_first(self, run):
        begin(self, run)
        if not killed.is_set():
            killed.set()
            os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr(workers._Worker, "_begin", kill_the_first)
    with pytest.raises(RuntimeError, match=r"worker . of the sweep ended with -9"):
        workers.train(job(tmp_path, long), 2, display)


@needs_two_cores
def test_a_sweep_that_is_asked_to_leave_saves_both_runs(tmp_path, monkeypatch):
    long = [dataclasses.replace(small.run("dense", steps=10**6), name=name) for name in "ab"]
    step = workers._Worker._step
    stepping: set[object] = set()

    def ask_once_both_step(self, progress):
        step(self, progress)
        stepping.add(self)
        if len(stepping) == 2:
            stepping.add("asked")
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(workers._Worker, "_step", ask_once_both_step)
    with pytest.raises(Preempted, match="asked to leave"):
        train(tmp_path, long)
    for run in long:
        assert list((tmp_path / run.folder / records.CHECKPOINTS).glob("[0-9]*"))
        assert records.status(tmp_path / run.folder) is records.Status.UNFINISHED


def test_how_many_workers_a_sweep_has(monkeypatch):
    mini, paper = (registry.get("k_sweep_32k", scale) for scale in ("mini", "paper"))
    monkeypatch.setattr(workers, "cores", lambda: [0, 2, 4])
    assert workers.chosen(None, mini, 5, True) == 3
    assert workers.chosen(None, mini, 2, True) == 2
    assert workers.chosen(None, mini, 0, True) == 1
    assert workers.chosen(None, mini, 5, False) == 1
    assert workers.chosen(None, paper, 5, True) == 1
    assert workers.chosen(2, paper, 5, True) == 2
    with pytest.raises(UserError, match="--workers=4: there are 3 cores"):
        workers.chosen(4, mini, 5, True)
    with pytest.raises(UserError, match="for one process without --mesh"):
        workers.chosen(2, mini, 5, False)
