"""Who trains a run together: flags, variables, Slurm; and that two processes equal one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import jax
import pytest

from tests.devices import ROOT, coordinator, environment
from tests.training import small
from xmod_jax import records
from xmod_jax.errors import UserError
from xmod_jax.processes import Processes

_SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def find(*given: Any, **variables: str) -> Processes:
    coordinator, count, index = given or (None, None, None)
    return Processes.find(coordinator, count, index, variables)


def test_without_anything_a_process_is_alone():
    assert find() == Processes() and find().leads


def test_flags_come_before_variables_and_these_before_slurm():
    variables = {"XMOD_COORDINATOR": "a:1", "XMOD_PROCESS_COUNT": "2", "XMOD_PROCESS_INDEX": "1"}
    assert find("b:2", 3, 2, **variables) == Processes(3, 2, "b:2")
    assert find(**variables, **_SLURM) == Processes(2, 1, "a:1")


def test_the_tasks_of_a_slurm_step_find_each_other():
    found = find(**_SLURM)
    assert (found.count, found.index) == (4, 3)
    assert found.coordinator is not None and found.coordinator.startswith("gpu03:")
    assert found.local_devices is None
    alone = find(**_SLURM | {"SLURM_STEP_NUM_TASKS": "1"})
    assert alone == Processes()


def test_a_task_that_sees_its_nodes_devices_takes_one_of_them():
    assert find(**_SLURM, CUDA_VISIBLE_DEVICES="0,1").local_devices == (1,)
    assert find(**_SLURM, CUDA_VISIBLE_DEVICES="1").local_devices is None


def test_tasks_of_a_node_divide_its_devices_evenly():
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert find(**_SLURM, **eight).local_devices == (4, 5, 6, 7)
    uneven = _SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1,4", "SLURM_STEP_NUM_TASKS": "5"}
    assert find(**uneven, **eight, SLURM_NODEID="0").local_devices is None
    assert find(**uneven, **eight, SLURM_NODEID="1").local_devices == (2, 3)
    with pytest.raises(UserError, match="TASKS_PER_NODE"):
        find(**_SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, **eight)


def test_jax_takes_the_devices_that_it_is_told_and_detects_none(monkeypatch):
    """Under Slurm JAX's own detection gives every process the one device of its number."""
    told = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: told.update(named))
    for local in (None, (4, 5)):
        Processes(2, 1, "localhost:1", local)._connect()
        assert told["cluster_detection_method"] == "deactivate"
        assert told["local_device_ids"] == (None if local is None else [4, 5])


def test_array_elements_and_steps_that_share_a_node_meet_at_different_ports():
    ports = {
        find(**_SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).coordinator
        for job in range(1234, 1264)
        for step in range(8)
    }
    assert len(ports) == 240


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", None, None), "--process_count, --process_index"),
        (("a:1", 2, 2), "process index 2 is not below 2 processes"),
        (("nowhere", 2, 1), "need a coordinator host:port"),
    ],
)
def test_processes_that_make_no_whole_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        find(*given)


def test_variables_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="'two' is not a whole number"):
        find(XMOD_COORDINATOR="a:1", XMOD_PROCESS_COUNT="two", XMOD_PROCESS_INDEX="0")


def together(directory, count, mesh, devices=1, signal_at=None):
    """Exit statuses and errors of `count` processes that train the small run."""
    place, children = coordinator(), []
    for index in range(count):
        arguments = [directory, mesh, count, index, place]
        if signal_at is not None and index == count - 1:
            arguments.append(signal_at)
        command = [sys.executable, "-m", "tests.training.together", *map(str, arguments)]
        children.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment(devices),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ends = [(child.communicate(timeout=1200), child.returncode) for child in children]
    return [status for _, status in ends], [error[-3000:] for (_, error), _ in ends]


def check_same_curve(one, other):
    for name in (records.TRAIN, records.EVAL):
        want, got = small.curve(one, name), small.curve(other, name)
        assert [line["step"] for line in got] == [line["step"] for line in want]
        for a, b in zip(got, want, strict=True):
            for key in ("loss", "loss_topk", "loss_threshold", "loss_calibrated"):
                if key in b:
                    assert a[key] == pytest.approx(b[key], rel=2e-5), (name, b["step"], key)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone") / "run"
    statuses, errors = together(directory, 1, "data:1")
    assert statuses == [0], errors
    return directory


