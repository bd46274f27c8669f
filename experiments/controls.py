"""What makes X-MoD work: controls of its mechanism and ablations (SPEC 4, table 3)."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment, register
from experiments.scales import SCALES
from xmod_jax.config import Routing, Sparse, Update

CONTROL = "A4K8"
ABLATED = "A1K16"


@register("mechanism_controls")
def mechanism_controls(scale_name: str) -> Experiment:
    """A4K8 beside Routed-FFN and Selected-Q/full-KV of the same K and A, at 556M."""
    name, scale = "mechanism_controls", SCALES[scale_name]
    layers = scale.hierarchy(CONTROL)
    runs = (
        scale.dense(name),
        scale.xmod(name, CONTROL),
        scale.run(
            name,
            f"routed_ffn_{CONTROL.lower()}",
            "routed_ffn",
            layers.routed_ffn(),
            routing=Routing(sparse=Sparse.FFN),
        ),
        scale.run(
            name,
            f"selected_q_full_kv_{CONTROL.lower()}",
            "selected_q_full_kv",
            layers,
            routing=Routing(sparse=Sparse.FULL_KV),
        ),
    )
    return Experiment(name, scale_name, runs)


@register("ablations")
def ablations(scale_name: str) -> Experiment:
    """A1K16 at 936M without one of its parts each; N_act stays (table 3)."""
    name, scale = "ablations", SCALES[scale_name]
    layers = scale.hierarchy(ABLATED)
    headless = dataclasses.replace(scale, prefix=0).hierarchy(ABLATED)
    parts = {
        "dense_anchors": (layers.without_anchors(), Routing()),
        "gated_residual_scaling": (layers, Routing(update=Update.MOD)),
        "token_choice_bias": (layers, Routing(bias_scale=0.0)),
        "dense_prefix": (headless, Routing()),
    }
    runs = [scale.dense(name, "936M"), scale.xmod(name, ABLATED, "936M")]
    for part, (hierarchy, routing) in parts.items():
        runs.append(
            scale.run(name, f"without_{part}", "xmod_ablation", hierarchy, "936M", routing=routing)
        )
    return Experiment(name, scale_name, tuple(runs))
