"""Executes the runs of a sweep: each once, resumable, safe with several workers on one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.progress import Progress, Shows
from experiments.registry import Experiment
from xmod_jax import claims, records
from xmod_jax.config import RunConfig, SparseStart
from xmod_jax.data import sources
from xmod_jax.errors import UserError
from xmod_jax.identity import config_hash
from xmod_jax.processes import ALONE, REQUEUE, Processes
from xmod_jax.records import RunRecord, Status

Train = Callable[[RunConfig, pathlib.Path, Callable[[Progress], None]], Any]


@dataclasses.dataclass
class Outcome:
    """What became of the runs, by name.

    Attributes:
      done: finished runs, whoever trained them.
      failed: failed runs with the reason.
      held: runs that another worker is training, with who it is.
    """

    done: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    held: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> int:
        """Exit status: 75 while there are runs to come back for, else 1 where one failed."""
        return REQUEUE if self.held else int(bool(self.failed))


@dataclasses.dataclass(frozen=True)
class Trainer:
    """How a run is trained.

    Attributes:
      train: makes the run directory, where there is none, and trains or resumes the run to its DONE
        mark (`xmod_jax.training.loop.train`).
      failure: what `train` raises after it has marked a run FAILED.
    """

    train: Train
    failure: type[Exception]


def choose_workdir(experiment: Experiment, given: str | None) -> pathlib.Path:
    """The work directory of a sweep: `given`, or ``runs/<experiment>_<scale>``; touches nothing.

    Raises:
      UserError: it is a file, holds another experiment or scale, or a run of another configuration
        (names the first field that differs).
    """
    workdir = _workdir(experiment, given)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file: choose a folder")
    stored = records.SweepRecord.find(workdir)
    if stored and (stored.experiment, stored.scale) != (experiment.name, experiment.scale):
        raise UserError(
            f"--workdir={workdir} holds {stored.experiment} at {stored.scale} scale, not "
            f"{experiment.name} at {experiment.scale} scale: choose another folder"
        )
    for run in experiment.runs:
        records.check_same_run(workdir / run.folder, run)
    return workdir


def with_data(experiment: Experiment) -> Experiment:
    """The experiment whose runs know their data by content, where that can be had at once.

    Raises:
      UserError: data that are there but damaged.
    """
    known = {run.data: sources.identified(run.data) for run in experiment.runs}
    runs = (dataclasses.replace(run, data=known[run.data]) for run in experiment.runs)
    return dataclasses.replace(experiment, runs=tuple(runs))


def with_starts(experiment: Experiment, given: str | None) -> Experiment:
    """The experiment whose runs start as those in its work directory did (`RunConfig.start`).

    Raises:
      UserError: a run directory that cannot be read.
    """
    for run in experiment.runs:
        directory = _workdir(experiment, given) / run.folder
        if (directory / records.CONFIG).exists():
            start = RunRecord.load(directory).config.start
            experiment = experiment.replace(dataclasses.replace(run, start=start))
    return experiment


def start_from(
    experiment: Experiment, name: str, source: pathlib.Path, sparse: SparseStart
) -> Experiment:
    """The experiment whose run `name` starts from the newest checkpoint of another run.

    A run that has started already needs the other no more; it must have started from it.

    Raises:
      UserError: it started from another one, or as `xmod_jax.training.start.find`.
    """
    run = experiment.run(name)
    if run.start is not None and run.start.sparse is not sparse:
        raise UserError(
            f"{name} started with --start_sparse={run.start.sparse}, not {sparse}: choose another "
            "work directory"
        )
    if run.start is not None and run.start.directory == str(source):
        return experiment
    # Only now: a mistake is told without loading what training needs.
    from xmod_jax.training import start

    found = start.find(source, run, sparse)
    if run.start is None:
        return experiment.replace(dataclasses.replace(run, start=found))
    if run.start.hash != found.hash:
        raise UserError(f"{name} started from {run.start.directory}, not from {source}")
    return experiment


def _workdir(experiment: Experiment, given: str | None) -> pathlib.Path:
    return pathlib.Path(given or f"runs/{experiment.name}_{experiment.scale}")


_HELD = len(Status)  # beside the places of statuses: another worker has the run
# For the claim of a machine that has gone: NFS servers free its locks after 90 s.
_LEASE_S = 120


def write_sweep(experiment: Experiment, workdir: pathlib.Path) -> None:
    """Makes the work directory and its sweep.json, which names all runs with their hashes.

    Raises:
      UserError: the runs' data cannot be had; told before anything binds the folder to them.
    """
    for data in dict.fromkeys(run.data for run in experiment.runs):
        sources.check(data)
    workdir.mkdir(parents=True, exist_ok=True)
    runs = tuple(records.DeclaredRun(run.folder, config_hash(run)) for run in experiment.runs)
    records.SweepRecord(experiment.name, experiment.scale, runs).write(workdir)


def agree(processes: Processes, runs: Sequence[RunConfig], workdir: pathlib.Path) -> None:
    """Refuses processes that would not train the same runs on the same data in the same folder.

    Raises:
      UserError: names what differs; or data that cannot be had.
      OSError: the folder cannot be made or written to.
    """
    if processes.count == 1:
        return
    # Not by their names: they may lie elsewhere on another node.
    contents = dict.fromkeys(sources.load(run.data).hash for run in runs)
    what = {"the content of --data": ", ".join(contents)}
    processes.agree(what | {f"the configuration of {r.name}": config_hash(r) for r in runs})
    processes.share(workdir)


def note_attempt(directory: pathlib.Path) -> None:
    """Tells the launch script, where it names a file for that, which run it may see progress in."""
    if name := os.environ.get("XMOD_ATTEMPT"):
        with contextlib.suppress(OSError), open(name, "a", encoding="utf-8") as file:
            file.write(f"{directory.absolute()}\n")


def train_one(
    run: RunConfig,
    directory: pathlib.Path,
    trainer: Trainer,
    display: Shows,
    retry_failed: bool = False,
    processes: Processes = ALONE,
    asked: Callable[[], bool] = lambda: False,
    patience_s: float = _LEASE_S,
) -> Status:
    """Trains or resumes one run under its claim, unless it is finished or failed already.

    Where several processes train it together each calls this. Process 0 holds the claim, and what
    it finds in the run directory counts for all. A claim of another machine is waited for until
    `patience_s` is over or this process `asked` to leave.

    Returns:
      How far the run is: done, or failed (now, or before and `retry_failed` is off).

    Raises:
      RunClaimed: another worker holds it.
      UserError: the directory holds a run of another configuration.
    """
    places = list(Status)
    note_attempt(directory)
    with contextlib.ExitStack() as claim:

        def begin() -> int:
            try:
                claim.enter_context(claims.claim(directory, False, patience_s, asked))
            except claims.RunClaimed:
                return _HELD
            # Looked at under the claim: another worker may just have ended it.
            before = records.status(directory)
            if before is Status.UNFINISHED or (before is Status.FAILED and retry_failed):
                records.check_same_run(directory, run)
                records.clear_failed(directory)
                before = Status.UNFINISHED
            return places.index(before)

        found = processes.from_leader(begin)
        if found == _HELD:
            raise claims.claimed(directory)
        if places[found] is not Status.UNFINISHED:
            return places[found]
        with display.bar(run) as progress, contextlib.suppress(trainer.failure):
            trainer.train(run, directory, progress)
        after = places[processes.from_leader(lambda: places.index(records.status(directory)))]
    if after is Status.UNFINISHED:
        raise RuntimeError(f"training of {directory} ended without a DONE or FAILED mark")
    return after


def run_all(
    runs: Sequence[RunConfig],
    workdir: pathlib.Path,
    trainer: Trainer,
    display: Shows,
    retry_failed: bool = False,
    processes: Processes = ALONE,
    asked: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Trains every run that is neither finished nor held by another worker.

    A failed run does not stop the others. Runs that another worker holds are looked at again after
    every round of training, so that those of a worker that died are taken over; when only held runs
    are left, those of other machines are waited for, then it returns.

    Args:
      runs: what to train, in this order.
      workdir: holds a directory for each run, under its name.
      trainer: how.
      display: where progress is shown.
      retry_failed: try runs again that failed before; else they stay failed.
      processes: those that train each run together, this one among them.
      asked: whether this process was asked to leave, and waits no more.
    """
    outcome = Outcome()
    pending = list(runs)
    ended, until = True, 0.0  # until: what is held by other machines is waited for
    while pending and (ended or not until):
        until = 0.0 if ended else time.monotonic() + _LEASE_S
        ended = False
        outcome.held.clear()
        for run in list(pending):
            directory = workdir / run.folder
            patience_s = max(0.0, until - time.monotonic()) if until else 0.0
            try:
                status = train_one(
                    *(run, directory, trainer, display, retry_failed, processes, asked, patience_s)
                )
            except claims.RunClaimed as claimed:
                outcome.held[run.folder] = str(claimed)
                continue
            ended = True
            pending.remove(run)
            display.drop(run)
            if status is Status.FAILED:
                outcome.failed[run.folder] = records.failure(directory)
                display.say(f"{run.folder} failed: {outcome.failed[run.folder]}")
            else:
                outcome.done.append(run.folder)
    return outcome
