"""`sweep` and `train` as commands: the plan, and mistakes in one line."""

import dataclasses

import pytest

from experiments import estimate, planning, registry
from tests.experiments.commands import run_command
from tests.experiments.fake_training import final_record
from xmod_jax import claims, records, storage
from xmod_jax.config import Start
from xmod_jax.errors import UserError

EXPERIMENT = registry.get("k_sweep_32k", "mini")
TWO = ["--coordinator=localhost:1", "--process_count=2", "--process_index=0"]


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    workdir = tmp_path / "sweep"
    result = run_command(
        "sweep", "--experiment=k_sweep_32k", "--scale=mini", f"--workdir={workdir}", "--dry_run"
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [run.name for run in EXPERIMENT.runs]
    for column in ("layers", "N/N_act", "phi ratio", "tokens", "steps", "time"):
        assert column in lines[0]
    assert "to go" in lines[6]
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        ("sweep", ["--experiment=nonsense"], "unknown experiment"),
        ("sweep", ["--experiment=main_556m", "--scale=huge"], "unknown --scale=huge"),
        ("sweep", ["--experiment=main_556m", "--scale=mini", "--only=x"], "unknown run 'x'"),
        ("sweep", ["--experiment=main_556m", "--scale=mini", "--shard=2"], "--shard=2 is not"),
        ("sweep", ["--experiment=main_556m", "--scale=mini", f"--workdir={__file__}"], "is a file"),
        ("sweep", ["--experiment=main_556m", "--scale=mini", "--mesh=8"], "--mesh=8 is not a list"),
        ("sweep", ["--experiment=main_556m", "--scale=mini", "--mesh=fsdp:7"], "the 7 parts"),
        ("sweep", ["--experiment=main_556m", "--data=nowhere", "--dry_run"], "no such data"),
        ("describe", ["--experiment=main_556m", "--data=a=x"], "--data"),
        ("train", ["--experiment=main_556m", "--scale=mini"], "--run is missing"),
        ("plan", ["--experiment=main_556m"], "--run is missing"),
        ("plan", ["--experiment=main_556m", "--run=dense", "--mesh=data:9"], "the 9 parts"),
        ("train", ["--experiment=main_556m", "--scale=mini", "--run=x"], "unknown run 'x'"),
        (
            "train",
            ["--experiment=main_556m", "--scale=mini", "--run=dense", "--start_sparse=copied"],
            "--start_sparse says how --start_from",
        ),
        ("train", ["--experiment=main_556m", "--run=dense", *TWO], "--scale=mini must be given"),
        ("sweep", ["--experiment=main_556m", *TWO], "--scale=mini must be given"),
        ("plan", ["--experiment=main_556m", "--scale=auto", "--run=dense"], "must be given"),
    ],
)
def test_mistakes_are_one_line_and_status_2(command, arguments, told):
    result = run_command(command, *arguments)
    assert result.returncode == 2
    assert told in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["sweep", "train"])
def test_a_work_directory_of_another_configuration_is_refused(command, tmp_path):
    records.prepare(tmp_path / "dense", EXPERIMENT.override(seed=4).run("dense"))
    arguments = ["--experiment=k_sweep_32k", "--scale=mini", f"--workdir={tmp_path}"]
    result = run_command(command, *arguments, *(["--run=dense"] if command == "train" else []))
    assert result.returncode == 2
    assert "train.seed is 4 there, 0 here" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["sweep", "train"])
def test_a_run_that_another_worker_holds_is_come_back_for(command, tmp_path):
    arguments = ["--experiment=k_sweep_32k", "--scale=mini", f"--workdir={tmp_path}"]
    arguments.append("--run=dense" if command == "train" else "--only=dense")
    with claims.claim(tmp_path / "dense"):
        result = run_command(command, *arguments)
    assert result.returncode == 75
    assert "dense is being trained by" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flag", ["--data=nowhere", "--data=", "--seed=99999999999999999999"], ids=lambda flag: flag
)
def test_a_mistake_does_not_bind_the_folder_to_itself(flag, tmp_path):
    workdir = tmp_path / "sweep"
    arguments = ["--experiment=k_sweep_2k", "--scale=mini", "--run=dense", f"--workdir={workdir}"]
    result = run_command("train", *arguments, flag)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert not workdir.exists()


def test_a_sweep_takes_over_a_run_that_started_from_another(tmp_path):
    run = EXPERIMENT.run("xmod_a1k4")
    start = Start("somewhere", "0123456789abcdef", 8)
    records.prepare(tmp_path / run.name, dataclasses.replace(run, start=start))
    arguments = ["--experiment=k_sweep_32k", "--scale=mini", f"--workdir={tmp_path}", "--dry_run"]
    result = run_command("sweep", *arguments)
    assert result.returncode == 0, result.stderr
    assert "unfinished" in result.stdout


@pytest.mark.parametrize("command", ["sweep", "train"])
def test_a_folder_that_cannot_be_made_is_one_line(command, tmp_path):
    (tmp_path / "file").touch()
    workdir = tmp_path / "file" / "sweep"
    arguments = ["--experiment=k_sweep_32k", "--scale=mini", f"--workdir={workdir}"]
    result = run_command(command, *arguments, *(["--run=dense"] if command == "train" else []))
    assert result.returncode == 2
    assert str(workdir) in result.stderr and result.stderr.count("\n") == 1


def test_shards_are_disjoint_and_together_everything():
    parts = [planning.shard(EXPERIMENT.runs, f"{i}/3") for i in range(3)]
    assert sorted(run.name for part in parts for run in part) == sorted(
        run.name for run in EXPERIMENT.runs
    )
    for text in ("3/3", "1/0", "a/2", "-1/2", "1", ""):
        with pytest.raises(UserError, match="--shard"):
            planning.shard(EXPERIMENT.runs, text)


def test_the_estimate_follows_recorded_speed(tmp_path):
    run = EXPERIMENT.runs[0]
    directory = tmp_path / run.name
    records.prepare(directory, run)
    for step, speed in enumerate((10.0, 1000.0, 1000.0), 1):
        storage.append(directory / records.TRAIN, {"step": step, "tokens_per_s": speed})
    record = records.RunRecord.load(directory)
    rate = estimate.recorded_rate([record])
    assert rate == 1000 * record.accounting["hardware_flops_per_token"]
    assert estimate.recorded_rate([]) is None
    # The evaluations come on top of the training tokens.
    assert estimate.work(run) / rate > run.train.tokens / 1000
    records.mark_done(directory, final_record(run))
    text = planning.plan(EXPERIMENT.runs, tmp_path)
    assert "(recorded)" in text and text.splitlines()[1].endswith("done")
