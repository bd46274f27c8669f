"""Trains every run of an experiment and shows loss against K at matched FLOPs.

    python -m experiments.sweep --experiment=k_sweep_32k [--scale=mini] [--workdir=DIR]

Prints the plan, then trains. A finished run is never repeated and an interrupted one resumes: after
any interruption start the same command again. Several workers may share one work directory (on one
machine or a file system with locks); --shard=i/n divides the runs between them beforehand.

On SIGTERM or SIGUSR1 the run at hand saves and the command exits with status 75, as it does when
nothing is left but runs that other workers hold: start it again and it goes on. Status 1: a run has
failed.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from experiments import cli, cluster, planning, runner, selection, workers
from experiments.registry import Experiment
from experiments.runner import Outcome
from xmod_jax.config import RunConfig
from xmod_jax.training.preemption import Watch

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "folder of the sweep (default: runs/<experiment>_<scale>)"
)
_SHARD = flags.DEFINE_string("shard", "0/1", "i/n: train every n-th run from run i on, 0 <= i < n")
_ONLY = flags.DEFINE_list("only", [], "train these runs only, by name, separated by commas")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "print the plan and stop; writes nothing")
_RETRY_FAILED = flags.DEFINE_bool("retry_failed", False, "train failed runs again")
_SEEDS = flags.DEFINE_integer(
    "seeds",
    1,
    "train every run with this many seeds, from --seed on; differences are paired by seed",
    lower_bound=1,
    upper_bound=1000,
)
_WORKERS = flags.DEFINE_integer(
    "workers",
    None,
    "runs that are trained side by side, each on cores of its own (default: one a core at mini "
    "scale, else one)",
    lower_bound=1,
)
flags.adopt_module_key_flags(selection)
flags.adopt_module_key_flags(cluster)


def main() -> int:
    """Plans, trains, reports."""
    alone = cluster.alone()
    experiment = selection.selected(
        looks=alone, checks_data=alone or _DRY_RUN.value, seeds=_SEEDS.value
    )
    runs = planning.shard(experiment.select(_ONLY.value), _SHARD.value)
    cluster.check(runs)
    if not runs:
        print(f"--shard={_SHARD.value} has no run: there are fewer runs than shards")
        return 0
    if _DRY_RUN.value:
        _show(*_found(experiment))
        return 0
    with cluster.joined() as watch:
        experiment, runs, workdir = _found(experiment)
        # Before the plan, which waits for the devices of those that wait here.
        runner.agree(watch.processes, runs, workdir)
        if watch.processes.leads:
            _show(experiment, runs, workdir)
        write = functools.partial(runner.write_sweep, experiment, workdir)
        watch.processes.from_leader(write)
        outcome = _train(experiment, runs, workdir, watch)
    if not watch.processes.leads:
        return outcome.status
    from experiments import summary  # only now: a plan or a mistake needs none of what it loads

    return summary.report(experiment, workdir, outcome)


def _found(experiment: Experiment) -> tuple[Experiment, Sequence[RunConfig], pathlib.Path]:
    """The experiment with its data and starts, the runs of it to train, and their folder.

    Of several processes one alone may meet a mistake there: the others hear of it once they have
    met.
    """
    experiment = runner.with_starts(runner.with_data(experiment), _WORKDIR.value)
    runs = planning.shard(experiment.select(_ONLY.value), _SHARD.value)
    return experiment, runs, runner.choose_workdir(experiment, _WORKDIR.value)


def _train(
    experiment: Experiment, runs: Sequence[RunConfig], workdir: pathlib.Path, watch: Watch
) -> Outcome:
    count = _workers(experiment, runs, workdir)
    display, retry = cluster.display(runs, watch, count), _RETRY_FAILED.value
    if count > 1:
        job = workers.Job(tuple(runs), workdir, retry, cluster.keep())
        return workers.train(job, count, display)
    trainer = cluster.trainer(watch)
    return runner.run_all(
        *(runs, workdir, trainer, display, retry, watch.processes, lambda: watch.arrived)
    )


def _workers(experiment: Experiment, runs: Sequence[RunConfig], workdir: pathlib.Path) -> int:
    apart = cluster.alone() and cluster.given_mesh() is None
    left = planning.unfinished(runs, workdir)
    return workers.chosen(_WORKERS.value, experiment, left, apart)


def _show(experiment: Experiment, runs: Sequence[RunConfig], workdir: pathlib.Path) -> None:
    """The plan. Its guess of a speed takes a device: processes must have met before."""
    print(planning.plan(runs, workdir, _workers(experiment, runs, workdir)))
    for line in experiment.skipped:
        print(f"skipped {line}", file=sys.stderr)


if __name__ == "__main__":
    cli.run(main)
