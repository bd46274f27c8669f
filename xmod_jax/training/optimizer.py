"""Muon for the matrices inside layers, AdamW for the rest; warm-up and cosine (SPEC 6)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from xmod_jax.config import OptimizerConfig
from xmod_jax.nn import collectives
from xmod_jax.sharding import axes_of

UPDATE_RMS = 0.2  # of a Muon update, times the learning rate: that of a typical AdamW update
_STACKED = {".sparse.": 2, ".lead.": 2, ".prefix.": 1, ".anchor.": 1}  # axes before a layer's own


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


class Momentum(NamedTuple):
    """State of `orthogonal_momentum`: steps taken, and the running mean of the gradients."""

    steps: jax.Array
    mean: Any


def orthogonal_momentum(decay: float) -> optax.GradientTransformation:
    """Muon's update before its rate: Nesterov momentum, orthogonalised for every layer by itself.

    `optax.contrib.muon` with the same numbers, but for matrices that may lie in parts: only the
    orthogonalisation needs them whole, and takes each on one device (`over_matrices`). The
    root-mean-square of an update's elements is `UPDATE_RMS`.
    """
    newton_schulz = contrib.scale_by_muon(
        beta=0.0,
        nesterov=False,
        # All axes but the last two are batch axes.
        weight_dimension_numbers=contrib.MuonDimensionNumbers(-2, -1),
    )

    def orthogonal(stack_YMN: jax.Array) -> jax.Array:
        update_YMN, _ = newton_schulz.update(stack_YMN, newton_schulz.init(stack_YMN))
        return UPDATE_RMS * math.sqrt(max(stack_YMN.shape[-2:])) * update_YMN

    def update(gradient: Any, state: Momentum, params: Any = None) -> tuple[Any, Momentum]:
        del params
        count = optax.safe_increment(state.steps)
        mean = optax.tree.update_moment(gradient, state.mean, decay, 1)
        ahead = optax.tree.bias_correction(mean, decay, optax.safe_increment(count))
        now = optax.tree.bias_correction(gradient, decay, count)

        def leaf(path: Any, ahead: jax.Array, now: jax.Array) -> jax.Array:
            momentum = decay * ahead + (1 - decay) * now
            return collectives.over_matrices(orthogonal, momentum, axes_of(path))

        return jax.tree_util.tree_map_with_path(leaf, ahead, now), Momentum(count, mean)

    def init(params: Any) -> Momentum:
        return Momentum(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    return optax.GradientTransformation(init, update)


def clip(limit: float) -> optax.GradientTransformation:
    """Scales gradients down to a global norm of at most `limit`, also where they lie in parts."""

    def update(gradient: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, Any]:
        del params
        norm = collectives.global_norm(gradient)
        scale = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda leaf: leaf * scale, gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimiser of a run of `steps` steps; its updates are added to the parameters."""
    rate = learning_rate(config, steps)
    muon = optax.chain(
        orthogonal_momentum(0.95),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=config.weight_decay)
    return optax.chain(
        clip(config.clip),
        optax.partition(
            {"muon": muon, "adamw": adamw, "none": optax.set_to_zero()},
            lambda model: labels(model, config.matrices),
        ),
    )
