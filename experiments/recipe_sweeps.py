"""Sweeps of the recipe: learning rate and optimiser, alignment coefficient (SPEC 3, 6)."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment, register
from experiments.scales import SCALES
from xmod_jax.config import RunConfig

# Of the scale's own peak rate: the paper's 3.2e-3 is 2^5 of its grid {2^0 ... 2^7} e-4.
RATES = tuple(2.0**power for power in range(-5, 3))
# Of the scale's own coefficient: 1e-2 ... 1e-5 around the paper's 1e-4.
ALIGNMENTS = (100.0, 10.0, 1.0, 0.1)


def _with_optimizer(run: RunConfig, matrices: str, factor: float) -> RunConfig:
    rate = run.train.optimizer.peak_lr * factor
    optimizer = dataclasses.replace(run.train.optimizer, matrices=matrices, peak_lr=rate)
    return dataclasses.replace(
        run,
        name=f"{matrices}_{rate:.1e}",
        train=dataclasses.replace(run.train, optimizer=optimizer),
    )


@register("lr_sweep")
def lr_sweep(scale_name: str) -> Experiment:
    """Dense at 165M: eight peak rates for Muon and for AdamW."""
    name = "lr_sweep"
    dense = SCALES[scale_name].dense(name, "165M")
    runs = [
        _with_optimizer(dense, matrices, factor)
        for matrices in ("muon", "adamw")
        for factor in RATES
    ]
    return Experiment(name, scale_name, tuple(runs))


@register("alignment_sweep")
def alignment_sweep(scale_name: str) -> Experiment:
    """A1K16 at 165M under four coefficients of the router alignment loss, and dense."""
    name, scale = "alignment_sweep", SCALES[scale_name]
    runs = [scale.dense(name, "165M")]
    xmod = scale.xmod(name, "A1K16", "165M")
    for factor in ALIGNMENTS:
        coefficient = scale.alignment * factor
        train = dataclasses.replace(xmod.train, alignment=coefficient)
        runs.append(dataclasses.replace(xmod, name=f"alignment_{coefficient:.0e}", train=train))
    return Experiment(name, scale_name, tuple(runs))
