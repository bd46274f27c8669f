"""X-MoD at the 165M width and active depth 52: up to 412 layers (SPEC 4)."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment, register
from experiments.scales import SCALES

SIZE = "165M"
SPARSITIES = (4, 8, 12, 16)
PAPER_ACTIVE_DEPTH, PAPER_BUDGET = 52, 4e19
MINI_ACTIVE_DEPTH = 18  # beside mini's 10 about what 52 is beside 28


@register("deep_sweep")
def deep_sweep(scale_name: str) -> Experiment:
    """Dense of 52 layers, and A = 1 at four K; C = 4e19."""
    name, scale = "deep_sweep", SCALES[scale_name]
    if scale_name == "paper":
        scale = dataclasses.replace(scale, active_depth=PAPER_ACTIVE_DEPTH, budget=PAPER_BUDGET)
    else:
        scale = dataclasses.replace(scale, active_depth=MINI_ACTIVE_DEPTH)
    runs = [scale.dense(name, SIZE, name="deep_dense")]
    for sparsity in SPARSITIES:
        layers = scale.hierarchy(f"A1K{sparsity}")
        runs.append(scale.run(name, f"deep_a1k{sparsity}", "xmod", layers, SIZE))
    return Experiment(name, scale_name, tuple(runs))
