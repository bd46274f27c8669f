"""The decoder: embedding, dense prefix, stages, final norm, head (SPEC 1 to 4).

One model for every architecture; the hierarchy and the routing of its configuration make it dense,
MoD or X-MoD. Layers are stacked on axis 0 and scanned, so compile time does not grow with depth.

Shapes: B batch, L context, D width, V vocabulary, S sparse layers of a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xmod_jax.config import ModelConfig, Sparse
from xmod_jax.hierarchy import StageGroup
from xmod_jax.nn import collectives
from xmod_jax.nn.layers import (
    INIT_STD,
    AttentionLayer,
    DecoderBlock,
    Phases,
    RMSNorm,
    SparseLayer,
    attention_backward,
    attention_forward,
    dense_backward,
    dense_forward,
    dense_layer,
    keeping_update,
    rotary_phases,
    sparse_update,
)
from xmod_jax.nn.moe import ExpertOutput, MoEBlock, moe_layer
from xmod_jax.nn.routed_stage import Dense, routed_stages
from xmod_jax.nn.threshold_stage import PAPER_THRESHOLD, threshold_stages


def _by_keep(forward: Callable[..., Any], backward: Callable[..., Any]) -> dict[bool, Dense]:
    """A layer by whether its products are kept for the backward pass."""
    return {keep: Dense(functools.partial(forward, keep=keep), backward) for keep in (False, True)}


_ANCHOR = _by_keep(dense_forward, dense_backward)
_LEAD = _by_keep(attention_forward, attention_backward)
Thresholds = tuple[jax.Array, ...]  # per stage group [count, S], of biased logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """Training's routing: the ceil(L/K) highest-ranked tokens of the sequence. Not causal."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Threshold:
    """Causal routing by a threshold on the biased logit of every sparse layer."""

    values: Thresholds


Route = TopK | Threshold


class Stages(nnx.Module):
    """The stages of one group, stacked: sparse layers [count, S, ...], anchors [count, ...].

    Leads (Routed-FFN) are stacked [count, attentions, ...].
    """

    def __init__(self, config: ModelConfig, group: StageGroup, *, rngs: nnx.Rngs):
        make_sparse = lambda key: SparseLayer(config.backbone, config.routing, rngs=nnx.Rngs(key))
        keys = jax.random.split(rngs.params(), (group.count, group.sparse_layers))
        self.sparse = jax.vmap(jax.vmap(make_sparse))(keys)
        self.anchor = _stack(config, group.count, rngs) if group.anchor else None
        make_lead = lambda key: AttentionLayer(config.backbone, rngs=nnx.Rngs(key))
        lead_keys = jax.random.split(rngs.params(), (group.count, group.attentions))
        self.lead = jax.vmap(jax.vmap(make_lead))(lead_keys) if group.attentions else None


