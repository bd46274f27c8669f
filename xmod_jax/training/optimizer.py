"""Muon for the matrices inside layers, AdamW for the rest; warm-up and cosine (SPEC 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from xmod_jax.config import OptimizerConfig
from xmod_jax.nn import collectives
from xmod_jax.sharding import axes_of

UPDATE_RMS = 0.2  # of a Muon update, times the learning rate: that of a typical AdamW update
_BYTES_AT_ONCE = 1 << 26  # two matrices of the largest models; all those of a mini model
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


def orthogonal_momentum(
    decay: float, bytes_at_once: int = _BYTES_AT_ONCE
) -> optax.GradientTransformation:
    """Muon's update before its rate: Nesterov momentum, orthogonalised for every layer by itself.

    `optax.contrib.muon` with the same numbers, but for matrices that may lie in parts: only the
    orthogonalisation needs them whole, and takes each on one device (`over_matrices`), a few at a
    time: a stack is rewritten in place, layers after layers, and never copied. The root-mean-square
    of an update's elements is `UPDATE_RMS`.

    Args:
      decay: of the momentum.
      bytes_at_once: whole matrices that a device orthogonalises at once; at least one.
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

        def leaf(path: Any, gradient: jax.Array, mean: jax.Array) -> tuple[jax.Array, ...]:
            axes = axes_of(path)

            def layers(gradient_YMN: jax.Array, mean_YMN: jax.Array):
                mean_YMN = optax.tree.update_moment(gradient_YMN, mean_YMN, decay, 1)
                ahead_YMN = optax.tree.bias_correction(mean_YMN, decay, optax.safe_increment(count))
                now_YMN = optax.tree.bias_correction(gradient_YMN, decay, count)
                momentum_YMN = decay * ahead_YMN + (1 - decay) * now_YMN
                return collectives.over_matrices(orthogonal, momentum_YMN, axes), mean_YMN

            at_once = collectives.matrices_at_once(gradient, axes, bytes_at_once)
            return _in_turns(layers, (gradient, mean), at_once)

        # Flat, since there may be no matrix at all: none of Muon's, or none in a part of a tree.
        leaves, tree = jax.tree_util.tree_flatten_with_path(gradient)
        means = jax.tree.leaves(state.mean)
        pairs = [leaf(*item, mean) for item, mean in zip(leaves, means, strict=True)]
        updates, mean = (jax.tree.unflatten(tree, [pair[n] for pair in pairs]) for n in (0, 1))
        return updates, Momentum(count, mean)

    def init(params: Any) -> Momentum:
        return Momentum(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    return optax.GradientTransformation(init, update)


def _in_turns(
    function: Callable[..., tuple[jax.Array, ...]], stacks: tuple[jax.Array, ...], at_once: int
) -> tuple[jax.Array, ...]:
    """``function(*stacks)``, of which each layer's result depends on that layer alone.

    Some layers after others, written over what they came from, so that no second stack is held.

    Args:
      function: takes and gives stacks ``[Y, M, N]``.
      stacks: [..., M, N] each, of equal shapes.
      at_once: layers of a turn.
    """
    shape = stacks[0].shape
    flat = tuple(stack.reshape(-1, *shape[-2:]) for stack in stacks)
    count = len(flat[0])
    if count <= at_once:
        return tuple(stack.reshape(shape) for stack in function(*flat))

    def turn(index: jax.Array, flat: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The last turn begins early enough to be whole, and leaves alone what is done.
        start = jnp.minimum(index * at_once, count - at_once)
        ahead_Y = start + jnp.arange(at_once) >= index * at_once
        old = tuple(jax.lax.dynamic_slice_in_dim(stack, start, at_once) for stack in flat)
        new = (
            jnp.where(ahead_Y[:, None, None], new, old)
            for new, old in zip(function(*old), old, strict=True)
        )
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(stack, new, start, 0)
            for stack, new in zip(flat, new, strict=True)
        )

    flat = jax.lax.fori_loop(0, -(-count // at_once), turn, flat)
    return tuple(stack.reshape(shape) for stack in flat)


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
