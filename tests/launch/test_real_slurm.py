"""A real Slurm on this machine runs the scripts: an array, preemption, a run over two nodes.

Skipped where Slurm is not installed: ``apt-get install slurmctld slurmd slurm-client munge``.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from tests.launch import slurm_cluster
from tests.launch.slurm_cluster import Slurm
from tests.launch.tiny_sweep import HELD_AT, RUNS
from tests.training import small
from xmod_jax import records

ROOT = pathlib.Path(__file__).parents[2]
_MISSING = slurm_cluster.missing()
_WAIT_S = 900  # at most, for anything; a machine that does nothing else takes seconds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(_MISSING), reason=f"no Slurm here: {', '.join(_MISSING)} not installed"
    ),
]


@pytest.fixture(scope="module")
def slurm():
    # Not pytest's own folder: a socket's path has to be short.
    with (
        tempfile.TemporaryDirectory(prefix="slurm_", ignore_cleanup_errors=True) as folder,
        slurm_cluster.running(pathlib.Path(folder)) as cluster,
    ):
        yield cluster


def tiny(*command: str) -> list[str]:
    return [sys.executable, "-m", "tests.launch.tiny_sweep", *command]


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The sweep as one process trains it, without Slurm."""
    workdir = tmp_path_factory.mktemp("local") / "sweep"
    flags = ["--experiment=tiny", "--scale=mini", f"--workdir={workdir}"]
    command = tiny("python", "-m", "experiments.sweep", *flags)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return workdir


@pytest.fixture
def hold(tmp_path):
    (tmp_path / "hold").mkdir()
    return tmp_path / "hold"


def submit(slurm: Slurm, hold: pathlib.Path, script: str, options: list[str], flags: list[str]):
    """Number of the job that launch/slurm/submit.sh submits."""
    variables = {
        "XMOD_RUN": " ".join(tiny()),
        "XMOD_SBATCH": "--partition=work --parsable",
        "TINY_HOLD": str(hold),
        "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
    }
    logs = f"--output={hold.parent}/%x_%A_%a.log"
    command = [ROOT / "launch/slurm/submit.sh", logs, *options, f"launch/slurm/{script}"]
    return slurm.call(*command, "--experiment=tiny", "--scale=mini", *flags, **variables)


def wait_until_held(slurm: Slurm, directory: pathlib.Path) -> None:
    path = directory / records.TRAIN
    # Step n is recorded before the run waits in it; it then has taken the step after.
    held = lambda: path.exists() and len(records.read_lines(path)) >= HELD_AT
    slurm.until(f"{directory.name} in mid-run", held, _WAIT_S)


def wait_until_completed(slurm: Slurm, *jobs: str) -> None:
    states = lambda: [slurm.job(job)["JobState"] for job in jobs]
    ended = lambda: all(state not in ("PENDING", "RUNNING", "COMPLETING") for state in states())
    slurm.until(f"jobs {jobs} ended", ended, _WAIT_S)
    assert states() == ["COMPLETED"] * len(jobs), slurm.report()


def test_a_sweep_as_an_array_survives_preemption_and_gives_the_local_results(
    slurm, local, hold, tmp_path
):
    (hold / "xmod").touch()
    workdir = tmp_path / "sweep"
    job = submit(slurm, hold, "sweep.sbatch", ["--array=0-2"], [f"--workdir={workdir}"])
    elements = [f"{job}_{number}" for number in range(len(RUNS))]
    wait_until_held(slurm, workdir / "xmod")
    node = slurm.job(elements[1])["NodeList"]
    urgent = slurm.call(
        *("sbatch", "--parsable", "--partition=urgent", f"--nodelist={node}"),
        *(f"--output={tmp_path}/urgent.log", "--wrap=true"),
    )
    wait_until_completed(slurm, urgent, *elements)

    assert [slurm.job(element)["Restarts"] for element in elements] == ["0", "1", "0"]
    assert slurm.job(urgent)["StartTime"] <= slurm.job(elements[1])["StartTime"]
    log = (tmp_path / f"xmod_sweep_{job}_1.log").read_text()
    assert "xmod: asked to leave at step" in log
    for name in RUNS:
        assert records.status(workdir / name) is records.Status.DONE
        for file in (records.TRAIN, records.EVAL):
            assert small.curve(workdir / name, file) == small.curve(local / name, file), (
                name,
                file,
            )


def test_a_run_over_two_nodes_is_queued_again_when_the_batch_shell_alone_gets_the_signal(
    slurm, local, hold, tmp_path
):
    (hold / "xmod").touch()
    workdir = tmp_path / "sweep"
    flags = ["--run=xmod", f"--workdir={workdir}", "--mesh=data:2"]
    job = submit(slurm, hold, "run.sbatch", ["--nodes=2"], flags)
    wait_until_held(slurm, workdir / "xmod")
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    wait_until_completed(slurm, job)

    assert slurm.job(job)["Restarts"] == "1"
    assert records.status(workdir / "xmod") is records.Status.DONE
    want, got = (small.curve(d / "xmod", records.TRAIN) for d in (local, workdir))
    assert [line["step"] for line in got] == [line["step"] for line in want]
    losses = ([line["loss"] for line in lines] for lines in (got, want))
    assert next(losses) == pytest.approx(next(losses), rel=2e-5)
