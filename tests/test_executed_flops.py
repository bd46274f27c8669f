"""Executed FLOPs of the accounting against XLA's count of one layer of each kind.

XLA counts a loop's body once, so a layer here has one block of attention and one of experts.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from xmod_jax import accounting
from xmod_jax.config import Backbone, ModelConfig, MoE, Routing, Sparse
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.nn import layers, moe

BACKBONE = Backbone(512, 64, 8, 4, 1536, vocab_size=1)
L, K, WITHIN = 256, 4, 0.02


def phases(length: int):
    positions = jnp.arange(length)[None]
    return jax.eval_shape(lambda: layers.rotary_phases(positions, BACKBONE.head_dim, 1e6))


def stream(length: int, *width: int):
    return jax.ShapeDtypeStruct((1, length, *width), jnp.float32)


def count(function, *shapes) -> float:
    cost = jax.jit(function).lower(*shapes).compile().cost_analysis()
    assert cost is not None
    return cost["flops"]


def expected(
    hierarchy: Hierarchy,
    routing: Routing | None = None,
    experts: MoE | None = None,
    keep: bool = False,
):
    """Forward and forward plus backward FLOPs of a model's layers, without its tiny head."""
    model = ModelConfig(BACKBONE, hierarchy, routing or Routing(), moe=experts)
    head = 2 * BACKBONE.d_model
    forward = accounting.forward_hardware_flops_per_token(model, L) - head
    both = accounting.train_hardware_flops_per_token(model, L, keep_products=keep) - 3 * head
    return L * forward, L * both


@pytest.mark.parametrize("keep", [False, True])
def test_a_dense_layer(keep):
    block = jax.eval_shape(lambda: layers.DecoderBlock(BACKBONE, rngs=nnx.Rngs(0)))
    x, where = stream(L, 512), phases(L)
    kept = jax.eval_shape(functools.partial(layers.dense_forward, keep=keep), block, x, where)[1]
    forward = count(lambda *a: layers.dense_forward(*a)[0], block, x, where)
    backward = count(layers.dense_backward, block, x, where, kept, x)
    want, both = expected(Hierarchy.dense(1), keep=keep)
    assert forward == pytest.approx(want, rel=WITHIN)
    assert forward + backward == pytest.approx(both, rel=WITHIN)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", list(Sparse))
def test_a_sparse_layer(kind, keep):
    routing, C = Routing(sparse=kind), L // K
    layer = jax.eval_shape(lambda: layers.SparseLayer(BACKBONE, routing, rngs=nnx.Rngs(0)))
    whole = (stream(L, 512), phases(L)) if kind is Sparse.FULL_KV else ()
    shapes = (layer, stream(C, 512), phases(C), stream(C), *whole)

    kept = jax.eval_shape(layers.keeping_update, *shapes)[1] if keep else layers.NOTHING

    def backward(kept, bar, layer, rows, where, score, *whole):
        update = lambda layer, rows, score, *x: layers.keeping_update(
            layer, rows, where, score, *(x and (*x, whole[1])), kept=kept
        )[0]
        return jax.vjp(update, layer, rows, score, *whole[:1])[1](bar)

    group = StageGroup(1, K, anchor=False, attentions=int(kind is Sparse.FFN))
    want, both = expected(Hierarchy(0, (group,), K), routing, keep=keep)
    if kind is Sparse.FFN:
        lead, lead_both = attention_layer(keep)
        want, both = want - lead, both - lead_both
    forward = count(layers.sparse_update, *shapes)
    assert forward == pytest.approx(want / K, rel=WITHIN)
    total = forward + count(backward, kept, stream(C, 512), *shapes)
    assert total == pytest.approx(both / K, rel=WITHIN)


def attention_layer(keep: bool):
    """Counted FLOPs of the attention that leads routed FFNs: forward, and both."""
    lead = jax.eval_shape(lambda: layers.AttentionLayer(BACKBONE, rngs=nnx.Rngs(0)))
    x, where = stream(L, 512), phases(L)
    kept = jax.eval_shape(functools.partial(layers.attention_forward, keep=keep), lead, x, where)[1]
    forward = count(lambda *a: layers.attention_forward(*a)[0], lead, x, where)
    return forward, forward + count(layers.attention_backward, lead, x, where, kept, x)


@pytest.mark.parametrize("keep", [False, True])
def test_a_layer_of_experts(monkeypatch, keep):
    monkeypatch.setattr(moe, "block_rows", lambda rows, groups: rows)
    experts = MoE(experts=1, active=1, shared=1, d_expert=768)
    block = jax.eval_shape(lambda: moe.MoEBlock(BACKBONE, experts, rngs=nnx.Rngs(0)))
    x, where = stream(L, 512), phases(L)
    forward_pass = functools.partial(moe.moe_forward, valid_BL=None, keep=keep)
    saved = jax.eval_shape(forward_pass, block, x, where)[2]
    forward = count(lambda b, x, p: moe.moe_forward(b, x, p, None)[:2], block, x, where)

    def backward(block, x, where, saved, bar):
        layer = lambda block, x: moe.moe_forward(block, x, where, None, saved)[0]
        return jax.vjp(layer, block, x)[1](bar)

    want, both = expected(Hierarchy.dense(1), experts=experts, keep=keep)
    assert forward == pytest.approx(want, rel=WITHIN)
    assert forward + count(backward, block, x, where, saved, x) == pytest.approx(both, rel=WITHIN)


def test_the_count_is_of_the_configuration():
    """Halving the active experts halves what they add."""
    experts = MoE(experts=8, active=4, shared=0, d_expert=96)
    fewer = dataclasses.replace(experts, active=2)
    none = expected(Hierarchy.dense(1), experts=dataclasses.replace(experts, active=1))[0]
    four, two = (expected(Hierarchy.dense(1), experts=e)[0] for e in (experts, fewer))
    assert four - two == pytest.approx(2 * (two - none))
