"""Which runs a worker takes, which have started, and what they cost."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from experiments import description, estimate, tables
from xmod_jax import records
from xmod_jax.config import RunConfig
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord, Status


def shard(runs: Sequence[RunConfig], text: str) -> Sequence[RunConfig]:
    """The part of `runs` that ``"i/n"`` names: every n-th from i on; UserError when malformed."""
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--shard={text} is not i/n with 0 <= i < n, for instance 0/4")
    return runs[int(match[1]) :: int(match[2])]


def started(runs: Sequence[RunConfig], workdir: pathlib.Path) -> dict[str, RunRecord]:
    """By name, the runs that have a run directory in `workdir`, finished or not."""
    return {
        run.folder: RunRecord.load(workdir / run.folder)
        for run in runs
        if (workdir / run.folder / records.CONFIG).is_file()
    }


def unfinished(runs: Sequence[RunConfig], workdir: pathlib.Path) -> int:
    """How many of the runs are neither done nor failed."""
    states = [records.status(workdir / run.folder) for run in runs]
    return states.count(Status.UNFINISHED)


def plan(runs: Sequence[RunConfig], workdir: pathlib.Path, workers: int = 1) -> str:
    """The plan as a table: what each run is, how far it is, how long all of it takes.

    Args:
      runs: what is trained.
      workdir: of the sweep.
      workers: how many train side by side, each at the speed of one.
    """
    rate = estimate.recorded_rate(started(runs, workdir).values())
    source = "recorded" if rate else "guessed from a matrix product"
    rate = rate or estimate.measured_rate(runs[0])
    rows, left = [], 0.0
    for run in runs:
        seconds = estimate.work(run) / rate
        status = records.status(workdir / run.folder)
        left += seconds if status is Status.UNFINISHED else 0
        name, *row = description.table_row(run)
        name = run.folder if name == run.name else name
        rows.append((name, *row, tables.duration(seconds), status.value))
    text = tables.text_table((*description.TABLE_HEADER, "time", "status"), rows)
    speed = f"{tables.number(rate / 1e9, 3)} GFLOP/s here ({source})"
    if workers > 1:
        speed += f", {workers} runs at a time"
    return f"{text}\nabout {tables.duration(left / workers)} to go at {speed}"
