"""Trains, or resumes, one run of an experiment: what a cluster job starts.

    python -m experiments.train --experiment=main_556m --run=xmod_a4k8 --workdir=DIR

The work directory is that of the experiment's sweep: the run gets a folder in it, and a sweep with
the same flags takes it over where this command stopped.

With --start_from the run begins with the weights of another one instead of random ones: a dense
run's, from which an X-MoD run is upcycled, or those of the same model. Its first evaluation is that
of these weights. The run directory keeps them and where they are from: it resumes without the flag.

On SIGTERM or SIGUSR1 the run saves and the command exits with status 75: start it again and it goes
on. So it does when another worker holds the run, or one of its processes was lost. Several
processes train one run together when each is started with its --process_index.
"""

from __future__ import annotations

import functools
import json
import pathlib

from absl import flags

from experiments import cli, cluster, runner, selection
from xmod_jax import records
from xmod_jax.config import SparseStart
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord, Status

_RUN = flags.DEFINE_string("run", None, "name of the run within the experiment")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "folder of the sweep (default: runs/<experiment>_<scale>)"
)
_RETRY_FAILED = flags.DEFINE_bool("retry_failed", False, "train a failed run again")
_START_FROM = flags.DEFINE_string(
    "start_from", None, "run directory whose newest checkpoint the run starts from"
)
_START_SPARSE = flags.DEFINE_enum_class(
    "start_sparse",
    SparseStart.NEW,
    SparseStart,
    "what new sparse layers start with: weights of their own, or copies of their stage's anchor",
)
flags.adopt_module_key_flags(selection)
flags.adopt_module_key_flags(cluster)


def main() -> int:
    """Trains the run; prints its last evaluation as JSON."""
    alone = cluster.alone()
    experiment = selection.selected(looks=alone, checks_data=alone)
    if not _RUN.value:
        raise UserError(f"--run is missing; known: {', '.join(r.name for r in experiment.runs)}")
    cluster.check([experiment.run(_RUN.value)])
    if flags.FLAGS["start_sparse"].present and not _START_FROM.value:
        raise UserError("--start_sparse says how --start_from=RUN_DIR begins: give that too")
    with cluster.joined() as watch:
        experiment = runner.with_starts(runner.with_data(experiment), _WORKDIR.value)
        if _START_FROM.value:  # reads checkpoints, before which processes must have met
            source = pathlib.Path(_START_FROM.value)
            experiment = runner.start_from(experiment, _RUN.value, source, _START_SPARSE.value)
        run = experiment.run(_RUN.value)
        workdir = runner.choose_workdir(experiment, _WORKDIR.value)
        runner.agree(watch.processes, [run], workdir)
        write = functools.partial(runner.write_sweep, experiment, workdir)
        watch.processes.from_leader(write)
        directory = workdir / run.folder
        display = cluster.display([run], watch)
        trainer = cluster.trainer(watch)
        status = runner.train_one(
            run,
            directory,
            trainer,
            display,
            _RETRY_FAILED.value,
            watch.processes,
            lambda: watch.arrived,
        )
    if status is Status.FAILED:
        reason = records.failure(directory)
        display.say(f"{run.folder} failed: {reason} (--retry_failed tries again)")
        return 1
    if watch.processes.leads:
        print(json.dumps(RunRecord.load(directory).final))
    return 0


if __name__ == "__main__":
    cli.run(main)