class Decoder(nnx.Module):
    """A decoder language model. A plain pytree of float32 parameters; calls change nothing."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        backbone = config.backbone
        self.config = config
        table = (backbone.vocab_size, backbone.d_model)
        self.embedding = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), table))
        prefix = config.hierarchy.prefix
        self.prefix = _stack(config, prefix, rngs) if prefix else None
        groups = config.hierarchy.groups
        self.groups = nnx.List([Stages(config, group, rngs=rngs) for group in groups])
        self.final_norm = RMSNorm(backbone.d_model, backbone.norm_eps)
        self.head = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), table[::-1]))

    def __call__(
        self,
        tokens_BL: jax.Array,
        route: Route,
        valid_BL: jax.Array | None = None,
        into: Sequence[Stages] | None = None,
        keep: bool = False,
    ) -> tuple[jax.Array, list[Any]]:
        """Runs the decoder up to the final norm.

        Args:
          tokens_BL: int32 tokens.
          route: how sparse layers choose their tokens.
          valid_BL: bool; False marks padding, which must stand at the end of a sequence.
          into: under top-k, sums like `groups` that the stages' gradients are added to: these are
            then what their gradients are (`routed_stages`).
          keep: whether the backward pass is given the layers' matrix products, instead of computing
            them again: a fifth of its products less, for several times the memory. Those of
            experts, of FFNs on more than 4096 rows and of Selected-Q/full-KV are computed again.

        Returns:
          The normalised states [B, L, D] in the compute dtype, and for every stage group its
          `StageOutput` or `ThresholdOutput` with fields stacked over stages, without the stream;
          for a model of experts one `ExpertOutput` stacked over layers.
        """
        backbone = self.config.backbone
        positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        phases = rotary_phases(positions_BL, backbone.head_dim, backbone.rope_base)
        x_BLD = self._whole("embedding")[tokens_BL].astype(self.config.compute.value)
        outputs: list[Any] = []
        if isinstance(self.prefix, MoEBlock):
            x_BLD, experts = _run_moe(self.prefix, x_BLD, phases, valid_BL, keep)
            outputs.append(experts)
        elif self.prefix is not None:
            x_BLD = _run_dense(self.prefix, x_BLD, phases, keep)
        for index, stages in enumerate(self.groups):
            chosen = route.values[index] if isinstance(route, Threshold) else None
            sums = None if into is None else into[index]
            x_BLD, output = self._run_group(stages, x_BLD, phases, chosen, valid_BL, sums, keep)
            outputs.append(output)
        return self.final_norm(x_BLD), outputs

    def whole_head(self) -> jax.Array:
        """The output head [D, V], float32; on a mesh gathered from its parts."""
        return self._whole("head")

    def _whole(self, name: str) -> jax.Array:
        part = {name: getattr(self, name)[...]}
        return collectives.gathered(part, self.config.compute.value)[name]

    def logits(self, states_BLD: jax.Array) -> jax.Array:
        """Float32 logits [B, L, V] of normalised states. For few tokens: losses go by chunks."""
        head_DV = self.whole_head().astype(states_BLD.dtype)
        wide = jnp.promote_types(jnp.float32, states_BLD.dtype)
        return jnp.einsum("bld,dv->blv", states_BLD, head_DV, preferred_element_type=wide)

    def thresholds(self, value: float = PAPER_THRESHOLD) -> Thresholds:
        """One threshold for every sparse layer; the default is the paper's r >= 0.5."""
        groups = self.config.hierarchy.groups
        return tuple(
            jnp.full((group.count, group.sparse_layers), value, jnp.float32) for group in groups
        )

    def _run_group(
        self,
        stages: Stages,
        x_BLD: jax.Array,
        phases: Phases,
        thresholds: jax.Array | None,
        valid_BL: jax.Array | None,
        into: Stages | None,
        keep: bool,
    ) -> tuple[jax.Array, Any]:
        options: dict[str, Any] = {
            "sparsity": self.config.hierarchy.sparsity,
            "bias_scale": self.config.routing.bias_scale,
            "valid_BL": valid_BL,
            "anchor": _ANCHOR[keep] if stages.anchor is not None else None,
            "anchor_params": stages.anchor,
            "lead": _LEAD[keep] if stages.lead is not None else None,
            "lead_params": stages.lead,
            "reads_stream": self.config.routing.sparse is Sparse.FULL_KV,
        }
        stack, router_NSD = stages.sparse, stages.sparse.router[...]
        output: Any
        if thresholds is None:
            if into is not None:
                options["into"] = into.sparse, (into.anchor, into.lead)
            options["keeps"] = keep
            update = keeping_update if keep else sparse_update
            output = routed_stages(update, stack, router_NSD, x_BLD, phases, **options)
        else:
            output = threshold_stages(
                sparse_update, stack, router_NSD, x_BLD, phases, thresholds, **options
            )
        return output.x_BLD, output._replace(x_BLD=None)


def _stack(config: ModelConfig, count: int, rngs: nnx.Rngs) -> DecoderBlock | MoEBlock:
    def make(key: jax.Array) -> DecoderBlock | MoEBlock:
        if config.moe is not None:
            return MoEBlock(config.backbone, config.moe, rngs=nnx.Rngs(key))
        return DecoderBlock(config.backbone, rngs=nnx.Rngs(key))

    return jax.vmap(make)(jax.random.split(rngs.params(), count))


def _run_dense(blocks: DecoderBlock, x_BLD: jax.Array, phases: Phases, keep: bool) -> jax.Array:
    layer = lambda x_BLD, block: (dense_layer(block, x_BLD, phases, keep), None)
    return jax.lax.scan(layer, x_BLD, blocks)[0]


def _run_moe(
    blocks: MoEBlock, x_BLD: jax.Array, phases: Phases, valid_BL: jax.Array | None, keep: bool
) -> tuple[jax.Array, ExpertOutput]:
    layer = lambda x_BLD, block: moe_layer(block, x_BLD, phases, valid_BL, keep)
    return jax.lax.scan(layer, x_BLD, blocks)
