"""Loss against the anchor stride A and K: N_act = 165M, L = 32k, 24 X-MoD runs (SPEC 7)."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment, register
from experiments.scales import SCALES, Scale

SIZE = "165M"
STRIDES = ("0.5", "1", "2", "3", "4", "5")
SPARSITIES = (4, 8, 12, 16)
# Half of the paper's 4 + 24 layers: as there, every A but 4 divides the depth behind the prefix.
MINI_ACTIVE_DEPTH = 14


def anchor_sweep(name: str, sizes: Scale) -> Experiment:
    """Dense and every A x K that the scale's depth can hold; the others are told as skipped."""
    runs = [sizes.dense(name, SIZE)]
    skipped = []
    for stride in STRIDES:
        for sparsity in SPARSITIES:
            hierarchy = f"A{stride}K{sparsity}"
            try:
                runs.append(sizes.xmod(name, hierarchy, SIZE))
            except ValueError as error:
                skipped.append(f"xmod_{hierarchy.lower()}: {error}")
    return Experiment(name, sizes.name, tuple(runs), tuple(skipped))


@register("anchor_sweep_32k")
def anchor_sweep_32k(scale: str) -> Experiment:
    """The 24 runs of the pilot."""
    sizes = SCALES[scale]
    if scale == "mini":
        sizes = dataclasses.replace(sizes, active_depth=MINI_ACTIVE_DEPTH)
    return anchor_sweep("anchor_sweep_32k", sizes)
