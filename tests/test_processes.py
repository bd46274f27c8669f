"""Who trains a run together: flags, variables, Slurm; and that two processes equal one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import pytest

from experiments import cluster
from tests.devices import ROOT, coordinator, environment
from tests.test_slurm import STEP
from tests.training import small
from xmod_jax import records
from xmod_jax.errors import UserError
from xmod_jax.processes import Processes


def find(*given: Any, **variables: str) -> Processes:
    coordinator, count, index = given or (None, None, None)
    return Processes.find(coordinator, count, index, variables)


def test_without_anything_a_process_is_alone():
    assert find() == Processes() and find().leads


def test_flags_come_before_variables_and_these_before_slurm():
    variables = {"XMOD_COORDINATOR": "a:1", "XMOD_PROCESS_COUNT": "2", "XMOD_PROCESS_INDEX": "1"}
    assert find("b:2", 3, 2, **variables) == Processes(3, 2, "b:2")
    assert find(**variables, **STEP) == Processes(2, 1, "a:1")


def test_the_tasks_of_a_slurm_step_find_each_other():
    found = find(**STEP)
    assert (found.count, found.index) == (4, 3)
    assert found.coordinator is not None and found.coordinator.startswith("gpu03:")
    assert found.local_devices is None
    alone = find(**STEP | {"SLURM_STEP_NUM_TASKS": "1"})
    assert alone == Processes()


def test_a_task_that_sees_its_nodes_devices_takes_one_of_them():
    assert find(**STEP, CUDA_VISIBLE_DEVICES="0,1").local_devices == (1,)
    assert find(**STEP, CUDA_VISIBLE_DEVICES="1").local_devices is None


def test_tasks_of_a_node_divide_its_devices_evenly():
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    assert find(**STEP, **eight).local_devices == (4, 5, 6, 7)
    uneven = STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,4", "SLURM_STEP_NUM_TASKS": "5"}
    alone = uneven | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert find(**alone, **eight, SLURM_NODEID="0").local_devices is None
    assert find(**uneven, **eight, SLURM_NODEID="1").local_devices == (2, 3)


def test_jax_takes_the_devices_that_it_is_told_and_detects_none(monkeypatch):
    """Under Slurm JAX's own detection gives every process the one device of its number."""
    told = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: told.update(named))
    for local in (None, (4, 5)):
        Processes(2, 1, "localhost:1", local)._initialize(1)
        assert told["cluster_detection_method"] == "deactivate"
        assert told["local_device_ids"] == (None if local is None else [4, 5])


def test_a_flag_stands_for_its_own_variable_alone():
    variables = {"XMOD_COORDINATOR": "a:1", "XMOD_PROCESS_COUNT": "3", "XMOD_PROCESS_INDEX": ""}
    assert find(None, None, 2, **variables) == Processes(3, 2, "a:1")
    with pytest.raises(UserError, match="--process_index"):
        find(**variables)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1", None, None), "--process_count, --process_index"),
        (("a:1", 2, 2), "process index 2 is not below 2 processes"),
        (("a:1", 2, -1), "process index -1 is not below 2 processes"),
        (("a:1", 0, 0), "--process_count is at least 1"),
        (("nowhere", 2, 1), "need a coordinator host:port"),
        (("http://a:1", 2, 1), "need a coordinator host:port"),
        (("a:99999", 2, 1), "need a coordinator host:port"),
        (("", 2, 1), "need a coordinator host:port"),
    ],
)
def test_processes_that_make_no_whole_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        find(*given)


@pytest.mark.parametrize("value", ["two", "1.0", "1_0", "0x2", "\u0662", " 2", "2\n", "9" * 30])
@pytest.mark.parametrize("name", ["XMOD_PROCESS_COUNT", "XMOD_PROCESS_INDEX"])
def test_variables_that_are_no_numbers_are_refused(name, value):
    variables = {"XMOD_COORDINATOR": "a:1", "XMOD_PROCESS_COUNT": "2", "XMOD_PROCESS_INDEX": "0"}
    with pytest.raises(UserError, match=f"{name}: .* is not a whole number"):
        find(**variables | {name: value})


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


