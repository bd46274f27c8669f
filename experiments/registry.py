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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.scales import SCALES
from xmod_jax.config import MAX_COUNT, MAX_SEED, DataConfig, RunConfig
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
      runs: the runs, dense reference first; no two have the same directory (`RunConfig.folder`).
      skipped: one line for each run that this scale cannot hold, with the reason.
    """

    name: str
    scale: str
    runs: tuple[RunConfig, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [run.folder for run in self.runs]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: two runs share a name: {', '.join(names)}")

    def run(self, name: str) -> RunConfig:
        """The run called `name`, with its first seed; UserError lists the runs without one."""
        for run in self.runs:
            if run.name == name:
                return run
        known = ", ".join(dict.fromkeys(run.name for run in self.runs))
        raise UserError(
            f"unknown run {name!r} of {self.name} at {self.scale} scale; known: {known}"
        )

    def select(self, names: Sequence[str]) -> tuple[RunConfig, ...]:
        """The runs called `names`, of every seed, in the experiment's order; all without a name."""
        chosen = {self.run(name).name for name in names}
        return tuple(run for run in self.runs if not names or run.name in chosen)

    def replace(self, changed: RunConfig) -> Experiment:
        """The same experiment with another configuration of the run of that name and seed."""
        runs = tuple(changed if run.folder == changed.folder else run for run in self.runs)
        return dataclasses.replace(self, runs=runs)

    def override(
        self,
        seed: int | None = None,
        data: str | None = None,
        keep_products: bool | None = None,
        budget: float = 1.0,
        seeds: int = 1,
    ) -> Experiment:
        """The same experiment with other settings of every run; None leaves what it has.

        Args:
          seed: of parameters and data order, the first one.
          data: source of the tokens.
          keep_products: `Execution.keep_products`.
          budget: factor of the training compute: of the steps, so that runs stay matched in FLOPs.
          seeds: how many seeds each run is trained with, one after another from the first.

        Raises:
          UserError: a budget without a step, seeds beyond the largest one.
        """

        def changed(run: RunConfig) -> Iterator[RunConfig]:
            parts: dict[str, Any] = {}
            if data is not None:
                parts["data"] = DataConfig(data)
            if keep_products is not None:
                parts["execution"] = dataclasses.replace(run.execution, keep_products=keep_products)
            run = budgeted(dataclasses.replace(run, **parts), budget)
            first = run.train.seed if seed is None else seed
            if first + seeds - 1 > MAX_SEED:
                raise UserError(f"{seeds} seeds from {first} on go beyond {MAX_SEED}")
            for number in range(first, first + seeds):
                train = dataclasses.replace(run.train, seed=number)
                suffix = f"_seed{number}" if number > first else ""
                yield dataclasses.replace(run, train=train, suffix=suffix)

        runs = tuple(new for run in self.runs for new in changed(run))
        return dataclasses.replace(self, runs=runs)


def budgeted(run: RunConfig, factor: float) -> RunConfig:
    """The run with `factor` times its steps: a dense one rounded up, the others down.

    The dense curve then still covers every run, as `accounting.steps_for_flops` has it.
    """
    if factor == 1:
        return run
    steps = factor * run.train.steps
    # A product such as 0.1 * 30 lies beside the whole number that it means.
    whole = math.ceil(steps * (1 - 1e-12))
    if run.architecture != "dense":
        whole = math.floor(steps * (1 + 1e-12))
    if not 1 <= whole <= MAX_COUNT:
        raise UserError(
            f"--budget={factor:g} leaves {run.name} {whole} steps, of {run.train.steps}"
        )
    every = {
        name: math.ceil(getattr(run.execution, name) * whole / run.train.steps)
        for name in ("eval_every", "checkpoint_every")
    }
    return dataclasses.replace(
        run,
        budget=run.budget * factor,
        train=dataclasses.replace(run.train, steps=whole),
        execution=dataclasses.replace(run.execution, **every),
    )


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
