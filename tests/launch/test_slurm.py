"""The batch scripts: signals reach the run, its status the scheduler; what they ask srun for."""

from __future__ import annotations

import os
import pathlib
import shlex
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_SCRIPT = """
set -euo pipefail
. launch/slurm/requeue.sh
scontrol() { echo "scontrol $*"; }
run_or_requeue bash -c "$1" && echo finished || echo "status $?"
"""
# Says that it listens, then waits for the signal as a run does.
_LISTENS = "trap 'exit 75' USR1; echo ready; sleep 60 >/dev/null & wait $!"
_DEAF = "echo ready; exec sleep 60"


@pytest.fixture
def batch(tmp_path):
    """Starts a batch shell that runs a command."""

    def start(command: str, **variables: str) -> subprocess.Popen[str]:
        known = {"SLURM_JOB_ID": "7", "XMOD_ATTEMPTS": str(tmp_path / "attempts")}
        return subprocess.Popen(
            ["bash", "-c", _SCRIPT, "_", command],
            cwd=ROOT,
            env=os.environ | known | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(shell: subprocess.Popen[str]) -> tuple[str, str]:
    """What a batch shell says, on stdout and stderr."""
    return shell.communicate(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_shell_alone_reaches_the_run_and_the_job_is_queued_again(batch, number):
    with batch(_LISTENS) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(number)
        assert shell.stdout.read() == "scontrol requeue 7\n"
    assert shell.returncode == 0


def test_an_element_of_an_array_is_queued_again_by_its_own_number(batch):
    with batch("exit 75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3") as shell:
        assert shell.stdout is not None and shell.stdout.read() == "scontrol requeue 7_3\n"


def test_a_run_that_dies_of_the_signal_before_it_listens_is_queued_again(batch):
    with batch(_DEAF) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "scontrol requeue 7\n"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("true", "finished\n"),
        ("exit 1", "status 1\n"),
        ("exit 2", "status 2\n"),
        ("exit 101", "status 1\n"),  # as launch/slurm/task.sh has it
        ("exit 102", "status 2\n"),
        ("exit 127", "status 127\n"),
        ("exit 130", "status 130\n"),
    ],
)
def test_any_other_status_is_the_jobs(batch, command, said):
    with batch(command) as shell:
        assert shell.stdout is not None and shell.stdout.read() == said