def start(command, *flags, root=ROOT):
    return subprocess.Popen(
        [sys.executable, *command, *flags],
        cwd=root,
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def commands(name, *flags, own=((), ())):
    """Two processes of a command that are started as a user starts them, the first leading.

    Args:
      name: of the command.
      flags: of both.
      own: of each; they come last.
    """
    command = ["-m", f"experiments.{name}", "--experiment=k_sweep_32k", "--scale=mini"]
    common = [*command, f"--coordinator={coordinator()}", "--process_count=2", *flags]
    return [start(common, f"--process_index={i}", *given) for i, given in enumerate(own)]


def ends(children, timeout=600):
    """Statuses of processes, and the last line that each says."""
    said = [child.communicate(timeout=timeout)[1].strip().splitlines() for child in children]
    return [child.returncode for child in children], [(lines or [""])[-1] for lines in said]


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("--seed=0", "--seed=1", "--seed is 0 in process 0, 1 in process 1"),
        ("--process_count=2", "--process_count=3", "--process_count is 2 in process 0, 3 in"),
        (
            "--keep_every=0",
            "--start_from=runs/x",
            "--start_from is not given in process 0,",
        ),
        ("--run=dense", "--run=xmod_a1k2", "--run is dense in process 0, xmod_a1k2 in process 1"),
    ],
)
def test_commands_that_were_started_differently_are_refused_before_they_train(
    first, second, told, tmp_path
):
    children = commands(
        "train", "--run=dense", f"--workdir={tmp_path}/w", own=((first,), (second,))
    )
    statuses, lines = ends(children)
    assert statuses == [2, 2], lines
    assert all(told in line for line in lines)
    assert not (tmp_path / "w").exists()


def test_processes_of_different_code_are_refused(tmp_path):
    for package in ("experiments", "xmod_jax"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "xmod_jax" / "model.py").open("a").write("# mended on one node alone\n")
    command = ["-m", "experiments.train", "--experiment=k_sweep_32k", "--scale=mini", "--run=dense"]
    command += [f"--coordinator={coordinator()}", "--process_count=2", f"--workdir={tmp_path}/w"]
    roots = (ROOT, tmp_path)
    children = [start(command, f"--process_index={i}", root=root) for i, root in enumerate(roots)]
    statuses, lines = ends(children)
    assert statuses == [2, 2], lines
    assert all("the code in experiments and xmod_jax is" in line for line in lines)


@pytest.mark.parametrize("command", ["train --run=dense", "sweep --only=dense"])
def test_when_one_does_not_find_the_data_the_others_end_with_it(command, tmp_path):
    name, flag = command.split()
    own = (("--data=embedded",), (f"--data={tmp_path}/elsewhere",))
    statuses, lines = ends(commands(name, flag, f"--workdir={tmp_path}/w", own=own))
    assert statuses == [2, 2], lines
    assert "process 1 ended with status 2" in lines[0] and "no such data" in lines[1]
    assert not (tmp_path / "w").exists()


def test_processes_that_compile_nothing_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    statuses, lines = ends(commands("train", "--run=dense", f"--workdir={tmp_path}/w"))
    assert statuses == [2, 2], lines
    assert all("JAX_DISABLE_JIT" in line or "ended with status 2" in line for line in lines)
    assert "unset it" in "".join(lines) and not (tmp_path / "w").exists()


