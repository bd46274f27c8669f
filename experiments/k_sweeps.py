"""Loss against K at one context length: N_act = 556M, A = 1 (SPEC 7)."""

from __future__ import annotations

from experiments.registry import Experiment, register
from experiments.scales import SCALES

# The paper does not print its grid; this one gives about its number of observations.
K_GRID = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
# At 64k, outside the fitted range: predicted, never fitted.
K_GRID_64K = (16, 18, 20, 22, 24)
MINI_K = (2, 4, 8, 16)
MINI_K_64K = (16, 20, 24)


def k_sweep(
    name: str, scale_name: str, length: int, paper: tuple[int, ...], mini: tuple[int, ...]
) -> Experiment:
    """Dense and A = 1 at every K of the scale's grid; K that route a single token are skipped."""
    scale = SCALES[scale_name]
    runs = [scale.dense(name, length=length)]
    skipped = []
    for sparsity in paper if scale_name == "paper" else mini:
        if scale.holds(length, sparsity):
            runs.append(scale.xmod(name, f"A1K{sparsity}", length=length))
        else:
            skipped.append(
                f"xmod_a1k{sparsity}: L = {scale.context(length)} leaves fewer than two tokens to "
                f"a sparse layer of K = {sparsity}"
            )
    return Experiment(name, scale_name, tuple(runs), tuple(skipped))


@register("k_sweep_2k")
def k_sweep_2k(scale: str) -> Experiment:
    """L = 2048; the only length with K = 3."""
    return k_sweep("k_sweep_2k", scale, 2048, (2, 3, *K_GRID[1:]), MINI_K)


def _in_range(thousands: int) -> None:
    """Registers the sweep at a length that has the common grid."""
    name = f"k_sweep_{thousands}k"
    register(name)(lambda scale: k_sweep(name, scale, thousands * 1024, K_GRID, MINI_K))


for _thousands in (4, 8, 16, 32):
    _in_range(_thousands)


@register("k_sweep_64k")
def k_sweep_64k(scale: str) -> Experiment:
    """L = 65536: outside the fitted range."""
    return k_sweep("k_sweep_64k", scale, 65536, K_GRID_64K, MINI_K_64K)
