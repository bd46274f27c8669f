"""The experiment language: an experiment is a function from a scale to a list of runs.

A family file registers functions under their experiments' names:

    @register("main_556m")
    def main_556m(scale: str) -> Experiment:
        ...

and is listed in `FAMILIES`. Paper and mini scale come from the same function; `experiments.scales`
holds what differs between them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.scales import SCALES
from xmod_jax.config import DataConfig, RunConfig
from xmod_jax.errors import UserError

# A new family of experiments is a file and its line here.
FAMILIES = (
    "experiments.k_sweeps",
    "experiments.scale_sweep",
    "experiments.anchor_sweep",
    "experiments.main_comparison",
    "experiments.controls",
    "experiments.deep_sweep",
    "experiments.pilot",
    "experiments.recipe_sweeps",
)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Runs that are compared with each other.

    Attributes:
      name: what ``--experiment`` takes.
      scale: ``"mini"`` or ``"paper"``.
      runs: the runs, dense reference first; their names differ.
      skipped: one line for each run that this scale cannot hold, with the reason.
    """

    name: str
    scale: str
    runs: tuple[RunConfig, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [run.name for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: two runs share a name: {', '.join(names)}")

    def run(self, name: str) -> RunConfig:
        """The run called `name`; UserError lists the runs when there is none."""
        for run in self.runs:
            if run.name == name:
                return run
        known = ", ".join(run.name for run in self.runs)
        raise UserError(
            f"unknown run {name!r} of {self.name} at {self.scale} scale; known: {known}"
        )

    def select(self, names: Sequence[str]) -> tuple[RunConfig, ...]:
        """The runs called `names`, in the experiment's order; all of them when none is named."""
        chosen = [self.run(name) for name in names]
        return tuple(run for run in self.runs if not names or run in chosen)

    def replace(self, changed: RunConfig) -> Experiment:
        """The same experiment with another configuration of the run of that name."""
        runs = tuple(changed if run.name == changed.name else run for run in self.runs)
        return dataclasses.replace(self, runs=runs)

    def override(
        self, seed: int | None = None, data: str | None = None, keep_products: bool | None = None
    ) -> Experiment:
        """The same experiment with another seed, source of data or `Execution.keep_products`.

        None leaves what it has.
        """

        def changed(run: RunConfig) -> RunConfig:
            parts: dict[str, Any] = {}
            if seed is not None:
                parts["train"] = dataclasses.replace(run.train, seed=seed)
            if data is not None:
                parts["data"] = DataConfig(data)
            if keep_products is not None:
                parts["execution"] = dataclasses.replace(run.execution, keep_products=keep_products)
            return dataclasses.replace(run, **parts)

        return dataclasses.replace(self, runs=tuple(map(changed, self.runs)))


Definition = Callable[[str], Experiment]
_definitions: dict[str, Definition] = {}


def register(name: str) -> Callable[[Definition], Definition]:
    """Decorator: files an experiment function under `name`."""

    def file(definition: Definition) -> Definition:
        if name in _definitions:
            raise ValueError(f"experiment {name!r} is defined twice")
        _definitions[name] = definition
        return definition

    return file


def names() -> list[str]:
    """Names of all experiments, in the order of their definition."""
    for family in FAMILIES:
        importlib.import_module(family)
    return list(_definitions)


def get(name: str, scale: str) -> Experiment:
    """The experiment `name` at a scale.

    Raises:
      UserError: unknown experiment or scale; lists the known ones.
    """
    known = names()
    if name not in known:
        raise UserError(f"unknown experiment {name!r}; known: {', '.join(known)}")
    if scale not in SCALES:
        raise UserError(f"unknown scale {scale!r}; known: {', '.join(SCALES)}")
    return _definitions[name](scale)