def test_several_devices_of_one_process_that_compiles_nothing_are_refused(tmp_path):
    command = ["-m", "experiments.train", "--experiment=k_sweep_32k", "--scale=mini", "--run=dense"]
    done = subprocess.run(
        [sys.executable, *command, f"--workdir={tmp_path}/w"],
        cwd=ROOT,
        env=environment(2) | {"JAX_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2 and "JAX_DISABLE_JIT" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "w").exists()


def test_what_a_program_is_compiled_by_is_compared(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/0 --xla_cpu_enable_fast_math=false")
    with jax.disable_jit():
        found = cluster.started_with()
    assert found["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"
    assert found["JAX_DISABLE_JIT"] == "True"
    assert cluster.started_with()["JAX_DISABLE_JIT"] == "False"


def test_a_work_directory_that_is_not_one_folder_is_refused_and_nothing_is_left(tmp_path):
    folders = [tmp_path / name / "sweep" for name in "ab"]
    own = [[f"--workdir={folder}"] for folder in folders]
    statuses, lines = ends(commands("train", "--run=dense", own=own))
    assert statuses == [2, 2], lines
    assert all(f"{folders[0]} of process 0" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index", [0, 1])
def test_one_that_waits_for_the_others_heeds_a_signal_within_seconds(index, tmp_path):
    with start(
        ["-c", _WAITS, coordinator(), str(index)],
    ) as waits:
        assert waits.stdout is not None and waits.stdout.readline() == "waits\n"
        waits.send_signal(signal.SIGTERM)
        _, errors = waits.communicate(timeout=20)
    assert waits.returncode == 75
    assert "asked to leave" in errors and errors.count("\n") == 1


_WAITS = """
import sys
from experiments import cli
from xmod_jax.processes import Processes
from xmod_jax.training.preemption import Watch
index, place = int(sys.argv.pop()), sys.argv.pop()

def main():
    processes = Processes.find(place, 2, index)
    with Watch(processes).signals() as watch:
        print("waits", flush=True)
        with processes.meeting(cli.abandon, {}, lambda: watch.arrived):
            pass

cli.run(main)
"""


def test_one_that_never_comes_is_one_line_and_another_try(tmp_path):
    script = _WAITS.replace("watch.arrived)", "watch.arrived, 1)")
    statuses, lines = ends([start(["-c", script, coordinator(), str(i)]) for i in range(2)][:1])
    assert statuses == [75] and "did not come within 1 s" in lines[0]


_ENDS = """
import sys, threading
from experiments import cli
from xmod_jax.errors import UserError
from xmod_jax.processes import Processes
who, how, index, place = sys.argv[1:]
del sys.argv[1:]

def main():
    processes = Processes.find(place, 2, int(index))
    with processes.meeting(cli.abandon):
        if index == who and how == "status":
            return 1
        if index == who:
            raise {"mistake": UserError, "fault": RuntimeError}[how]("no good")
        threading.Event().wait()

cli.run(main)
"""


@pytest.mark.parametrize(
    ("who", "how", "status"),
    [("0", "mistake", 2), ("0", "fault", 1), ("0", "status", 1), ("1", "mistake", 2)],
)
def test_when_one_ends_the_others_end_with_its_status(who, how, status):
    place = coordinator()
    children = [start(["-c", _ENDS, who, how, str(index), place]) for index in range(2)]
    statuses, lines = ends(children, 120)
    assert statuses == [status, status], lines
    other = lines[1 - int(who)]
    assert f"process {who} ended with status {status}: its message says why" in other


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
        if index == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

main()
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_one_that_waits_for_a_killed_process_in_a_library_ends_with_one_line(killed):
    place = coordinator()
    children = [start(["-c", _DEAF, str(killed), place, str(index)]) for index in range(2)]
    # JAX by itself would abort it: after a minute, or at once where process 0 was killed.
    statuses, lines = ends(children, 120)
    assert (statuses[killed], statuses[1 - killed]) == (-9, 75), lines
    assert "another process of the run was lost" in lines[1 - killed]


@pytest.mark.slow
@pytest.mark.drill
def test_four_processes_on_data_and_fsdp_equal_one(alone, tmp_path):
    statuses, errors = together(tmp_path / "four", 4, "data:2,fsdp:2")
    assert statuses == [0] * 4, errors
    check_same_curve(alone, tmp_path / "four")
    assert os.path.isfile(tmp_path / "four" / records.DONE)
