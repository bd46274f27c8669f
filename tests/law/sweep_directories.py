"""Finished sweep directories with losses made from a law, as a sweep would leave them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

from experiments import registry
from xmod_jax import accounting, records, storage
from xmod_jax.config import RunConfig
from xmod_jax.law.terms import Law

SWEEPS = (*(f"k_sweep_{n}k" for n in (2, 4, 8, 16, 32)), "scale_sweep_32k", "anchor_sweep_32k")

# The paper's law with u and w in the units of mini models, so that Delta stays a few tenths.
MINI_LAW = dataclasses.replace(Law.paper(), u=0.6, w=2.0)


def final_record(config: RunConfig, law: Law, shift: float = 0.0) -> dict[str, float | str]:
    """The last evaluation of a run: dense loss 2.5 plus the law's Delta; the losses differ."""
    summary = accounting.summary(config.model, config.train.context_length)
    hierarchy = config.model.hierarchy
    dense = hierarchy.sparsity == 1
    sizes = summary["n_act"], summary["total_params"], config.train.context_length
    stride = float(hierarchy.anchor_stride)
    delta = 0.0 if dense else float(law.delta(*sizes, hierarchy.sparsity, stride))
    loss = 2.5 + delta + shift
    tokens = config.train.tokens
    return {
        "step": config.train.steps,
        "tokens": tokens,
        "flops": summary["flops_per_token"] * tokens,
        "scale": config.scale,
        "loss_calibrated": loss,
        "loss_threshold": loss + (0.0 if dense else 0.05),
        "loss_topk": loss - (0.0 if dense else 0.02),
    }


def write_run(
    directory: pathlib.Path, config: RunConfig, law: Law = MINI_LAW, shift: float = 0.0
) -> None:
    """Makes a finished run directory."""
    records.prepare(directory, config)
    record = final_record(config, law, shift)
    storage.append(directory / records.EVAL, record)
    records.mark_done(directory, record)


def write_sweeps(root: pathlib.Path, names: Iterable[str] = SWEEPS) -> list[pathlib.Path]:
    """Makes finished mini-scale sweeps; returns their directories."""
    for name in names:
        for config in registry.get(name, "mini").runs:
            write_run(root / name / config.name, config)
    return [root / name for name in names]
