"""A run small enough for tests: seconds, dominated by compilation."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from xmod_jax import records
from xmod_jax.config import (
    BYTE_VOCABULARY,
    Backbone,
    Execution,
    ModelConfig,
    OptimizerConfig,
    Routing,
    RunConfig,
    TrainConfig,
)
from xmod_jax.hierarchy import Hierarchy

BACKBONE = Backbone(16, 8, 2, 1, 32, vocab_size=BYTE_VOCABULARY)


def curve(directory: pathlib.Path, name: str = records.TRAIN) -> list[dict[str, Any]]:
    """The records of a run but for what is measured on the clock, never equal between two runs."""
    lines = records.read_lines(directory / name)
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in lines]


def run(hierarchy: str = "A1K4", routing: Routing | None = None, **changes) -> RunConfig:
    """One run; keyword arguments change its `TrainConfig` and `Execution`."""
    model = ModelConfig(BACKBONE, Hierarchy.from_name(hierarchy, 4, 2), routing or Routing())
    defaults = TrainConfig(
        context_length=16,
        batch_size=4,
        steps=8,
        alignment=0.1,
        eval_sequences=8,
        optimizer=OptimizerConfig(peak_lr=1e-2),
    )
    execution = Execution(eval_every=4, checkpoint_every=2)
    names = {field.name for field in dataclasses.fields(Execution)}
    how = {name: changes.pop(name) for name in names & set(changes)}
    return RunConfig(
        "test",
        hierarchy,
        "xmod",
        "tiny",
        "mini",
        model,
        dataclasses.replace(defaults, **changes),
        execution=dataclasses.replace(execution, **how),
    )
