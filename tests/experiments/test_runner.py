"""A sweep trains every run once, resumes, and never takes a run from another worker."""

import contextlib
import dataclasses
import io
import subprocess
import sys
import types
from typing import Any

import pytest

from experiments import registry, runner
from experiments.progress import Display
from experiments.runner import Trainer, choose_workdir, run_all, write_sweep
from tests.experiments.fake_training import FakeFailure, FakeProgress, fake_train, trainer
from xmod_jax import claims, records, storage
from xmod_jax.data import sources
from xmod_jax.errors import UserError
from xmod_jax.processes import ALONE
from xmod_jax.records import Status

EXPERIMENT = registry.get("k_sweep_32k", "mini")
NAMES = [run.name for run in EXPERIMENT.runs]


def sweep(workdir, training, **options):
    display = Display(EXPERIMENT.runs, io.StringIO())
    return run_all(EXPERIMENT.runs, workdir, training, display, **options)


def test_every_run_is_trained_once_and_a_second_start_repeats_none(tmp_path):
    seen: list[str] = []
    assert sweep(tmp_path, trainer(seen=seen)).done == NAMES
    assert seen == NAMES
    assert sweep(tmp_path, trainer(seen=seen)).done == NAMES
    assert seen == NAMES


def test_an_interrupted_run_resumes_where_it_stopped(tmp_path):
    def interrupted(config, directory, progress):
        if config.name == NAMES[1]:
            storage.append(directory / records.TRAIN, {"step": 1, "tokens_per_s": 1e5})
            raise KeyboardInterrupt
        fake_train(config, directory, progress)

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, Trainer(interrupted, FakeFailure))
    seen: list[str] = []
    assert sweep(tmp_path, trainer(seen=seen)).done == NAMES
    assert seen == NAMES[1:]
    steps = [record["step"] for record in records.read_lines(tmp_path / NAMES[1] / records.TRAIN)]
    assert steps == [1, 2, 3]


def test_a_failed_run_leaves_the_others_alone_and_is_retried_only_on_demand(tmp_path):
    outcome = sweep(tmp_path, trainer(failing=[NAMES[0]]))
    assert outcome.failed == {NAMES[0]: "loss is not finite at step 2"}
    assert outcome.done == NAMES[1:]
    seen: list[str] = []
    assert list(sweep(tmp_path, trainer(seen=seen)).failed) == [NAMES[0]]
    assert seen == []
    assert sweep(tmp_path, trainer(seen=seen), retry_failed=True).done == NAMES
    assert seen == [NAMES[0]]


def test_a_mistake_about_the_data_binds_no_run_to_it(tmp_path):
    def refuse(config, directory, progress):
        raise UserError("the data do not fit")

    other = EXPERIMENT.override(data="elsewhere").runs[0]
    display = Display([other], io.StringIO())
    with pytest.raises(UserError, match="do not fit"):
        run_all([other], tmp_path, Trainer(refuse, FakeFailure), display)
    assert sweep(tmp_path, trainer()).done == NAMES


def test_a_run_of_another_configuration_is_refused_under_the_claim(tmp_path):
    records.prepare(tmp_path / NAMES[0], EXPERIMENT.override(seed=3).runs[0])
    with pytest.raises(UserError, match=r"train\.seed is 3 there"):
        sweep(tmp_path, trainer())


def test_a_run_that_fails_again_is_tried_once_per_start(tmp_path):
    seen: list[str] = []
    training = trainer(failing=[NAMES[0]], seen=seen)
    sweep(tmp_path, training)
    sweep(tmp_path, training, retry_failed=True)
    assert seen.count(NAMES[0]) == 2


def test_a_run_of_another_worker_is_left_to_it_and_named(tmp_path):
    with claims.claim(tmp_path / NAMES[2]):
        outcome = sweep(tmp_path, trainer())
    assert list(outcome.held) == [NAMES[2]]
    assert "process" in outcome.held[NAMES[2]]
    assert outcome.done == [name for name in NAMES if name != NAMES[2]]
    assert outcome.status == 75
    assert records.status(tmp_path / NAMES[2]) is Status.UNFINISHED


