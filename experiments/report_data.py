"""What a report is made of: sweeps, their configurations, and the seeds of each.

Directories of one experiment and scale make one sweep, wherever they stand. Runs of a sweep that
differ in the seed alone are one configuration; its numbers are means over the finished seeds.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from experiments import registry, report_diagnostics, summary
from experiments.spread import Spread
from experiments.summary import Result
from xmod_jax import records
from xmod_jax.config import RunConfig
from xmod_jax.diagnostics import Diagnostics
from xmod_jax.identity import config_hash, seedless_hash
from xmod_jax.records import RunRecord, Status

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Runs of a sweep that differ in their seed alone; at least one.

    Attributes:
      runs: in order of seeds, finished or not.
      results: those of the finished ones.
    """

    runs: tuple[RunRecord, ...]
    results: tuple[Result, ...]

    @property
    def config(self) -> RunConfig:
        """What is trained, with the first seed."""
        return self.runs[0].config

    @property
    def name(self) -> str:
        """The run's name within its experiment."""
        return self.config.name

    @property
    def accounting(self) -> dict[str, float]:
        """`xmod_jax.accounting.summary` as the run directory keeps it."""
        return self.runs[0].accounting

    @property
    def family(self) -> str:
        """Backbone family."""
        return self.config.family

    @property
    def context(self) -> int:
        """L, in tokens."""
        return self.config.train.context_length

    @property
    def sparsity(self) -> int:
        """K."""
        return self.config.model.hierarchy.sparsity

    @property
    def stride(self) -> float:
        """A; 0 without sparse layers."""
        return float(self.config.model.hierarchy.anchor_stride)

    @property
    def sparse(self) -> bool:
        """Whether the model has sparse layers."""
        return bool(self.config.model.hierarchy.groups)

    def final(self, key: str) -> Spread | None:
        """A field of the last evaluation over the finished seeds; None where it is unknown."""
        return Spread.of(result.final.get(key) for result in self.results)

    @property
    def loss(self) -> Spread | None:
        """Held-out loss under the calibrated threshold, nats per token."""
        return self.final("loss_calibrated")

    @property
    def delta(self) -> Spread | None:
        """Loss minus the dense loss of the same seed at equal FLOPs."""
        return Spread.of(result.delta for result in self.results)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """One experiment at one scale, from one or several work directories.

    Attributes:
      experiment: its name.
      scale: ``"mini"`` or ``"paper"``.
      configurations: what it trains, in the experiment's order.
      missing: by work directory, the names of runs that have not started.
      repeated: number of runs left out since another directory holds the same training.
    """

    experiment: str
    scale: str
    configurations: tuple[Configuration, ...]
    missing: dict[pathlib.Path, tuple[str, ...]]
    repeated: int = 0

    @property
    def runs(self) -> list[RunRecord]:
        """Every run that has started."""
        return [run for configuration in self.configurations for run in configuration.runs]

    @property
    def finished(self) -> list[Configuration]:
        """The configurations with a finished seed."""
        return [configuration for configuration in self.configurations if configuration.results]

    @property
    def workdirs(self) -> list[pathlib.Path]:
        """The folders that hold its run directories."""
        return list(dict.fromkeys(run.directory.parent for run in self.runs))


def load(paths: Sequence[str]) -> list[Sweep]:
    """The sweeps in run and sweep directories.

    Raises:
      UserError: a path that is neither, or a file of a run that cannot be read.
    """
    groups: dict[tuple[str, str], list[RunRecord]] = collections.defaultdict(list)
    for run in records.find_runs(paths):
        groups[run.config.experiment, run.config.scale].append(run)
    folders = [pathlib.Path(path) for path in paths]
    return [_sweep(*key, runs, folders) for key, runs in groups.items()]


def _sweep(
    experiment: str, scale: str, runs: list[RunRecord], folders: list[pathlib.Path]
) -> Sweep:
    parents = {run.directory.resolve().parent for run in runs}
    declared = [
        (folder, [run.name for run in sweep.runs])
        for folder in folders
        if folder.resolve() in parents and (sweep := records.SweepRecord.find(folder))
    ]
    missing = {
        folder: tuple(name for name in names if not (folder / name / records.CONFIG).is_file())
        for folder, names in declared
    }
    order = list(dict.fromkeys(name for _, names in declared for name in names))
    order += [name for name in _definition(experiment, scale) if name not in order]
    runs = sorted(runs, key=lambda run: _place(order, run.config.name))
    distinct = _distinct(runs)
    ended = [(run.config, run.final) for run in distinct if run.final is not None]
    results = {result.run: result for result in summary.compare(ended)}
    return Sweep(
        experiment,
        scale,
        tuple(_configuration(group, results) for group in _by(_named, distinct)),
        {folder: names for folder, names in missing.items() if names},
        len(runs) - len(distinct),
    )


def _place(order: list[str], name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """Sorts by the experiment's order; other names behind it, their numbers as numbers."""
    parts = re.findall(r"\d+|\D+", name)
    natural = [(p.isdecimal(), int(p[:18]) if p.isdecimal() else 0, p) for p in parts]
    return (order.index(name) if name in order else len(order)), natural


def _distinct(runs: list[RunRecord]) -> list[RunRecord]:
    """Each training once: the same one met in several directories counts where it got furthest."""
    rank = {Status.DONE: 0, Status.UNFINISHED: 1, Status.FAILED: 2}
    groups = _by(lambda run: f"{run.config.name} {run.hash}", runs)
    return [min(group, key=lambda run: rank[run.status]) for group in groups]


def _configuration(runs: list[RunRecord], results: dict[RunConfig, Result]) -> Configuration:
    ordered = sorted(runs, key=lambda run: run.config.train.seed)
    known = tuple(results[run.config] for run in ordered if run.config in results)
    return Configuration(tuple(ordered), known)


def _by(key: Callable[[T], str], items: Iterable[T]) -> list[list[T]]:
    """Items of equal key together, in order of first appearance."""
    groups: dict[str, list[T]] = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _named(run: RunRecord) -> str:
    return f"{run.config.name} {seedless_hash(run.config)}"


def together(sweeps: Sequence[Sweep]) -> list[Configuration]:
    """The finished configurations of all sweeps, each once (a dense run may stand in several)."""
    everything = [configuration for sweep in sweeps for configuration in sweep.finished]
    key = lambda configuration: seedless_hash(configuration.config)
    return [max(group, key=lambda c: len(c.results)) for group in _by(key, everything)]


def diagnostics(sweep: Sweep) -> dict[str, Diagnostics]:
    """The diagnostics that the sweep's runs have, the first seed's of each configuration."""
    found: dict[str, Diagnostics] = {}
    for configuration in sweep.configurations:
        read = (report_diagnostics.read(run.directory) for run in configuration.runs)
        first = next((one for one in read if one is not None), None)
        if first is not None:
            found[configuration.name] = first
    return found


@functools.cache
def _definition(experiment: str, scale: str) -> dict[str, RunConfig]:
    if experiment not in registry.names():
        return {}
    return {run.name: run for run in registry.get(experiment, scale).runs}


def defined_today(run: RunRecord) -> bool:
    """Whether the experiment's present definition, with this seed, data and start, is this run."""
    config = run.config
    today = _definition(config.experiment, config.scale).get(config.name)
    if today is None:
        return False
    today = registry.budgeted(today, config.budget)
    train = dataclasses.replace(today.train, seed=config.train.seed)
    today = dataclasses.replace(today, train=train, data=config.data, start=config.start)
    return config_hash(today) == run.hash