def test_a_job_is_submitted_with_the_sites_options(tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    sbatch.chmod(0o755)
    site = {"XMOD_SBATCH": "--account=a --partition=p", "XMOD_NOTICE": "60"}
    done = subprocess.run(
        [ROOT / "launch/slurm/submit.sh", "--array=0-1", "launch/slurm/sweep.sbatch", "--only=x y"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | site,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    options = "--account=a --partition=p --signal=B:USR1@60 --array=0-1"
    assert done.stdout == f"{ROOT} {options} launch/slurm/sweep.sbatch --only=x y\n"


@pytest.mark.parametrize("command", ["kill -9 $$", "exit 137", "exit 134", "exit 139"])
def test_when_a_process_was_killed_the_job_is_queued_again(batch, command):
    """srun gives 128 and the signal, however many of the others say 75."""
    assert ended(batch(command))[0] == "scontrol requeue 7\n"


def test_a_job_that_makes_no_progress_is_queued_again_once(batch):
    assert ended(batch("exit 75"))[0] == "scontrol requeue 7\n"
    out, errors = ended(batch("exit 75", SLURM_RESTART_COUNT="1"))
    assert out == "status 1\n"
    assert "job 7 was to be started again, but its last starts came no further" in errors
    # Submitted again it begins anew, also should its number come again.
    assert ended(batch("exit 75"))[0] == "scontrol requeue 7\n"


def test_a_job_whose_starts_cannot_be_counted_is_not_queued_for_ever(batch, tmp_path):
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "attempts")
    out, errors = ended(batch("echo trained; exit 75", XMOD_ATTEMPTS=nowhere))
    assert out == "status 2\n" and f"{nowhere} cannot be written to" in errors
    # One that could be written to when the job began.
    full = tmp_path / "full"
    ended(batch("exit 75", XMOD_ATTEMPTS=str(full)))
    (known,) = full.glob(".attempt_*.left")
    known.unlink()
    known.mkdir()
    out, errors = ended(batch("exit 75", XMOD_ATTEMPTS=str(full)))
    assert out == "status 1\n" and f"cannot be noted in {full}" in errors
    # One that was asked to leave has done its time, and goes on.
    with batch(_LISTENS, XMOD_ATTEMPTS=str(full)) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "scontrol requeue 7\n"


def test_a_job_that_makes_progress_is_queued_again_and_again(batch, tmp_path):
    run = tmp_path / "a run"
    told = f'echo "{run}" >>"$XMOD_ATTEMPT"; '
    for step in (4, 8, 12):
        saves = f"mkdir -p '{run}/checkpoints/{step}'; exit 75"
        out, _ = ended(batch(told + saves, SLURM_RESTART_COUNT=str(step // 4 - 1)))
        assert out == "scontrol requeue 7\n"
    # What a save that was cut leaves is no progress.
    cut = f"mkdir -p '{run}/checkpoints/16.orbax-checkpoint-tmp'; exit 75"
    assert ended(batch(told + cut, SLURM_RESTART_COUNT="3"))[0] == "status 1\n"


def test_a_job_that_is_preempted_before_it_comes_anywhere_is_given_more_starts(batch):
    for restart in range(5):
        with batch(_LISTENS, SLURM_RESTART_COUNT=str(restart)) as shell:
            assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
            shell.send_signal(signal.SIGTERM)
            assert shell.stdout.read() == "scontrol requeue 7\n"


def srun(folder, *tasks):
    """A folder for PATH with an srun that runs its command as tasks and gives the highest status.

    `tasks` is what each does, in Bash; the call's variables and words go to ``srun.log``.
    """
    stub = folder / "srun"
    stub.write_text(
        "#!/bin/bash\n"
        f'echo "${{SRUN_CPUS_PER_TASK:-}} $*" >>{folder}/srun.log\n'
        "while [[ $1 == --* ]]; do shift; done\nhighest=0\n"
        f"for does in {' '.join(map(shlex.quote, tasks))}; do\n"
        '  DOES=$does "$@" & wait $!; status=$?\n'
        "  ((status <= highest)) || highest=$status\ndone\nexit $highest\n"
    )
    stub.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


_TASKS = _SCRIPT.replace('run_or_requeue bash -c "$1"', """tasks bash -c 'eval "$DOES"'""")


def job(tmp_path, *tasks, **variables):
    """What a batch shell says whose step's tasks do that."""
    known = {"SLURM_JOB_ID": "7", "XMOD_ATTEMPTS": str(tmp_path / "attempts")}
    return subprocess.run(
        ["bash", "-c", _TASKS],
        cwd=ROOT,
        env=os.environ | known | {"PATH": srun(tmp_path, *tasks)} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (("exit 0", "exit 0"), "finished\n"),
        (("exit 75", "exit 75"), "scontrol requeue 7\n"),
        (("exit 2", "exit 75"), "status 2\n"),
        (("exit 75", "exit 1"), "status 1\n"),
        (("exit 75", "exit 3"), "status 1\n"),
        (("exit 75", "kill -9 $$"), "scontrol requeue 7\n"),
        (("kill -6 $$", "exit 75"), "scontrol requeue 7\n"),
        (("exit 75", "exit 255"), "status 1\n"),
        (("kill -9 $$", "exit 2"), "status 2\n"),
        (("exit 75", "no_such_program"), "status 127\n"),
    ],
)
def test_the_status_that_counts_among_those_of_the_tasks_is_the_jobs(tmp_path, tasks, said):
    assert job(tmp_path, *tasks) == said


def test_the_cpus_of_a_task_are_passed_on_to_srun(tmp_path):
    job(tmp_path, "exit 0", SLURM_CPUS_PER_TASK="16")
    assert (tmp_path / "srun.log").read_text().startswith("16 --kill-on-bad-exit=0 ")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--gpus-per-node=8"], "--cpus-per-task=64 --mem=480G"),
        (["--gpus-per-node", "a100:4"], "--cpus-per-task=32 --mem=240G"),
        (["--gres=gpu:a100:2,disk:1"], "--cpus-per-task=16 --mem=120G"),
        (["--gpus-per-node=8", "--ntasks-per-node=8"], "--cpus-per-task=8 --mem=480G"),
        (["--gpus-per-node=8", "--cpus-per-task=12"], "--mem=480G"),
        (["--gpus-per-node=8", "-c", "12", "--mem=0"], ""),
        (["--gpus=16", "--nodes=2"], "--cpus-per-gpu=8 --mem-per-gpu=60G"),
        (["--nodes=2"], ""),
        (["-N", "2", "-p", "gpu", "--gpus-per-node=8"], "--cpus-per-task=64 --mem=480G"),
        (["--hold", "--gpus-per-node=8"], "--cpus-per-task=64 --mem=480G"),
        (["--gpus-per-node=8", "--parsable"], "--cpus-per-task=64 --mem=480G"),
        (["-A", "lab", "-t", "4:00:00", "-G", "8"], "--cpus-per-gpu=8 --mem-per-gpu=60G"),
        (["--gpus-per-node=8", "--tasks-per-node=4"], "--cpus-per-task=16 --mem=480G"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_job_asks_for_cpus_and_memory_for_its_gpus(tmp_path, options, asked):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "$@"\n')
    sbatch.chmod(0o755)
    done = subprocess.run(
        [ROOT / "launch/slurm/submit.sh", *options, "launch/slurm/run.sbatch", "--mesh=fsdp:8"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    words = ["--signal=B:USR1@180", *asked.split(), *options]
    assert done.stdout.split() == [*words, "launch/slurm/run.sbatch", "--mesh=fsdp:8"], done.stderr


def test_a_folder_that_cannot_hold_what_is_known_of_starts_is_one_line(batch, tmp_path):
    (tmp_path / "file").touch()
    out, errors = ended(batch("exit 75", XMOD_ATTEMPTS=str(tmp_path / "file" / "folder")))
    assert out == "status 2\n" and "set XMOD_ATTEMPTS" in errors and errors.count("\n") == 1
