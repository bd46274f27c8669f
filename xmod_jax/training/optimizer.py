"""Muon for the matrices inside layers, AdamW for the rest; warm-up and cosine (SPEC 6)."""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from optax import contrib

from xmod_jax.config import OptimizerConfig

UPDATE_RMS = 0.2  # of a Muon update, times the learning rate: that of a typical AdamW update
_STACKED = {".sparse.": 2, ".lead.": 2, ".prefix.": 1, ".anchor.": 1}  # axes before a layer's own
_LAST_TWO = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up over its share of the steps, then cosine to the final share of the peak.

    Every step of a run holds the same number of tokens, so shares of steps are shares of tokens.
    The first step already moves: warm-up starts at one step's worth of the peak, not at zero.
    """
    warmup = max(1, math.ceil(config.warmup * steps))
    return optax.warmup_cosine_decay_schedule(
        init_value=config.peak_lr / warmup,
        peak_value=config.peak_lr,
        warmup_steps=warmup - 1,
        decay_steps=max(steps - 1, warmup),
        end_value=config.final * config.peak_lr,
    )


def labels(model: Any, matrices: str) -> Any:
    """A tree like `model`: `matrices` for each matrix inside a layer, ``"adamw"`` for the rest.

    Leaves are stacked over layers (prefix, anchors: one axis; sparse layers and leads: stages and
    layers), so the number of axes alone does not tell a stacked router vector from a matrix. A MoE
    router is AdamW's, as router vectors are; expert biases are no parameters and get ``"none"``.
    """

    def label(path: Any, leaf: jax.Array) -> str:
        name = jax.tree_util.keystr(path)
        stacked = next((axes for part, axes in _STACKED.items() if part in name), 0)
        if ".ffn.bias" in name:
            return "none"
        matrix = stacked and leaf.ndim - stacked >= 2 and ".ffn.router" not in name
        return matrices if matrix else "adamw"

    return jax.tree_util.tree_map_with_path(label, model)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimiser of a run of `steps` steps; its updates are added to the parameters.

    `optax.contrib.muon` gets the matrices only: its own AdamW would have Nesterov momentum too.
    """
    rate = learning_rate(config, steps)
    muon = contrib.muon(
        rate,
        beta=0.95,
        weight_decay=config.weight_decay,
        consistent_rms=UPDATE_RMS,
        # Orthogonalisation is per layer: all axes but the last two are batch axes.
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: _LAST_TWO, tree),
    )
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.partition(
            {"muon": muon, "adamw": adamw, "none": optax.set_to_zero()},
            lambda model: labels(model, config.matrices),
        ),
    )
