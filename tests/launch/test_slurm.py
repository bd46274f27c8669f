"""The batch script in preemption: signals reach the run, its status reaches the scheduler."""

from __future__ import annotations

import os
import pathlib
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


def batch(command: str, **variables: str) -> subprocess.Popen[str]:
    """A batch shell that runs `command`."""
    return subprocess.Popen(
        ["bash", "-c", _SCRIPT, "_", command],
        cwd=ROOT,
        env=os.environ | {"SLURM_JOB_ID": "7"} | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_shell_alone_reaches_the_run_and_the_job_is_queued_again(number):
    with batch(_LISTENS) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(number)
        assert shell.stdout.read() == "scontrol requeue 7\n"
    assert shell.returncode == 0


def test_an_element_of_an_array_is_queued_again_by_its_own_number():
    with batch("exit 75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3") as shell:
        assert shell.stdout is not None and shell.stdout.read() == "scontrol requeue 7_3\n"


def test_a_run_that_dies_of_the_signal_before_it_listens_is_queued_again():
    with batch(_DEAF) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == "ready\n"
        shell.send_signal(signal.SIGTERM)
        assert shell.stdout.read() == "scontrol requeue 7\n"


@pytest.mark.parametrize(("command", "said"), [("true", "finished\n"), ("exit 2", "status 2\n")])
def test_any_other_status_is_the_jobs(command, said):
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
