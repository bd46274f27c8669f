"""Starts a routed model from a trained dense one, so that its first forward pass equals it.

The dense layers become the prefix and the anchors, in order; the sparse layers between them begin
with a gate of zero, which leaves the stream as it is under any routing. A gate that is zero still
receives a gradient, so training opens it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from xmod_jax.config import ModelConfig, Sparse, SparseStart, Update
from xmod_jax.errors import UserError
from xmod_jax.model import Decoder


def upcycle(dense: Decoder, config: ModelConfig, start: SparseStart, *, rngs: nnx.Rngs) -> Decoder:
    """A model of `config` whose first forward pass, under any routing, equals `dense`'s.

    Args:
      dense: a dense model without experts.
      config: an X-MoD architecture (of whole sparse blocks) with the same backbone and as many
        dense layers, prefix and anchors, as `dense` has layers.
      start: what the sparse layers begin with. Routers are new in either case; all layers of a
        stage being equal at first, only the routers tell copied ones apart.
      rngs: for what is new.

    Raises:
      UserError: the architectures do not fit each other; says how.
    """
    check(dense.config, config)
    model = Decoder(config, rngs=rngs)
    model.embedding, model.final_norm, model.head = dense.embedding, dense.final_norm, dense.head
    layers, used = dense.prefix, config.hierarchy.prefix
    take = lambda start, stop: jax.tree.map(lambda leaf: leaf[start:stop], layers)
    if used:
        model.prefix = take(0, used)
    for stages, group in zip(model.groups, config.hierarchy.groups, strict=True):
        stages.anchor = take(used, used + group.count)
        used += group.count
        gate = stages.sparse.gate
        stages.sparse.gate = nnx.Param(jnp.zeros_like(gate[...]))
        if start is SparseStart.COPIED:
            # [N, ...] -> [N, S, ...]: every sparse layer of a stage begins as its anchor.
            spread = lambda leaf, S=group.sparse_layers: jnp.repeat(leaf[:, None], S, axis=1)
            stages.sparse.block = jax.tree.map(spread, stages.anchor)
    return model


def check(dense: ModelConfig, config: ModelConfig) -> None:
    """Refuses architectures that `upcycle` cannot bring together, with one line."""
    if dense.hierarchy.groups or dense.moe is not None:
        raise UserError("upcycling starts from a dense model without experts")
    routing, groups = config.routing, config.hierarchy.groups
    if not groups or routing.update is not Update.XMOD or routing.sparse is not Sparse.LAYER:
        raise UserError("upcycling makes an X-MoD of whole layers: only its update has a gate")
    if not all(group.anchor for group in groups):
        raise UserError("upcycling needs an anchor in every stage: dense layers must go somewhere")
    if dense.backbone != config.backbone:
        raise UserError(f"the backbones differ: {dense.backbone} and {config.backbone}")
    if dense.compute is not config.compute:
        raise UserError(f"the compute types differ: {dense.compute} and {config.compute}")
    have = dense.hierarchy.prefix
    need = config.hierarchy.prefix + sum(group.count for group in groups)
    if have != need:
        raise UserError(f"the dense model has {have} layers, prefix and anchors are {need}")
