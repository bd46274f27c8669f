"""Worker processes: what they are told to do, and that they end with their parent."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.experiments.commands import ROOT
from xmod_jax.data import workers
from xmod_jax.errors import UserError


def _square(number: int, tell) -> None:
    tell((number, number**2))


def _die(number: int, tell) -> None:
    os.kill(os.getpid(), 9)


def _refuse(number: int, tell) -> None:
    raise UserError(f"no {number}")


@pytest.mark.parametrize("count", [1, 2])
def test_every_item_is_worked_on_and_told(count):
    told: list[tuple[int, int]] = []
    ended: list[int] = []
    workers.spread(_square, [(i,) for i in range(5)], count, told.append, lambda: ended.append(1))
    assert sorted(told) == [(i, i * i) for i in range(5)] and len(ended) == 5


def test_a_worker_that_is_killed_is_one_line():
    with pytest.raises(UserError, match="a worker process was killed"):
        workers.spread(_die, [(0,), (1,)], 2, lambda _: None, lambda: None)


def test_what_a_worker_raises_is_raised():
    with pytest.raises(UserError, match="no 0"):
        workers.spread(_refuse, [(0,)] * 2, 2, lambda _: None, lambda: None)


def busy(number: int, folder: pathlib.Path, tell) -> None:
    """Writes who it is, then never ends by itself; holds Python's lock most of the time."""
    (folder / f"{number}.tmp").write_text(str(os.getpid()))
    (folder / f"{number}.tmp").rename(folder / str(number))
    while True:
        sum(range(10_000))


_PARENT = """
import pathlib, sys
from tests.data import test_workers
from xmod_jax.data import workers
work = [(i, pathlib.Path(sys.argv[1])) for i in range(2)]
workers.spread(test_workers.busy, work, 2, lambda _: None, lambda: None)
"""


def _runs(process: int) -> bool:
    """Whether a process runs, rather than waits for its status to be read."""
    try:
        status = pathlib.Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="looks at /proc")
def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)], cwd=ROOT)
    files = [tmp_path / "0", tmp_path / "1"]
    _until(lambda: all(file.exists() for file in files))
    processes = [int(file.read_text()) for file in files]
    assert all(map(_runs, processes))
    parent.kill()
    parent.wait()
    _until(lambda: not any(map(_runs, processes)))


_ORPHAN = """
import multiprocessing, os, sys
from xmod_jax.data import workers

class Gone:
    def is_alive(self):
        return False

multiprocessing.parent_process = lambda: Gone()
workers.leave_if_orphaned()
print("no worker")
workers._parts = object()
workers.leave_if_orphaned()
print("not reached")
"""


def test_an_orphaned_worker_leaves_before_it_commits_anything():
    done = subprocess.run(
        [sys.executable, "-u", "-c", _ORPHAN], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (workers._ORPHANED, "no worker\n")