@pytest.mark.slow
@pytest.mark.drill
def test_two_processes_stop_together_when_one_is_asked_to_and_resume_on_one_processs_curve(
    alone, tmp_path
):
    directory = tmp_path / "two"
    # Only process 1 gets the signal, after step 3: both are in step 5 when they hear of it.
    statuses, errors = together(directory, 2, "data:2", signal_at=3)
    assert statuses == [75, 75], errors
    assert all("asked to leave at step" in error for error in errors)
    statuses, errors = together(directory, 2, "data:2")
    assert statuses == [0, 0], errors
    check_same_curve(alone, directory)
    assert len(list((directory / "tensorboard").iterdir())) == 2  # of process 0, twice started


@pytest.mark.slow
def test_when_a_process_is_killed_the_other_ends_with_one_line_and_both_resume(alone, tmp_path):
    directory = tmp_path / "killed"
    statuses, errors = together(directory, 2, "data:2", signal_at=-3)
    assert statuses == [75, -9], errors
    assert "another process of the run was lost" in errors[0].splitlines()[-1]
    statuses, errors = together(directory, 2, "data:2")
    assert statuses == [0, 0], errors
    check_same_curve(alone, directory)


def commands(name, *flags):
    """Two processes of a command that are started as a user starts them, the first leading."""
    place = coordinator()
    common = ["--experiment=k_sweep_32k", "--scale=mini", f"--coordinator={place}"]
    return [
        subprocess.Popen(
            [
                *(sys.executable, "-m", f"experiments.{name}", *common, *flags),
                *("--process_count=2", f"--process_index={index}"),
            ],
            cwd=ROOT,
            env=environment(1),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


@pytest.mark.slow
def test_the_commands_of_two_processes_train_a_fresh_folder_and_stop_together(tmp_path):
    children = commands("sweep", "--only=dense", f"--workdir={tmp_path}")
    train = tmp_path / "dense" / records.TRAIN
    while not train.exists() and all(child.poll() is None for child in children):
        with contextlib.suppress(subprocess.TimeoutExpired):
            children[0].wait(timeout=0.2)
    children[1].send_signal(signal.SIGTERM)
    ends = [(*child.communicate(timeout=600), child.returncode) for child in children]
    assert [status for *_, status in ends] == [75, 75], ends
    assert ["to go at" in out for out, *_ in ends] == [True, False]  # the leader shows the plan
    assert records.read_lines(train)


@pytest.mark.slow
def test_two_processes_on_a_mesh_of_one_device_are_refused(tmp_path):
    children = commands("train", "--run=dense", "--mesh=data:1", f"--workdir={tmp_path}")
    ends = [(*child.communicate(timeout=600), child.returncode) for child in children]
    assert [status for *_, status in ends] == [2, 2], ends
    assert all("there are 2" in error for _, error, _ in ends)
    assert not (tmp_path / "dense" / records.CONFIG).exists()


_DEAF = """
import os, signal, sys, threading
from experiments import cli
from xmod_jax.processes import Processes

def main():
    index = int(sys.argv.pop())
    with Processes.find(sys.argv.pop(), 2, index).meeting(cli.abandon):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

main()
"""


def test_one_that_waits_for_a_killed_process_in_a_library_ends_with_one_line():
    place = coordinator()
    start = lambda index: subprocess.Popen(
        [sys.executable, "-c", _DEAF, place, str(index)],
        cwd=ROOT,
        env=environment(1),
        stderr=subprocess.PIPE,
        text=True,
    )
    with start(0) as deaf, start(1) as killed:
        killed.communicate(timeout=120)
        # JAX by itself would abort it, after a minute.
        _, errors = deaf.communicate(timeout=120)
    assert [deaf.returncode, killed.returncode] == [75, -9], errors
    assert "another process of the run was lost" in errors.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.drill
def test_four_processes_on_data_and_fsdp_equal_one(alone, tmp_path):
    statuses, errors = together(tmp_path / "four", 4, "data:2,fsdp:2")
    assert statuses == [0] * 4, errors
    check_same_curve(alone, tmp_path / "four")
    assert os.path.isfile(tmp_path / "four" / records.DONE)