def test_a_run_of_a_machine_that_has_gone_is_waited_for_when_nothing_else_is_left(tmp_path):
    held = contextlib.ExitStack()
    held.enter_context(claims.claim(tmp_path / NAMES[0]))
    (tmp_path / NAMES[0] / claims.LOCK).write_text("elsewhere process 7\nboot 00000000\n")
    seen: list[str] = []

    def asked():
        assert seen == NAMES[1:]  # others were trained before it was waited for
        held.close()  # the file server gives the lock free
        return False

    outcome = sweep(tmp_path, trainer(seen=seen), asked=asked)
    assert sorted(outcome.done) == sorted(NAMES) and outcome.status == 0


def test_the_launch_script_is_told_which_runs_it_may_see_progress_in(tmp_path, monkeypatch):
    monkeypatch.setenv("XMOD_ATTEMPT", str(tmp_path / "attempt"))
    sweep(tmp_path / "sweep", trainer())
    told = (tmp_path / "attempt").read_text().splitlines()
    assert told == [str(tmp_path / "sweep" / name) for name in NAMES]


def test_a_run_released_meanwhile_is_taken_over(tmp_path):
    claim = claims.claim(tmp_path / NAMES[0])
    claim.__enter__()
    seen: list[str] = []

    def release_at_the_end(config, directory, progress):
        fake_train(config, directory, progress)
        seen.append(config.name)
        if config.name == NAMES[-1]:
            claim.__exit__(None, None, None)

    outcome = sweep(tmp_path, Trainer(release_at_the_end, FakeFailure))
    assert seen == [*NAMES[1:], NAMES[0]]
    assert sorted(outcome.done) == sorted(NAMES) and not outcome.held


WORKER = """
import pathlib, sys, time
from experiments.progress import Display
from experiments.runner import Trainer, run_all
from tests.experiments.fake_training import FakeFailure, fake_train
from tests.experiments.test_runner import EXPERIMENT

def slow(config, directory, progress):
    print(config.name, flush=True)
    time.sleep(float(sys.argv[2]))
    fake_train(config, directory, progress)

run_all(EXPERIMENT.runs, pathlib.Path(sys.argv[1]), Trainer(slow, FakeFailure),
        Display(EXPERIMENT.runs))
"""


def start_worker(workdir, seconds=0.2):
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(workdir), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_two_workers_divide_the_runs_and_one_that_is_killed_loses_none(tmp_path):
    killed, survivor = start_worker(tmp_path, seconds=60), start_worker(tmp_path)
    assert killed.stdout is not None and survivor.stdout is not None
    first = killed.stdout.readline().strip()
    killed.kill()
    killed.communicate()
    taken = survivor.communicate()[0].split()
    assert sorted(taken) == sorted(NAMES) and first in taken
    assert all(records.status(tmp_path / name) is Status.DONE for name in NAMES)


def test_two_workers_never_train_the_same_run(tmp_path):
    workers = [start_worker(tmp_path), start_worker(tmp_path)]
    taken = [name for worker in workers for name in worker.communicate()[0].split()]
    assert sorted(taken) == sorted(NAMES)


def test_training_that_ends_without_a_mark_is_a_fault(tmp_path):
    silent = Trainer(lambda config, directory, progress: None, FakeFailure)
    with pytest.raises(RuntimeError, match="without a DONE or FAILED"):
        sweep(tmp_path, silent)


def test_the_default_work_directory_names_experiment_and_scale():
    assert str(choose_workdir(EXPERIMENT, None)) == "runs/k_sweep_32k_mini"


