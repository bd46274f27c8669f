"""Loss against K and N_act at L = 32k, A = 1 (SPEC 7)."""

from __future__ import annotations

from experiments.k_sweeps import K_GRID, MINI_K
from experiments.registry import Experiment, register
from experiments.scales import SCALES

# Size: how run names spell it.
SIZES = {"165M": "165m", "298M": "298m", "556M": "556m", "936M": "936m"}
OUTSIDE = {"1.65B": "1650m"}


def size_sweep(
    name: str, scale_name: str, sizes: dict[str, str], sparsities: tuple[int, ...]
) -> Experiment:
    """For every size its dense reference and A = 1 at every K."""
    scale = SCALES[scale_name]
    runs = []
    for size, label in sizes.items():
        suffix = f"_{label}"
        runs.append(scale.dense(name, size, name=f"dense{suffix}"))
        runs += [scale.xmod(name, f"A1K{k}", size, suffix=suffix) for k in sparsities]
    return Experiment(name, scale_name, tuple(runs))


@register("scale_sweep_32k")
def scale_sweep_32k(scale: str) -> Experiment:
    """The sizes that the law is fitted on."""
    grid = K_GRID if scale == "paper" else MINI_K
    return size_sweep("scale_sweep_32k", scale, SIZES, grid)


@register("scale_sweep_32k_1650m")
def scale_sweep_32k_1650m(scale: str) -> Experiment:
    """1.65B, outside the fitted range: predicted, never fitted, so an experiment of its own."""
    grid = (14, 16, 18, 20) if scale == "paper" else (8, 16)
    return size_sweep("scale_sweep_32k_1650m", scale, OUTSIDE, grid)
