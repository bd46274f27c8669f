"""What a user may type or lay in a folder, for every command: one line, never a traceback."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable

import pytest

from experiments import registry, runner
from tests.experiments.fake_training import fake_train
from tests.experiments.together import Result, refused, run_together
from xmod_jax import records

_RUN = ("--experiment=pilot_32k", "--scale=mini")
_MAIN = ("--experiment=main_556m", "--scale=mini")
# A command, flags that are right, and flags that take none of `_VALUES`.
_FLAGS: dict[str, tuple[tuple[str, ...], str]] = {
    "describe": (_RUN, "experiment scale seed data format keep_products"),
    "sweep": (
        (*_RUN, "--dry_run"),
        "experiment scale seed data shard only mesh keep_checkpoints keep_every retry_failed",
    ),
    "train": (
        (*_RUN, "--run=dense"),
        "experiment scale run seed data mesh start_from start_sparse keep_checkpoints keep_every",
    ),
    "plan": ((*_RUN, "--run=dense"), "run mesh memory_gb peak_tflops bandwidth_gb"),
    "benchmark": (("--suite=moe",), "suite context batch width compute rounds limit_s experts"),
    "systems": (
        ("--protocol=table11",),
        "protocol models sizes contexts scale compute mesh batch steps limit_s check_limit_s",
    ),
    "report": ((), "workdir"),
}
_VALUES = (
    *("", " ", "nan", "-inf", "-1", "1e400", "a\nb", "a\0b", "ü", "gs://b/x", "../../x", "a,,b"),
    *("x" * 5000, "--", "None", "9" * 5000, "\udcff", "a,a", "file", "folder", "broken", "loop"),
)
_PATHS = {"report": ("output", "law"), "benchmark": ("output",), "systems": ("output",)}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a file, a folder, a link to nothing and one to itself."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "file").write_text("text")
    (folder / "folder").mkdir()
    (folder / "broken").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    return folder


def _assert_refused(command: str, calls: list[list[str]]) -> list[str]:
    results = run_together(command, calls)
    return [refused(command, *each) for each in zip(calls, results, strict=True)]


@pytest.mark.parametrize("command", _FLAGS)
def test_a_value_that_a_flag_cannot_take_is_one_line(command: str, here: pathlib.Path) -> None:
    right, names = _FLAGS[command]
    calls = []
    for name in names.split():
        others = [flag for flag in right if not flag.startswith(f"--{name}=")]
        for value in _VALUES:
            given = str(here / value) if value in ("file", "folder", "broken", "loop") else value
            calls.append([*others, f"--{name}={given}"])
    _assert_refused(command, calls)


@pytest.mark.parametrize("command", _FLAGS)
def test_a_flag_that_is_unknown_or_no_flag_is_one_line(command: str) -> None:
    right, _ = _FLAGS[command]
    calls = [[*right, "--no_such_flag=1"], [*right, "stray"], ["--flagfile=/nowhere"]]
    told = _assert_refused(command, [*calls, ["--flagfile=/"]])
    assert "no_such_flag" in told[0] and "stray" in told[1]


@pytest.mark.parametrize("command", _PATHS)
def test_a_path_that_cannot_be_used_is_one_line(command: str, here: pathlib.Path) -> None:
    right = {"report": ("--workdir=folder",)}.get(command, _FLAGS[command][0])
    paths = ["", "gs://b/x", str(here), f"{here}/file/x", f"{here}/absent/x" * 300, "a\0b"]
    _assert_refused(command, [[*right, f"--{n}={p}"] for n in _PATHS[command] for p in paths])


_DAMAGES: dict[str, bytes | None] = {
    "folder": None,
    "empty": b"",
    "text": b"text",
    "list": b"[]",
    "null": b"null",
    "object": b"{}",
    "bytes": bytes(range(256)),
    "nan": b'{"final": NaN, "runs": NaN, "config": NaN}',
    "deep": b"[" * 100_000,
    "twice": b'{"a": 1, "a": 2}',
}


@functools.cache
def _experiment():
    experiment = registry.get("main_556m", "mini")
    return experiment.replace(experiment.runs[0])


def _sweep(folder: pathlib.Path) -> pathlib.Path:
    """A sweep of which two runs are done."""
    experiment = _experiment()
    runner.write_sweep(experiment, folder)
    for run in experiment.runs[:2]:
        fake_train(run, folder / run.name, lambda progress: None)
    return folder


def _damaged(
    tmp_path: pathlib.Path, file: str, arguments: Callable[[pathlib.Path], list[str]], command: str
) -> list[tuple[str, Result]]:
    """What a command says to every damage of a file, by the damage's name."""
    whole = _sweep(tmp_path / "whole")
    calls = []
    for name, content in _DAMAGES.items():
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        (folder / file).unlink()
        if content is None:
            (folder / file).mkdir()
        else:
            (folder / file).write_bytes(content)
        calls.append(arguments(folder))
    return list(zip(_DAMAGES, run_together(command, calls), strict=True))


@pytest.mark.parametrize("file", ["sweep.json", "dense/config.json", "dense/DONE"])
@pytest.mark.parametrize("command", ["report", "train"])
def test_a_damaged_file_is_one_line_with_its_name(
    tmp_path: pathlib.Path, command: str, file: str
) -> None:
    def arguments(folder: pathlib.Path) -> list[str]:
        run = [*_MAIN, "--run=dense"] if command == "train" else []
        return [*run, f"--workdir={folder}"]

    for name, result in _damaged(tmp_path, file, arguments, command):
        if (file, name) == ("sweep.json", "folder") and command == "report":
            continue  # a sweep may do without, and a folder is no damaged file
        assert file.rpartition("/")[2] in refused(command, [file, name], result)


@pytest.mark.parametrize("file", ["sweep.json", "dense/config.json"])
def test_a_sweep_in_a_damaged_folder_is_one_line(tmp_path: pathlib.Path, file: str) -> None:
    arguments = lambda folder: [*_MAIN, f"--workdir={folder}", "--dry_run"]
    for name, result in _damaged(tmp_path, file, arguments, "sweep"):
        if (file, name) != ("sweep.json", "folder"):
            refused("sweep", [file, name], result)


def test_a_strange_name_in_a_sweep_is_no_traceback(tmp_path: pathlib.Path) -> None:
    names = ("a\0b", "\ud800", "../outside", "x" * 300, "")
    calls = []
    for index, name in enumerate(names):
        folder = _sweep(tmp_path / str(index))
        value = json.loads((folder / records.SWEEP).read_text())
        value["runs"][0]["name"] = name
        (folder / records.SWEEP).write_text(json.dumps(value))
        calls.append([f"--workdir={folder}"])
    for name, result in zip(names, run_together("report", calls), strict=True):
        assert result.status in (0, 2) and "Traceback" not in result.err, (name, result)
