"""Which leaf gets which optimiser, what a Muon update is, and the schedule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.devices import run_module
from tests.training import small
from xmod_jax.config import ModelConfig, MoE, OptimizerConfig, Routing, Sparse
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.model import Decoder
from xmod_jax.training import optimizer
from xmod_jax.training.optimizer import labels, learning_rate, make_optimizer

MATRICES = {
    f"{part}.{name}"
    for part, names in {
        "attention": ("query", "key", "value", "output"),
        "ffn": ("gate", "up", "down"),
    }.items()
    for name in names
}


def named(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def well_conditioned(leaf):
    """A random gradient; matrices with singular values 0.5 to 1, which Newton-Schulz evens out."""
    random = np.random.default_rng(leaf.size).standard_normal(leaf.shape)
    if leaf.ndim > 1:
        u, s, vt = np.linalg.svd(random, full_matrices=False)
        random = (u * np.linspace(0.5, 1, s.shape[-1])) @ vt
    return jnp.asarray(random, jnp.float32)


def model():
    return Decoder(small.run().model, rngs=nnx.Rngs(0))


def test_exactly_the_matrices_inside_layers_get_muon():
    got = {name for name, label in named(labels(model(), "muon")).items() if label == "muon"}
    stacks = (".prefix", ".groups[0].sparse.block", ".groups[0].anchor")
    assert got == {f"{stack}.{matrix}.value" for stack in stacks for matrix in MATRICES}
    rest = named(labels(model(), "muon")).keys() - got
    assert {".embedding.value", ".head.value", ".groups[0].sparse.router.value"} <= rest


def test_experts_get_muon_their_router_adamw_and_their_bias_nothing():
    config = ModelConfig(small.BACKBONE, Hierarchy.dense(2), moe=MoE(4, 2, 1, 8))
    got = named(labels(Decoder(config, rngs=nnx.Rngs(0)), "muon"))
    ffn = {name.removeprefix(".prefix.ffn"): label for name, label in got.items() if ".ffn" in name}
    muon = {
        f"{shared}.{name}.value" for shared in ("", ".shared") for name in ("gate", "up", "down")
    }
    assert {name for name, label in ffn.items() if label == "muon"} == muon
    assert ffn[".router.value"] == "adamw" and ffn[".bias.value"] == "none"


def test_leads_are_matrices_of_layers_too():
    hierarchy = Hierarchy.from_name("A1K4", 4, 2).routed_ffn()
    config = ModelConfig(small.BACKBONE, hierarchy, Routing(sparse=Sparse.FFN))
    got = named(labels(Decoder(config, rngs=nnx.Rngs(0)), "muon"))
    leads = {
        name.split(".")[-2]: label for name, label in got.items() if ".lead.attention." in name
    }
    matrices = ("query", "key", "value", "output")
    assert all(leads[name] == "muon" for name in matrices) and leads["scale"] == "adamw"


def test_every_layers_muon_update_is_orthogonal_with_rms_0_2_times_the_rate():
    config = OptimizerConfig(peak_lr=1e-2, weight_decay=0.0, warmup=0.0)
    tree = model()
    made = make_optimizer(config, 10)
    gradient = jax.tree.map(well_conditioned, tree)
    updates, _ = jax.jit(made.update)(gradient, made.init(tree), tree)
    label = named(labels(tree, "muon"))
    checked = 0
    for name, update in named(updates).items():
        if label[name] != "muon":
            continue
        for matrix in np.asarray(update).reshape(-1, *update.shape[-2:]):
            checked += 1
            rms = np.sqrt(np.mean(matrix**2)) / 1e-2
            # Five Newton-Schulz steps leave singular values in about 0.7..1.2 of one.
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.min() > 0.5 * singular.max(), name
            assert 0.2 * 0.65 < rms < 0.2 * 1.25, (name, rms)
    assert checked == 7 * (2 + 4 + 1)


@pytest.mark.parametrize(("layers", "at_once"), [(7, 3), (6, 3), (2, 3), (5, 1)])
def test_layers_in_turns_are_each_done_once(layers, at_once):
    stacks = jnp.arange(layers * 4.0).reshape(layers, 2, 2), jnp.ones((layers, 2, 2))
    function = lambda a_YMN, b_YMN: (2 * a_YMN + b_YMN, b_YMN + 1)
    got, want = optimizer._in_turns(function, stacks, at_once), function(*stacks)
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))


@pytest.mark.slow
def test_a_few_layers_at_a_time_on_any_mesh_get_the_update_of_all_at_once():
    assert run_module("tests.training.mesh_muon").stdout == "equal\n"


def test_adamw_matrices_leave_nothing_to_muon():
    assert set(jax.tree.leaves(labels(model(), "adamw"))) == {"adamw"}


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_first_adamw_update_has_the_size_of_the_rate_and_no_nesterov(matrices):
    config = OptimizerConfig(
        peak_lr=1e-2, weight_decay=0.0, warmup=0.0, clip=1e9, matrices=matrices
    )
    tree = model()
    made = make_optimizer(config, 10)
    gradient = jax.tree.map(jnp.ones_like, tree)
    updates, _ = jax.jit(made.update)(gradient, jax.jit(made.init)(tree), tree)
    of_adamw = labels(tree, matrices)
    for update, label in zip(jax.tree.leaves(updates), jax.tree.leaves(of_adamw), strict=True):
        if label == "adamw":
            np.testing.assert_allclose(update, -1e-2, rtol=1e-4)


def test_the_rate_warms_up_to_its_peak_and_ends_at_a_tenth():
    rate = learning_rate(OptimizerConfig(peak_lr=1.0, warmup=0.1, final=0.1), 100)
    values = np.array([rate(step) for step in range(100)])
    np.testing.assert_allclose(values[:10], np.arange(1, 11) / 10, rtol=1e-5)
    assert values.argmax() == 9
    assert np.all(np.diff(values[9:]) < 0)
    np.testing.assert_allclose(values[-1], 0.1, rtol=1e-5)


def test_a_run_of_one_step_trains_at_the_peak():
    assert float(learning_rate(OptimizerConfig(peak_lr=0.5), 1)(0)) == 0.5