def test_a_work_directory_of_something_else_is_refused_in_one_line(tmp_path):
    write_sweep(EXPERIMENT, tmp_path)
    records.prepare(tmp_path / NAMES[1], EXPERIMENT.runs[1])
    assert choose_workdir(EXPERIMENT, str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for other, where, told in [
        (EXPERIMENT.override(seed=5), tmp_path, r"train\.seed is 0 there, 5 here"),
        (EXPERIMENT.override(budget=2.0), tmp_path, r"train\.steps is \d+ there, \d+ here"),
        (registry.get("main_556m", "mini"), tmp_path, "holds k_sweep_32k at mini scale"),
        (registry.get("k_sweep_32k", "paper"), tmp_path, "holds k_sweep_32k at mini scale"),
        (EXPERIMENT, tmp_path / "file", "is a file"),
    ]:
        with pytest.raises(UserError, match=told) as refusal:
            choose_workdir(other, str(where))
        assert "\n" not in str(refusal.value)


def test_every_seed_has_a_directory_of_its_own(tmp_path):
    seeds = EXPERIMENT.override(seeds=2)
    display = Display(seeds.runs, io.StringIO())
    outcome = run_all(seeds.runs, tmp_path, trainer(), display)
    assert outcome.done == [run.folder for run in seeds.runs]
    assert (tmp_path / "dense" / records.DONE).exists()
    other = records.RunRecord.load(tmp_path / "dense_seed1")
    assert other.config.train.seed == 1 and other.config.name == "dense"


def test_sweep_json_names_every_run_with_its_hash(tmp_path):
    write_sweep(EXPERIMENT, tmp_path / "deep" / "sweep")
    content = storage.read_json(tmp_path / "deep" / "sweep" / records.SWEEP)
    assert (content["experiment"], content["scale"]) == ("k_sweep_32k", "mini")
    assert [run["name"] for run in content["runs"]] == NAMES
    assert len({run["hash"] for run in content["runs"]}) == len(NAMES)


def test_the_bar_shows_tokens_loss_and_the_time_left_of_run_and_sweep():
    stream = io.StringIO()
    display = Display(EXPERIMENT.runs, stream)
    run = EXPERIMENT.runs[0]
    with display.bar(run) as progress:
        progress(FakeProgress(1, 160, run.train.tokens // 2, 2.345, eta_s=75.0))
        # Before its first timing a run knows no rate.
        last = FakeProgress(2, 160, run.train.tokens, 2.2, tokens_per_s=0.0, eta_s=float("inf"))
        progress(dataclasses.replace(last))
    shown = stream.getvalue()
    assert "[1/5] dense" in shown and "tokens" in shown
    assert "100%" in shown and "loss 2.200, ? left, sweep ?" in shown


def test_train_one_returns_how_far_the_run_is(tmp_path):
    run = EXPERIMENT.runs[0]
    display = Display([run], io.StringIO())
    failing = trainer(failing=[run.name])
    assert runner.train_one(run, tmp_path, failing, display) is Status.FAILED
    assert runner.train_one(run, tmp_path, trainer(), display) is Status.FAILED
    assert runner.train_one(run, tmp_path, trainer(), display, True) is Status.DONE


def test_processes_compare_the_runs_and_the_content_of_their_data(tmp_path):
    compared: list[dict[str, str]] = []
    shared: list[object] = []
    processes: Any = types.SimpleNamespace(count=2, agree=compared.append, share=shared.append)
    for seed in (0, 1):
        runner.agree(processes, EXPERIMENT.override(seed=seed).runs[:2], tmp_path)
    one, other = compared
    data = EXPERIMENT.runs[0].data
    assert one.pop("the content of --data") == sources.load(data).hash
    assert list(one) == [f"the configuration of {name}" for name in NAMES[:2]]
    assert all(one[label] != other[label] for label in one)
    assert shared == [tmp_path] * 2
    # A process that is alone compares nothing, and loads no data ahead.
    runner.agree(ALONE, EXPERIMENT.override(data="nowhere").runs, tmp_path)
