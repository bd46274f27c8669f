"""The pilot: the anchor sweep's 24 X-MoD runs beside 12 MoE runs, 165M, L = 32k (SPEC 4, 7)."""

from __future__ import annotations

import dataclasses

from experiments.anchor_sweep import MINI_ACTIVE_DEPTH, SIZE, anchor_sweep
from experiments.registry import Experiment, register
from experiments.scales import SCALES

MOE_SPARSITIES = (4, 8, 16)
# Granularity and shared experts.
MOE_KINDS = ((2, 0), (4, 0), (8, 0), (8, 2))


@register("pilot_32k")
def pilot_32k(scale_name: str) -> Experiment:
    """MoE of granularity 2, 4 and 8 at K = 4, 8 and 16; at 8 also with two shared experts."""
    name, scale = "pilot_32k", SCALES[scale_name]
    if scale_name == "mini":
        scale = dataclasses.replace(scale, active_depth=MINI_ACTIVE_DEPTH)
    sparse_depth = anchor_sweep(name, scale)
    moe = [
        scale.moe(name, f"moe_g{granularity}s{shared}_k{k}", k, SIZE, granularity, shared)
        for granularity, shared in MOE_KINDS
        for k in MOE_SPARSITIES
    ]
    return dataclasses.replace(sparse_depth, runs=(*sparse_depth.runs, *moe))
