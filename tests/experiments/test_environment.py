"""What numbers depend on is set by commands alone; other settings work or are one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from experiments import environment
from tests.experiments.commands import ROOT, run_command
from tests.training import small
from xmod_jax import records
from xmod_jax.errors import UserError

_HOSTILE = {
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_ENABLE_X64": "true",
    "JAX_HIGH_DYNAMIC_RANGE_GUMBEL": "1",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_RANDOM_SEED_OFFSET": "7",
    "JAX_THREEFRY_PARTITIONABLE": "0",
}
_SETTINGS = """
import enum, json, jax
plain = lambda value: value.value if isinstance(value, enum.Enum) else value
names = %r
print(json.dumps({name: plain(jax.config.values[name.lower()]) for name in names}))
"""


def _settings(before: str, **variables: str) -> tuple[dict[str, object], str]:
    """Settings of JAX in a new process that did `before`, and what that said."""
    done = subprocess.run(
        [sys.executable, "-c", before + _SETTINGS % list(environment.NUMBERS)],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.fixture
def variables(monkeypatch):
    """Sets variables of this process, and puts back what `settle` changes."""
    for name in (*environment.NUMBERS, "MPLBACKEND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch.setenv


@pytest.mark.parametrize("first", ["", "import jax\n"])
def test_numbers_do_not_depend_on_the_environment(first):
    assert set(_HOSTILE) == set(environment.NUMBERS)
    settle = "from experiments import environment\nenvironment.settle()\n"
    plain, said = _settings(settle)
    assert said == ""
    assert plain["JAX_ENABLE_X64"] is False and plain["JAX_THREEFRY_PARTITIONABLE"] is True
    settled, said = _settings(first + settle, **_HOSTILE)
    assert settled == plain
    lines = said.splitlines()
    assert [line.split("=")[0] for line in lines] == sorted(_HOSTILE)
    assert all("is not taken over" in line for line in lines)


def test_the_library_leaves_the_settings_of_its_user():
    load = "import xmod_jax.training.loop, xmod_jax.inference.generate, xmod_jax.law.fit\n"
    assert _settings(load, **_HOSTILE) == _settings("", **_HOSTILE)


def test_the_processes_of_a_command_inherit_its_settings(variables, capsys):
    variables("JAX_ENABLE_X64", "1")
    variables("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    environment.settle()
    assert os.environ["JAX_ENABLE_X64"] == "0"
    assert "JAX_DEFAULT_MATMUL_PRECISION" not in os.environ
    assert len(capsys.readouterr().err.splitlines()) == 2
    environment.settle()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_DEBUG_INFS", "1"),
        ("JAX_NO_TRACING", "true"),
        ("JAX_SCAN3", "1"),
        ("JAX_TRANSFER_GUARD", "disallow"),
        ("JAX_ERROR_CHECKING_BEHAVIOR_NAN", "raise"),
    ],
)
def test_what_no_command_can_work_with_is_refused(variables, name, value):
    variables(name, value)
    with pytest.raises(UserError, match=f"{name}={value}: "):
        environment.settle()


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_DEBUG_NANS", "1"), ("JAX_DEBUG_INFS", "0"), ("JAX_TRANSFER_GUARD", "log")],
)
def test_other_settings_are_the_users(variables, capsys, name, value):
    variables(name, value)
    environment.settle()
    assert os.environ[name] == value and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--xla_no_such_flag=1", "Unknown flag in XLA_FLAGS: --xla_no_such_flag"),
        ("--xla_force_host_platform_device_count=two", "interpret value two"),
        ("no_such_file", "Could not open file"),
    ],
)
def test_flags_that_xla_would_abort_at_are_refused(variables, flags, told):
    variables("XLA_FLAGS", flags)
    with pytest.raises(UserError, match=told):
        environment.settle()


def test_flags_that_change_numbers_are_told_of(variables, capsys):
    variables("XLA_FLAGS", "--xla_cpu_enable_fast_math=true --xla_cpu_enable_fast_min_max=false")
    environment.settle()
    said = capsys.readouterr().err
    assert "--xla_cpu_enable_fast_math=true changes" in said and said.count("\n") == 1


def _refused(variable, command, *arguments):
    name, _, value = variable.partition("=")
    done = run_command(command, *arguments, environment={name: value})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


_RUN = ("--experiment=pilot_32k", "--scale=mini", "--run=dense")


@pytest.mark.parametrize(
    ("command", "platform"), [("train", "cuda"), ("train", "nonsense"), ("systems", "cuda")]
)
def test_a_platform_that_is_not_here_is_one_line_and_makes_no_folder(tmp_path, command, platform):
    import jax

    if jax.default_backend() != "cpu":
        pytest.skip("this machine has accelerators")
    arguments = ["--protocol=gpu_check"]
    if command == "train":
        arguments = [*_RUN, f"--workdir={tmp_path}/w"]
    said = _refused(f"JAX_PLATFORMS={platform}", command, *arguments)
    assert said.startswith(f"error: JAX finds no device for JAX_PLATFORMS={platform}")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "variable",
    ["JAX_DEBUG_NANS=maybe", "JAX_NUM_CPU_DEVICES=abc", "XLA_FLAGS=--xla_x", "TQDM_MINITERS=a"],
)
@pytest.mark.parametrize("command", ["plan", "sweep"])  # one loads JAX with its modules
def test_a_variable_that_a_library_cannot_read_is_one_line(tmp_path, command, variable):
    arguments = [*_RUN[:2], "--dry_run", f"--workdir={tmp_path}"] if command == "sweep" else _RUN
    if (command, variable[:4]) == ("plan", "TQDM"):
        pytest.skip("plan shows no progress")
    assert variable.partition("=")[0] in _refused(variable, command, *arguments)


def test_a_python_outside_of_the_environment_is_told_how_to_enter_it():
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
         "import experiments"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "launch/local.sh" in done.stderr


@pytest.mark.slow
def test_a_text_does_not_depend_on_the_environment(tmp_path):
    from xmod_jax.training.checkpoint import Checkpoints
    from xmod_jax.training.step import initial_state

    config, directory = small.run(), tmp_path / "xmod_a1k4"
    records.prepare(directory, config)
    with Checkpoints(directory, config) as checkpoints:
        checkpoints.save(initial_state(config), {})
    arguments = ["generate", f"--checkpoint={directory}", "--prompt=ab", "--max_tokens=8"]
    texts = {
        run_command(*arguments, environment=variables).stdout
        for variables in ({}, _HOSTILE, {"JAX_DEBUG_NANS": "1"})
    }
    assert len(texts) == 1 and len(texts.pop()) > 2
