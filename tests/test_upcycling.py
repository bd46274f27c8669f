"""A model upcycled from a dense one is that model at first, and trains away from it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.test_model import ARCHITECTURES, TINY, make, run, tokens
from xmod_jax.config import ModelConfig, Routing, SparseStart
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.model import Decoder, Threshold, TopK
from xmod_jax.training.step import training_loss
from xmod_jax.upcycling import upcycle

SHORT = ModelConfig(TINY, Hierarchy.from_name("A2K2", active_depth=6, prefix=1), Routing())
DENSE_LAYERS = SHORT.hierarchy.prefix + sum(group.count for group in SHORT.hierarchy.groups)


@functools.cache
def dense_of(layers: int) -> Decoder:
    config = ModelConfig(TINY, Hierarchy.dense(layers))
    model = jax.jit(lambda key: Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(1))
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, model)


@functools.cache
def upcycled(start: SparseStart) -> Decoder:
    make = lambda dense, key: upcycle(dense, SHORT, start, rngs=nnx.Rngs(key))
    return jax.jit(make)(dense_of(DENSE_LAYERS), jax.random.key(2))


gradient = jax.jit(jax.grad(lambda model: training_loss(model, tokens(2, 14), 0.0)[0]))


@pytest.mark.parametrize("start", SparseStart)
def test_the_first_forward_pass_is_the_dense_models(start):
    dense = dense_of(DENSE_LAYERS)
    model = upcycled(start)
    tokens_BL = tokens(2, 13)
    want_BLV, _ = run(dense, tokens_BL, TopK())
    everything = Threshold(model.thresholds(-1e9))
    for route in (TopK(), Threshold(model.thresholds()), everything):
        logits_BLV, _ = run(model, tokens_BL, route)
        np.testing.assert_allclose(logits_BLV, want_BLV, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", SparseStart)
def test_closed_gates_receive_a_gradient(start):
    for stages in gradient(upcycled(start)).groups:
        assert jnp.all(stages.sparse.gate[...] != 0)
        assert jnp.any(stages.anchor.ffn.up[...] != 0)


def test_layers_are_copied_in_order():
    dense = dense_of(DENSE_LAYERS)
    model = upcycled(SparseStart.COPIED)
    up = lambda block: block.ffn.up[...]
    parts = [up(model.prefix), *(up(stages.anchor) for stages in model.groups)]
    assert np.array_equal(np.concatenate(parts), up(dense.prefix))
    for stages in model.groups:
        copies = np.moveaxis(up(stages.sparse.block), 1, 0)
        assert all(np.array_equal(copy, up(stages.anchor)) for copy in copies)


@pytest.mark.parametrize(
    ("dense", "config", "reason"),
    [
        (dense_of(2), SHORT, f"has 2 layers, prefix and anchors are {DENSE_LAYERS}"),
        (make("moe"), SHORT, "without experts"),
        (make("xmod"), SHORT, "starts from a dense model"),
        (dense_of(3), ARCHITECTURES["mod"], "only its update has a gate"),
        (dense_of(3), ARCHITECTURES["dense"], "makes an X-MoD"),
        (dense_of(3), ARCHITECTURES["routed ffn"], "whole layers"),
        (dense_of(3), ARCHITECTURES["xmod without anchors"], "an anchor in every stage"),
        (
            dense_of(3),
            dataclasses.replace(SHORT, backbone=dataclasses.replace(TINY, d_ff=64)),
            "the backbones differ",
        ),
    ],
)
def test_architectures_that_do_not_fit_are_refused(dense, config, reason):
    with pytest.raises(UserError, match=reason) as error:
        upcycle(dense, config, SparseStart.NEW, rngs=nnx.Rngs(0))
    assert "\n" not in str(error.value)
