"""The main comparison at matched FLOPs, L = 32k (tables 1 and 6)."""

from __future__ import annotations

from experiments.registry import Experiment, register
from experiments.scales import SCALES
from xmod_jax.config import Routing


def main_comparison(name: str, scale_name: str, size: str) -> Experiment:
    """Every architecture of table 6 at one size."""
    scale = SCALES[scale_name]
    runs = (
        scale.dense(name, size),
        scale.run(name, "mod", "mod", scale.hierarchy("mod"), size, routing=Routing.mod()),
        scale.moe(name, "moe_8_64", 8, size),
        scale.xmod(name, "A4K8", size),
        scale.moe(name, "moe_8_128", 16, size),
        scale.xmod(name, "A3K16", size),
    )
    return Experiment(name, scale_name, runs)


@register("main_556m")
def main_556m(scale: str) -> Experiment:
    """N_act = 556M, C = 1e20."""
    return main_comparison("main_556m", scale, "556M")


@register("main_936m")
def main_936m(scale: str) -> Experiment:
    """N_act = 936M, C = 1.5e20."""
    return main_comparison("main_936m", scale, "936M")


@register("main_1650m")
def main_1650m(scale: str) -> Experiment:
    """N_act = 1.65B, C = 2.5e20."""
    return main_comparison("main_1650m", scale, "1.65B")
