"""What makes X-MoD work: controls of its mechanism and ablations (SPEC 4, table 3)."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment, register
from experiments.scales import SCALES
from xmod_jax.config import Routing, Sparse, Update

SIZE = "936M"  # of tables 3, 10 and 11
CONTROLLED = ("A4K8", "A3K16")
ABLATED = "A1K16"


@register("mechanism_controls")
def mechanism_controls(scale_name: str) -> Experiment:
    """A4K8 and A3K16, each beside Routed-FFN and Selected-Q/full-KV of the same K and A."""
    name, scale = "mechanism_controls", SCALES[scale_name]
    runs = [scale.dense(name, SIZE)]
    for hierarchy in CONTROLLED:
        layers = scale.hierarchy(hierarchy)
        runs.append(scale.xmod(name, hierarchy, SIZE))
        for kind, control, sparse in (
            ("routed_ffn", layers.routed_ffn(), Sparse.FFN),
            ("selected_q_full_kv", layers, Sparse.FULL_KV),
        ):
            run_name = f"{kind}_{hierarchy.lower()}"
            routing = Routing(sparse=sparse)
            runs.append(scale.run(name, run_name, kind, control, SIZE, routing=routing))
    return Experiment(name, scale_name, tuple(runs))


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
    runs = [scale.dense(name, SIZE), scale.xmod(name, ABLATED, SIZE)]
    for part, (hierarchy, routing) in parts.items():
        runs.append(
            scale.run(name, f"without_{part}", "xmod_ablation", hierarchy, SIZE, routing=routing)
        )
    return Experiment(name, scale_name, tuple(runs))
