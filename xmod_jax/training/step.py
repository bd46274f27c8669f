"""One optimiser step: loss, gradients over micro-batches, update, routing state.

Shapes: B sequences of a step, L context, S sparse layers of a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xmod_jax import sharding
from xmod_jax.config import DataConfig, Execution, RunConfig
from xmod_jax.model import Decoder, Stages, Thresholds, TopK
from xmod_jax.nn import collectives
from xmod_jax.nn.moe import ExpertBias, move_bias
from xmod_jax.nn.routed_stage import StageOutput
from xmod_jax.training.compilation import jit
from xmod_jax.training.loss import cross_entropy
from xmod_jax.training.optimizer import learning_rate, make_optimizer

# Where a gradient's stages stand in the pair of it and its auxiliaries.
_GROUPS = (jax.tree_util.SequenceKey(0), jax.tree_util.GetAttrKey("groups"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes; saved in checkpoints as it is.

    Attributes:
      model: the parameters.
      optimizer: the optimiser's state.
      thresholds: calibrated threshold of every sparse layer, the running mean of the smallest
        selected logit over training batches; no gradient.
      step: int32, steps taken.
    """

    model: Decoder
    optimizer: Any
    thresholds: Thresholds
    step: jax.Array


class Metrics(NamedTuple):
    """Float32 scalars of a step, on the device.

    Attributes:
      loss: mean negative log-likelihood under top-k routing, in nats per token.
      alignment_loss: mean over sparse layers, before its coefficient; 0 without any.
      balance_loss: mean over MoE layers, before its coefficient; 0 without any.
      max_load: largest load of an expert relative to an equal share, mean over MoE layers.
      grad_norm: global norm before clipping.
      learning_rate: of this step.
    """

    loss: jax.Array
    alignment_loss: jax.Array
    balance_loss: jax.Array
    max_load: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array


class Auxiliary(NamedTuple):
    """What the objective gives beside itself; means over a batch.

    Attributes:
      loss: negative log-likelihood in nats per token.
      alignment: router alignment loss, mean over sparse layers.
      balance: load-balancing loss, mean over MoE layers.
      kth: smallest selected logit of every sparse layer.
      load: share of every expert [N, X]; None without experts.
    """

    loss: jax.Array
    alignment: jax.Array
    balance: jax.Array
    kth: Thresholds
    load: jax.Array | None


def training_loss(
    model: Decoder,
    tokens_BL1: jax.Array,
    alignment: float,
    into: Sequence[Stages] | None = None,
    keep: bool = False,
) -> tuple[jax.Array, Auxiliary]:
    """Mean loss of a batch, with the router alignment loss and MoE's balancing loss (SPEC 3, 4).

    Args:
      model: the decoder.
      tokens_BL1: int32 [B, L + 1], inputs and targets.
      alignment: coefficient of the alignment loss, itself a mean over tokens and sparse layers.
      into: sums that the gradients of `model.groups` are added to.
      keep: whether the backward pass is given the layers' products (`Execution.keep_products`).
    """
    states_BLD, outputs = model(tokens_BL1[:, :-1], TopK(), into=into, keep=keep)
    targets_BL = tokens_BL1[:, 1:]
    ones_BL = jnp.ones(targets_BL.shape, jnp.float32)
    loss = cross_entropy(states_BLD, model.whole_head(), targets_BL, ones_BL) / targets_BL.size
    stages = [out for out in outputs if isinstance(out, StageOutput)]
    aligned = sum((jnp.sum(out.alignment_S) for out in stages), jnp.zeros((), jnp.float32))
    aligned /= max(1, model.config.hierarchy.sparse_layers)
    balance, load, objective = jnp.zeros((), jnp.float32), None, loss + alignment * aligned
    if model.config.moe is not None:
        balance, load = jnp.mean(outputs[0].balance), outputs[0].load_X
        objective += model.config.moe.balance * balance
    kth = tuple(out.kth_S for out in stages)
    return objective, Auxiliary(loss, aligned, balance, kth, load)


def accumulated_gradient(
    model: Decoder, tokens_BL1: jax.Array, alignment: float, parts: int, keep: bool = False
):
    """Gradient and auxiliaries of `training_loss`, means over `parts` micro-batches.

    Every `parts`-th sequence belongs to a micro-batch, so that it is the same on every mesh.
    """
    gradient = jax.grad(functools.partial(training_loss, keep=keep), has_aux=True)
    if parts == 1:
        return gradient(model, tokens_BL1, alignment)
    tokens = tokens_BL1.reshape(-1, parts, tokens_BL1.shape[1]).swapaxes(0, 1)

    def add(total, tokens):
        sums, _ = total
        new = gradient(model, tokens, alignment, sums.groups)
        # The stages have added theirs where they stand.
        plus = lambda path, sum, new: new if path[:2] == _GROUPS else sum + new
        return jax.tree_util.tree_map_with_path(plus, total, new), None

    zeros = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        jax.eval_shape(gradient, model, tokens[0], alignment),
    )
    total, _ = jax.lax.scan(add, zeros, tokens)
    return jax.tree.map(lambda leaf: leaf / parts, total)


