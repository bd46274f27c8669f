"""The decoder: equality with plain references, causality, padding, sizes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.masked_reference import masked_logits
from xmod_jax import accounting
from xmod_jax.config import Backbone, Compute, ModelConfig, MoE, Routing, Sparse, Update
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.model import Decoder, Threshold, TopK
from xmod_jax.nn import layers
from xmod_jax.nn.layers import DecoderBlock, rotary_phases, sparse_update
from xmod_jax.training.step import training_loss

TINY = Backbone(16, 8, 4, 2, 24, vocab_size=29)
ARCHITECTURES = {
    "dense": ModelConfig(TINY, Hierarchy.dense(3)),
    "mod": ModelConfig(TINY, Hierarchy.mod(6, sparsity=4), Routing.mod()),
    "xmod": ModelConfig(TINY, Hierarchy.from_name("A2K4", active_depth=6, prefix=1)),
    "xmod with a short first stage": ModelConfig(
        TINY, Hierarchy.from_name("A2K2", active_depth=6, prefix=1), Routing(bias_scale=0.3)
    ),
    "xmod without anchors": ModelConfig(
        TINY, Hierarchy.from_name("A1K3", active_depth=5, prefix=1).without_anchors()
    ),
    "moe": ModelConfig(TINY, Hierarchy.dense(2), moe=MoE(6, 2, 1, 5)),
    "routed ffn": ModelConfig(
        TINY,
        Hierarchy.from_name("A2K2", active_depth=6, prefix=1).routed_ffn(),
        Routing(sparse=Sparse.FFN),
    ),
    "selected q, full kv": ModelConfig(
        TINY,
        Hierarchy.from_name("A1K4", active_depth=5, prefix=1),
        Routing(sparse=Sparse.FULL_KV),
    ),
}


@functools.cache
def make(name: str) -> Decoder:
    config = ARCHITECTURES[name]
    # Wide routers: the logits then spread over both sides of every threshold.
    routing = dataclasses.replace(config.routing, router_init_std=0.5)
    config = dataclasses.replace(config, routing=routing)
    model = jax.jit(lambda key: Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(0))
    # Larger matrices than at the start of training, so that layers really change the stream; and a
    # stream of unit size, so that they do not amplify rounding.
    model = jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim > 1 else leaf, model)
    model.embedding[...] *= 12
    return model


def tokens(B: int, L: int, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (B, L), 0, TINY.vocab_size, jnp.int32)


@jax.jit
def run(model, tokens_BL, route, valid_BL=None):
    states_BLD, outputs = model(tokens_BL, route, valid_BL)
    return model.logits(states_BLD), outputs


# --- NumPy float64, written from SPEC 2 and 3


def np_norm(x, scale, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def np_rope(x_CHE, positions_C, base=1e6):
    half = x_CHE.shape[-1] // 2
    angle = positions_C[:, None] * base ** (-np.arange(half) / half)[None]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x_CHE[..., :half], x_CHE[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def np_block(block: DecoderBlock, x_CD, positions_C):
    """a and f of SPEC 3 for the rows of one sequence."""
    w = lambda param: np.asarray(param[...], np.float64)
    att, E = block.attention, TINY.head_dim
    h = np_norm(x_CD, w(block.attention_norm.scale))
    q, k, v = ((h @ w(m)).reshape(len(h), -1, E) for m in (att.query, att.key, att.value))
    q = np_rope(np_norm(q, w(att.query_norm.scale)), positions_C)
    k = np_rope(np_norm(k, w(att.key_norm.scale)), positions_C)
    heads = []
    for head in range(q.shape[1]):
        group = head // (q.shape[1] // k.shape[1])
        s = q[:, head] @ k[:, group].T / np.sqrt(E)
        s[np.triu_indices(len(s), 1)] = -np.inf
        p = np.exp(s - s.max(-1, keepdims=True))
        heads.append(p / p.sum(-1, keepdims=True) @ v[:, group])
    a = np.concatenate(heads, -1) @ w(att.output)
    h = np_norm(x_CD + a, w(block.ffn_norm.scale))
    gate = h @ w(block.ffn.gate)
    return a, (gate / (1 + np.exp(-gate)) * (h @ w(block.ffn.up))) @ w(block.ffn.down)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("xmod", 4096), ("xmod", 4), ("moe", 4096), ("routed ffn", 4096)],
    ids=["xmod", "ffns of 4 rows at once", "moe", "routed ffn"],
)
def test_kept_products_change_no_gradient(monkeypatch, name, rows):
    monkeypatch.setattr(layers, "FFN_ROWS", rows)
    got, want = (
        jax.jit(jax.grad(functools.partial(training_loss, keep=keep), has_aux=True))(
            make(name), tokens(2, 14), 0.1
        )
        for keep in (True, False)
    )
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want[0].prefix.attention))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.parametrize("update", list(Update))
def test_both_update_rules_equal_a_numpy_reference(update):
    hierarchy = Hierarchy(0, (StageGroup(1, 3, anchor=False),), sparsity=3)
    routing = Routing(update=update, bias_scale=0.5, router_init_std=1.0, gate_init=0.7)
    model = Decoder(ModelConfig(TINY, hierarchy, routing), rngs=nnx.Rngs(0))
    ids_L = np.asarray(tokens(1, 11)[0])
    x_LD = np.asarray(model.embedding[...], np.float64)[ids_L]
    chosen_L = np.zeros(11)
    for s in range(3):
        layer = jax.tree.map(lambda leaf, s=s: leaf[0, s], model.groups[0].sparse)
        z_L = x_LD @ np.asarray(layer.router[...], np.float64) - 0.5 * chosen_L
        idx_C = np.sort(np.argsort(-z_L, kind="stable")[:4])  # ceil(11/3)
        r_C1 = 1 / (1 + np.exp(-z_L[idx_C]))[:, None]
        a, f = np_block(layer.block, x_LD[idx_C], idx_C)
        x_LD[idx_C] += a + r_C1 * f if update is Update.MOD else 0.7 * r_C1 * (a + f)
        chosen_L[idx_C] += 1
    states, _ = jax.jit(lambda model, ids: model(ids, TopK()))(model, ids_L[None])
    np.testing.assert_allclose(states[0], np_norm(x_LD, 1.0), rtol=2e-5, atol=2e-5)


def test_k_1_gate_1_score_1_equals_a_dense_layer():
    config = ModelConfig(TINY, Hierarchy(0, (StageGroup(1, 2),), sparsity=1), Routing())
    model = Decoder(config, rngs=nnx.Rngs(1))
    layer = jax.tree.map(lambda leaf: leaf[0, 0], model.groups[0].sparse)
    x_BLD = jax.random.normal(jax.random.key(2), (2, 7, 16))
    phases = rotary_phases(jnp.broadcast_to(jnp.arange(7), (2, 7)), 8, 1e6)
    a_BLD, f_BLD, _ = layer.block(x_BLD, phases)
    sparse_BLD = sparse_update(layer, x_BLD, phases, jnp.ones((2, 7)))
    np.testing.assert_allclose(sparse_BLD, x_BLD + a_BLD + f_BLD, rtol=1e-6, atol=1e-6)


def test_a_stage_of_k_1_and_score_1_equals_dense_layers():
    """Routers that read a large constant channel give score 1 exactly."""
    config = ModelConfig(TINY, Hierarchy(1, (StageGroup(2, 2),), sparsity=1), Routing())
    model = Decoder(config, rngs=nnx.Rngs(3))
    model = jax.tree.map(lambda leaf: leaf, model)
    model.embedding[...] = model.embedding[...].at[:, 0].set(5.0)
    router = model.groups[0].sparse.router
    router[...] = jnp.zeros_like(router[...]).at[..., 0].set(20.0)
    dense = Decoder(ModelConfig(TINY, Hierarchy.dense(7)), rngs=nnx.Rngs(3))
    # Layers in order: prefix, then twice two sparse ones and their anchor.
    stage = lambda n: jnp.stack([jnp.asarray(n * 2), jnp.asarray(n * 2 + 1)])
    sparse = jax.tree.map(lambda leaf: leaf.reshape(4, *leaf.shape[2:]), model.groups[0].sparse)
    anchors = model.groups[0].anchor
    parts = [model.prefix]
    for n in range(2):
        parts.append(jax.tree.map(lambda leaf, n=n: leaf[stage(n)], sparse.block))
        parts.append(jax.tree.map(lambda leaf, n=n: leaf[n : n + 1], anchors))
    dense.prefix = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    dense.embedding[...], dense.head[...] = model.embedding[...], model.head[...]
    ids = tokens(2, 9)
    got, _ = run(model, ids, TopK())
    want, _ = run(dense, ids, TopK())
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    threshold, _ = run(model, ids, Threshold(model.thresholds()))
    np.testing.assert_allclose(threshold, want, rtol=1e-6, atol=1e-6)


@functools.cache
def reference(name: str, value: float):
    """Logits and decisions of the masked reference on the tokens that most tests use."""
    return jax.jit(masked_logits)(make(name), tokens(3, 21), value)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_future_never_changes_the_past_under_thresholds(name):
    """To the bit where shapes are fixed; to rounding in the model, whose buckets may change."""
    model, ids = make(name), tokens(3, 21)
    masked = jax.jit(masked_logits)
    for value in (0.0, 1.5):
        route = Threshold(model.thresholds(value))
        before, _ = run(model, ids, route)
        want, decisions = reference(name, value)
        np.testing.assert_allclose(before, want, atol=5e-4)  # a wrong decision changes more
        for t in (0, 7, 19):
            changed = ids.at[:, t + 1 :].set((ids[:, t + 1 :] + 1 + t) % TINY.vocab_size)
            after, _ = run(model, changed, route)
            np.testing.assert_allclose(after[:, : t + 1], before[:, : t + 1], rtol=2e-4, atol=2e-5)
            assert not np.allclose(after[:, t + 1 :], before[:, t + 1 :], atol=1e-3)
            later, later_decisions = masked(model, changed, value)
            assert np.array_equal(later[:, : t + 1], want[:, : t + 1])
            if len(decisions):
                assert np.array_equal(later_decisions[..., : t + 1], decisions[..., : t + 1])
    assert not len(decisions) or 0 < decisions.mean() < 1


def test_top_k_lets_the_future_change_the_past():
    """Why a top-k loss is no result: this is the leak that thresholds close."""
    model, ids = make("xmod"), tokens(3, 21)
    before, _ = run(model, ids, TopK())
    after, _ = run(model, ids.at[:, 11:].set((ids[:, 11:] + 5) % TINY.vocab_size), TopK())
    assert not np.allclose(after[:, :11], before[:, :11], atol=1e-3)


@pytest.mark.parametrize("name", ["mod", "xmod", "moe", "routed ffn", "selected q, full kv"])
def test_a_sequence_evaluates_alike_in_any_batch(name):
    model, ids = make(name), tokens(3, 21)
    route = Threshold(model.thresholds())
    together, _ = run(model, ids, route)
    for b in range(3):
        alone, _ = run(model, ids[b : b + 1], route)
        np.testing.assert_allclose(alone[0], together[b], rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "xmod", "moe", "routed ffn", "selected q, full kv"])
def test_padding_at_the_end_changes_no_real_token_and_enters_no_statistic(name):
    model, ids = make(name), tokens(3, 21)
    valid_BL = jnp.broadcast_to(jnp.arange(21) < 15, (3, 21))
    route = Threshold(model.thresholds())
    plain, _ = run(model, ids, route)
    padded, outputs = run(model, ids.at[:, 15:].set(0), route, valid_BL)
    np.testing.assert_allclose(padded[:, :15], plain[:, :15], rtol=2e-4, atol=2e-5)
    if name == "moe":
        np.testing.assert_allclose(jnp.sum(outputs[0].load_X, axis=-1), 1.0, rtol=1e-5)
    elif outputs:
        _, decisions = reference(name, 0.0)
        routed = jnp.concatenate([out.routed_S.ravel() for out in outputs])
        np.testing.assert_allclose(routed, decisions[..., :15].mean((1, 2)), rtol=1e-5)
        updates = sum(
            int(jnp.sum(out.updates * jnp.arange(out.updates.shape[-1]))) for out in outputs
        )
        assert updates == decisions[..., :15].sum()


@pytest.mark.parametrize("name", ["dense", "xmod", "moe", "selected q, full kv"])
@pytest.mark.parametrize("L", [1, 3])
def test_contexts_shorter_than_k_are_defined(name, L):
    model, ids = make(name), tokens(2, L)
    for route in (TopK(), Threshold(model.thresholds())):
        logits, _ = run(model, ids, route)
        assert logits.shape == (2, L, TINY.vocab_size)
        assert bool(jnp.all(jnp.isfinite(logits)))


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_the_parameter_tree_has_the_size_that_accounting_says(name):
    config = ARCHITECTURES[name]
    tree = jax.eval_shape(lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0))
    trained = jax.tree.leaves(nnx.state(tree, nnx.Param))
    assert sum(leaf.size for leaf in trained) == accounting.exact_parameters(config)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(tree))


def test_bfloat16_computes_in_bfloat16_with_float32_parameters_near_float32():
    model = make("xmod")
    config = dataclasses.replace(ARCHITECTURES["xmod"], compute=Compute.BFLOAT16)
    model_bf16 = Decoder(config, rngs=nnx.Rngs(0))
    states, _ = model_bf16(tokens(2, 8), TopK())
    assert states.dtype == jnp.bfloat16
    assert model.embedding[...].dtype == jnp.float32
