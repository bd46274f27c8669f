"""Cached decoding equals the full threshold pass, for every architecture."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.inference.test_generate import model as small_xmod
from tests.test_model import ARCHITECTURES, TINY, run, tokens
from tests.test_model import make as make_large
from xmod_jax.config import Backbone, Compute, ModelConfig, MoE
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.inference import cache as caches
from xmod_jax.inference.decode import cast_once, decode_step, extend
from xmod_jax.model import Decoder, Threshold

EXTEND = jax.jit(extend, donate_argnums=2)
STEP = jax.jit(decode_step, donate_argnums=2)
LOGITS = jax.jit(lambda model, states: model.logits(states))
B, L, T = 3, 21, 8
LENGTHS = np.array([8, 5, 1])  # of ragged prompts
SMALL = "small xmod"  # one group: half the time to compile; all others are in the slow test
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)


@functools.cache
def make(name: str):
    """The models of test_model.py, smaller matrices: with theirs, 12 layers on every token amplify
    rounding ten-thousandfold."""
    if name == SMALL:
        return small_xmod()
    return jax.tree.map(lambda leaf: leaf * 0.6 if leaf.ndim > 2 else leaf, make_large(name))


def decode(name, ids_BL, lengths_B, value, routed=L, running_B=None, chunk=T):
    """Logits [B, L, V] of prompts run together and then decoded token by token; the last cache.

    NaN where a sequence saw nothing.
    """
    model = make(name)
    route = Threshold(model.thresholds(value))
    batch, length = ids_BL.shape
    ids_BL, position_B = np.asarray(ids_BL), np.array(lengths_B)
    running_B = np.ones(batch, bool) if running_B is None else running_B
    cache = caches.empty(model.config, batch, length, routed)
    found = np.full((batch, length, TINY.vocab_size), np.nan, np.float32)
    for first in range(0, max(lengths_B), chunk):
        count_B = np.clip(position_B - first, 0, chunk)
        states, cache = EXTEND(model, route, cache, ids_BL[:, first : first + chunk], count_B)
        logits = LOGITS(model, states)
        for b, n in enumerate(count_B):
            found[b, first : first + n] = logits[b, :n]
    while (now_B := running_B & (position_B < length)).any():
        at_B = np.minimum(position_B, length - 1)
        logits, cache = STEP(model, route, cache, ids_BL[np.arange(batch), at_B], now_B)
        found[np.arange(batch)[now_B], at_B[now_B]] = np.asarray(logits)[now_B]
        position_B += now_B
    return found, cache


@pytest.mark.parametrize(
    "name",
    [
        SMALL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("routed ffn", "selected q, full kv")),
    ],
)
def test_decoding_ragged_prompts_equals_the_full_pass(name):
    """With some tokens routed, with none, and with all."""
    model, ids = make(name), tokens(B, L)
    for value in (0.0, 1e9, -1e9) if model.groups else (0.0,):
        want, _ = run(model, ids, Threshold(model.thresholds(value)))
        found, cache = decode(name, ids, LENGTHS, value)
        close(found, want)
        assert cache.length_B.tolist() == [L] * B
        routed = sum(int(jnp.sum(group.count_NSB)) for group in cache.groups)
        layers = sum(g.count * g.sparse_layers for g in model.config.hierarchy.groups)
        share = routed / max(1, layers * B * L)
        assert share == {1e9: 0, -1e9: 1}.get(value, share)
        assert not model.groups or value or 0.1 < share < 0.9
    # The same compiled programs, other neighbours, which stop early.
    others = ids.at[1:].set((ids[1:] + 3) % TINY.vocab_size)
    alone, _ = decode(name, others, LENGTHS, 0.0, running_B=np.array([True, False, False]))
    together, _ = decode(name, ids, LENGTHS, 0.0)
    np.testing.assert_allclose(alone[0], together[0], rtol=1e-5, atol=1e-5)
    assert np.isnan(alone[1, LENGTHS[1] :]).all()


# The others are drills.
_OVER_512 = ("dense", "xmod with a short first stage", "moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n in _OVER_512 else pytest.param(n, marks=pytest.mark.drill) for n in ARCHITECTURES],
)
def test_decoding_equals_the_full_pass_over_512_tokens(name):
    model, ids = make(name), tokens(B, 528)
    want, _ = run(model, ids, Threshold(model.thresholds()))
    found, cache = decode(name, ids, (400, 16, 1), 0.0, routed=528, chunk=16)
    close(found, want)
    assert cache.length_B.tolist() == [528] * B


def test_new_rows_never_move_over_older_ones_at_the_end_of_a_buffer():
    store = caches.Rows(*(jnp.arange(2 * 8.0).reshape(1, 2, 1, 8, 1) for _ in range(2)))
    rows = -jnp.arange(1.0, 9).reshape(2, 4, 1, 1)
    start_B, count_B = jnp.array([6, 2]), jnp.array([2, 3])
    append = jax.jit(lambda store, n: caches.append(store, (n,), (rows, rows), start_B, count_B))
    got = append(store, 0).values[0, :, 0, :, 0]
    assert got.tolist() == [[0, 1, 2, 3, 4, 5, -1, -2], [8, 9, -5, -6, -7, 13, 14, 15]]


@pytest.mark.parametrize("name", ["dense", SMALL, "selected q, full kv"])
def test_a_step_copies_no_cache(name):
    """Of the buffers, far larger than all else here, nothing is kept twice."""
    model = make(name)
    cache = jax.eval_shape(lambda: caches.empty(model.config, 1, 1 << 15, 1 << 15))
    shapes = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.bool)
    step = STEP.lower(model, Threshold(model.thresholds()), cache, *shapes).compile()
    buffers = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache))
    memory = step.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= buffers - 4
    assert memory.temp_size_in_bytes < 0.1 * buffers


def test_a_step_reads_only_the_chosen_experts():
    backbone = Backbone(32, 8, 2, 1, 64, 64)
    config = ModelConfig(backbone, Hierarchy.dense(2), moe=MoE(256, 2, 0, 32))
    model = jax.eval_shape(lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0))
    cache = jax.eval_shape(lambda: caches.empty(config, 1, 8, 8))
    shapes = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.bool)
    memory = STEP.lower(model, Threshold(()), cache, *shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.1 * 256 * 3 * 32 * 32 * 4  # a layer's experts


def test_running_every_layer_and_masking_gives_the_same_step():
    model = make(SMALL)
    route, cache = Threshold(model.thresholds()), caches.empty(model.config, B, 4, 4)
    step = jax.jit(decode_step, static_argnames="every_layer")
    arguments = model, route, cache, tokens(B, 1)[:, 0], jnp.array([True, True, False])
    (want, skipped), (found, masked) = step(*arguments), step(*arguments, every_layer=True)
    close(found[:2], want[:2])
    assert jax.tree.map(jnp.array_equal, skipped.length_B, masked.length_B)
    for left, right in zip(skipped.groups, masked.groups, strict=True):
        assert jnp.array_equal(left.count_NSB, right.count_NSB)
        assert 0 < jnp.sum(left.count_NSB) < left.count_NSB.size * 2 / B


@pytest.mark.slow
def test_matrices_cast_once_decode_as_if_cast_at_each_use():
    model = make(SMALL)
    config = dataclasses.replace(model.config, compute=Compute.BFLOAT16)
    model = Decoder(config, rngs=nnx.Rngs(1))
    once, route = cast_once(model), Threshold(model.thresholds())
    stays = {leaf.dtype for leaf in (once.groups[0].sparse.router, once.groups[0].sparse.gate)}
    assert stays == {jnp.dtype("float32")}
    assert once.groups[0].sparse.block.ffn.gate.dtype == once.head.dtype == jnp.bfloat16
    cache = caches.empty(config, B, 4, 4)
    rest = tokens(B, 1)[:, 0], jnp.ones(B, bool)
    run = lambda model: STEP(model, route, jax.tree.map(jnp.copy, cache), *rest)[0]
    np.testing.assert_array_equal(run(once), run(model))


def test_balanced_routing_needs_about_the_memory_of_the_dense_twin():
    backbone, size = Backbone(256, 64, 4, 2, 768, 257), {}
    for name, K in (("dense", 1), ("A4K8", 8), ("A3K16", 16)):
        config = ModelConfig(backbone, Hierarchy.from_name(name, 28))
        routed = caches.routed_rows(1024, K)
        cache = jax.eval_shape(lambda c=config, r=routed: caches.empty(c, 1, 1024, r))
        size[name] = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert max(size["A4K8"], size["A3K16"]) <= 1.25 * size["dense"]
