"""The fault drill: what it draws, and some of its rounds."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest

from tests.devices import ROOT
from tests.training.fault_drill import Fault, _damage
from xmod_jax import records


def test_rounds_are_drawn_by_the_seed_and_cover_every_kind():
    faults = [Fault.draw(0, number) for number in range(50)]
    assert faults == [Fault.draw(0, number) for number in range(50)]
    assert faults != [Fault.draw(1, number) for number in range(50)]
    kinds = {(fault.number, fault.targets) for fault in faults}
    targets = ((0,), (1,), (0, 1))
    assert kinds == {(n, to) for n in (signal.SIGKILL, signal.SIGTERM) for to in targets}
    assert {fault.damages for fault in faults} == {True, False}
    assert {fault.records for fault in faults} == set(range(9))


def test_only_the_newest_of_several_checkpoints_is_damaged(tmp_path):
    for step in (2, 10):
        file = tmp_path / records.CHECKPOINTS / str(step) / "state"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 99)
        told = _damage(tmp_path, random.Random(0))
        assert (told is None) == (step == 2)
    contents = {path.parent.name: path.read_bytes() for path in tmp_path.rglob("state")}
    assert contents["2"] == b"x" * 99 != contents["10"]


@pytest.mark.slow
@pytest.mark.drill
def test_killed_and_stopped_runs_end_with_the_uninterrupted_runs_records(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.fault_drill", tmp_path, "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "6 of 6 rounds end with the uninterrupted run's records" in done.stdout.splitlines()[-1]
