"""A disk that fills while several processes save: what was saved before is there, and goes on."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.devices import ROOT, coordinator, environment
from tests.training import together
from xmod_jax import records
from xmod_jax.training import loop

pytestmark = [pytest.mark.slow, pytest.mark.drill]


def train(directory: pathlib.Path, *full_at: int) -> tuple[list[int], list[str]]:
    """Statuses and errors of two processes; the one that is left of a failed pair is ended."""
    place, children = coordinator(), []
    for index in range(2):
        arguments = map(str, (directory, index, place, *full_at))
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.training.full_disk", *arguments],
                cwd=ROOT,
                env=environment(1),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors: list[str] = []
    for child in reversed(children):
        try:
            errors.insert(0, child.communicate(timeout=300 if child is children[1] else 60)[1])
        except subprocess.TimeoutExpired:
            child.kill()
            errors.insert(0, child.communicate()[1])
    return [child.returncode for child in children], errors


def test_a_disk_full_in_mid_save_loses_nothing_older(tmp_path):
    directory = tmp_path / "run"
    statuses, errors = train(directory, 5)
    assert statuses[1] == 2 and "File too large" in errors[1].splitlines()[-1], errors[1][-2000:]
    assert statuses[0] != 0
    saved = {path.name for path in (directory / records.CHECKPOINTS).iterdir()}
    assert {"2", "4"} & saved and not (directory / records.DONE).exists()

    statuses, errors = train(directory)
    assert statuses == [0, 0], errors
    loop.train(together.RUN, tmp_path / "whole", lambda _: None)
    for name in (records.TRAIN, records.EVAL):
        got, want = (records.read_lines(tmp_path / part / name) for part in ("run", "whole"))
        assert [line["step"] for line in got] == [line["step"] for line in want]
        for key in ("loss", "loss_calibrated"):
            losses = [[line[key] for line in lines if key in line] for lines in (got, want)]
            assert losses[0] == pytest.approx(losses[1], rel=2e-5)
