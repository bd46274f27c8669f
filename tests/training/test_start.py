"""Runs that start from another run: their first evaluation, their record, their resume."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from experiments import runner
from experiments.registry import Experiment
from tests.training import small
from xmod_jax import records
from xmod_jax.config import ModelConfig, RunConfig, SparseStart
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.training import loop, start
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import initial_state

XMOD = small.run("A1K4", steps=2, eval_every=0, checkpoint_every=1)
DENSE = dataclasses.replace(
    small.run("dense", steps=2, eval_every=0),
    model=ModelConfig(small.BACKBONE, Hierarchy.dense(3)),
)
LOSSES = ("loss_topk", "loss_threshold", "loss_calibrated")


class Killed(Exception):
    pass


def _train(config: RunConfig, directory, dies: bool = False):
    def progress(_):
        if dies:
            raise Killed

    return loop.train(config, directory, progress)


def _experiment() -> Experiment:
    return Experiment("test", "mini", (dataclasses.replace(DENSE, name="dense"), XMOD))


@pytest.mark.slow
def test_an_upcycled_run_begins_as_the_dense_one_and_resumes_without_it(tmp_path):
    dense, xmod = tmp_path / "dense", tmp_path / XMOD.name
    trained = _train(DENSE, dense)
    experiment = runner.start_from(_experiment(), XMOD.name, dense, SparseStart.NEW)
    with pytest.raises(Killed):
        _train(experiment.run(XMOD.name), xmod, dies=True)
    shutil.rmtree(dense)

    # The directory says how the run started; the same flag again needs no dense run.
    resumed = runner.with_starts(_experiment(), str(tmp_path))
    assert resumed == experiment
    assert runner.start_from(resumed, XMOD.name, dense, SparseStart.NEW) == experiment
    final = _train(resumed.run(XMOD.name), xmod)
    first, last = records.read_lines(xmod / records.EVAL)
    assert (first["step"], first["tokens"], last["step"]) == (0, 0, 2)
    for name in LOSSES:
        assert first[name] == pytest.approx(trained[name], abs=1e-5)
        assert final[name] != pytest.approx(trained[name], abs=1e-3)

    # Without its start it would be another run, and is not taken for it.
    with pytest.raises(UserError, match=r"start is \{.*\} there, null here"):
        runner.choose_workdir(_experiment(), str(tmp_path))


@pytest.fixture
def dense(tmp_path):
    """A dense run with a checkpoint of its start; nothing is trained."""
    directory = tmp_path / "dense"
    _checkpoint(DENSE, directory)
    return directory


def _checkpoint(config: RunConfig, directory) -> None:
    records.prepare(directory, config)
    with Checkpoints(directory, config) as checkpoints:
        checkpoints.save(initial_state(config), {})


def test_a_start_that_does_not_fit_is_refused(tmp_path, dense):
    with pytest.raises(UserError, match="not a run directory"):
        start.find(tmp_path / "nowhere", XMOD, SparseStart.NEW)
    records.prepare(tmp_path / "empty", DENSE)
    with pytest.raises(UserError, match="no checkpoint yet"):
        start.find(tmp_path / "empty", XMOD, SparseStart.NEW)
    deep = dataclasses.replace(XMOD, model=small.run("A1K2").model)
    deep = dataclasses.replace(
        deep, model=dataclasses.replace(deep.model, hierarchy=Hierarchy.from_name("A1K4", 6, 2))
    )
    with pytest.raises(UserError, match="has 3 layers, prefix and anchors are 4"):
        start.find(dense, deep, SparseStart.NEW)
    assert not list((tmp_path / "empty").glob("checkpoints"))


def test_what_a_run_started_from_is_not_another_run_by_now(tmp_path, dense):
    found = start.find(dense, XMOD, SparseStart.NEW)
    assert found == dataclasses.replace(found, step=0, directory=str(dense))
    run = dataclasses.replace(XMOD, start=found)
    shutil.rmtree(dense)
    with pytest.raises(UserError, match="not a run directory"):
        start.started_state(run)
    other = dataclasses.replace(DENSE, train=dataclasses.replace(DENSE.train, seed=5))
    records.prepare(dense, other)
    with pytest.raises(UserError, match="is another run by now"):
        start.started_state(run)


def test_a_run_that_began_without_or_with_another_start_is_not_mistaken(tmp_path, dense):
    records.prepare(tmp_path / XMOD.name, XMOD)
    fresh = runner.with_starts(_experiment(), str(tmp_path))
    assert fresh == _experiment()
    asked = runner.start_from(fresh, XMOD.name, dense, SparseStart.NEW)
    with pytest.raises(UserError, match=r"start is null there, \{"):
        runner.choose_workdir(asked, str(tmp_path))
    shutil.rmtree(tmp_path / XMOD.name)
    records.prepare(tmp_path / XMOD.name, asked.run(XMOD.name))
    other = dataclasses.replace(DENSE, train=dataclasses.replace(DENSE.train, seed=5))
    _checkpoint(other, tmp_path / "other")
    started = runner.with_starts(_experiment(), str(tmp_path))
    with pytest.raises(UserError, match=r"started from .*dense, not from .*other"):
        runner.start_from(started, XMOD.name, tmp_path / "other", SparseStart.NEW)