def initial_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """Fresh parameters and optimiser state from the run's seed: the same on every mesh.

    With a mesh every device draws its own parts only.
    """
    placed = None if mesh is None else shardings(config, mesh)
    # The seed goes in as a number: a key made here would lie on one device of one process.
    fresh = jit(lambda seed: _fresh(config)(jax.random.key(seed)), out_shardings=placed)
    return fresh(np.uint32(config.train.seed))


def abstract_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """`initial_state` as shapes, dtypes and, with a mesh, shardings; draws nothing."""
    shapes = jax.eval_shape(_fresh(config), jax.random.key(config.train.seed))
    return shapes if mesh is None else sharding.placed(shapes, mesh)


def shardings(config: RunConfig, mesh: Mesh) -> TrainState:
    """How a run's state lies on a mesh; a tree like it."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))


def _fresh(config: RunConfig) -> Callable[[jax.Array], TrainState]:
    def make(key: jax.Array) -> TrainState:
        model = Decoder(config.model, rngs=nnx.Rngs(key))
        optimizer = make_optimizer(config.train.optimizer, config.train.steps).init(model)
        return TrainState(model, optimizer, model.thresholds(), jnp.zeros((), jnp.int32))

    return make


def make_step(
    config: RunConfig, mesh: Mesh | None = None
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The step of a run, not yet compiled: ``(state, int32 [B, L + 1]) -> (state, metrics)``.

    With a mesh it runs on all of its devices, the state laid out as `shardings` says and the batch
    in parts over data and fsdp.
    """
    step = _make_local_step(config)
    if mesh is None:
        return step
    sharding.check_axes(mesh)
    state, batch = sharding.specs(abstract_state(config)), P(sharding.BATCH_AXES)
    return jax.shard_map(
        step, mesh=mesh, in_specs=(state, batch), out_specs=(state, P()), check_vma=False
    )


def flat(
    step: Callable[[TrainState, Any], tuple[TrainState, Metrics]], structure: Any
) -> Callable[[list[jax.Array], Any], tuple[list[jax.Array], Metrics]]:
    """A step that takes and gives a state's leaves, in order, instead of the state.

    To take a model's objects apart and put them together costs Python some 25 ms, a third of a
    small step; here that happens once, while the step is traced.

    Args:
      step: of `make_step`.
      structure: of the state, as `jax.tree.structure` gives it.
    """

    def on_leaves(leaves: list[jax.Array], tokens_BL1: Any) -> tuple[list[jax.Array], Metrics]:
        state, metrics = step(jax.tree.unflatten(structure, leaves), tokens_BL1)
        return jax.tree.leaves(state), metrics

    return on_leaves


def program(config: RunConfig) -> RunConfig:
    """The configuration without what a compiled step does not depend on: labels, seed, data."""
    return dataclasses.replace(
        config,
        experiment="",
        name="",
        architecture="",
        family="",
        scale="",
        train=dataclasses.replace(config.train, seed=0, eval_sequences=1),
        data=DataConfig(),
        start=None,
        execution=Execution(config.execution.accumulation, config.execution.keep_products),
    )


def _make_local_step(config: RunConfig):
    """The step as one device takes it."""
    train, execution = config.train, config.execution
    optimizer = make_optimizer(train.optimizer, train.steps)
    rate = learning_rate(train.optimizer, train.steps)
    decay, moe = config.model.routing.calibration_decay, config.model.moe

    def step(state: TrainState, tokens_BL1: jax.Array) -> tuple[TrainState, Metrics]:
        gradient, auxiliary = accumulated_gradient(
            state.model,
            tokens_BL1,
            train.alignment,
            execution.accumulation,
            execution.keep_products,
        )
        gradient = collectives.mean_gradient(gradient)
        auxiliary = collectives.batch_mean(auxiliary)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.model)
        # A plain mean at first, then exponential: the start value leaves no trace.
        age = state.step.astype(jnp.float32)
        keep = jnp.minimum(decay, age / (age + 1))
        thresholds = jax.tree.map(
            lambda t, new: keep * t + (1 - keep) * new, state.thresholds, auxiliary.kth
        )
        model = optax.apply_updates(state.model, updates)
        max_load = jnp.zeros((), jnp.float32)
        if moe is not None:
            model = _balanced(model, auxiliary.load, moe.bias_rate)
            max_load = jnp.mean(auxiliary.load.max(-1) / auxiliary.load.mean(-1))
        metrics = Metrics(
            auxiliary.loss,
            auxiliary.alignment,
            auxiliary.balance,
            max_load,
            collectives.global_norm(gradient),
            jnp.asarray(rate(state.step), jnp.float32),
        )
        return TrainState(model, optimizer_state, thresholds, state.step + 1), metrics

    return step


def _balanced(model: Decoder, load_NX: jax.Array, rate: float) -> Decoder:
    """The model with every expert's selection bias moved against its load."""
    is_bias = lambda leaf: isinstance(leaf, ExpertBias)
    move = lambda leaf: leaf.replace(move_bias(leaf[...], load_NX, rate)) if is_bias(leaf) else leaf
    return jax.tree.map(move, model, is_leaf=is_bias)
