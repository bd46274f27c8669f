"""Memory and compile time of the training gradient, the claims of the README (slow)."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from xmod_jax.config import BYTE_VOCABULARY, Backbone, ModelConfig
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.model import Decoder
from xmod_jax.nn import routed_stage
from xmod_jax.training.compilation import jit
from xmod_jax.training.step import training_loss

pytestmark = pytest.mark.slow


def lowered(name: str, active_depth: int = 28, width: int = 256, length: int = 2048):
    backbone = Backbone(width, 64, width // 64, width // 128, 3 * width, BYTE_VOCABULARY)
    config = ModelConfig(backbone, Hierarchy.from_name(name, active_depth))
    model = jax.eval_shape(lambda key: Decoder(config, rngs=nnx.Rngs(key)), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, length + 1), jnp.int32)
    gradient = jit(jax.grad(lambda model, tokens: training_loss(model, tokens, 1e-4)[0]))
    return gradient.lower(model, tokens)


def temporary_bytes(name: str) -> int:
    return lowered(name).compile().memory_analysis().temp_size_in_bytes


def test_a3k16_needs_no_more_memory_than_1_35_times_its_dense_twin(monkeypatch):
    dense, lean = temporary_bytes("dense"), temporary_bytes("A3K16")
    forward = routed_stage._stages_forward
    monkeypatch.setattr(routed_stage, "_stages", lambda *arguments: forward(*arguments)[0])
    plain = temporary_bytes("A3K16")
    megabytes = {"dense": dense, "A3K16": lean, "A3K16 by plain autodiff": plain}
    print({case: round(count / 2**20, 1) for case, count in megabytes.items()})
    assert lean <= 1.35 * dense
    assert plain > 5 * lean


@pytest.fixture
def no_cache():
    """Every compilation is a real one."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.timed
def test_compile_time_does_not_grow_with_depth(no_cache):
    cases = {"deep": ("A1K16", 52), "shallow": ("A1K16", 12), "dense": ("dense", 28)}
    fastest = dict.fromkeys(cases, float("inf"))
    for _ in range(3):
        for case, (name, depth) in cases.items():
            ready = lowered(name, depth, width=128, length=512)
            start = time.perf_counter()
            ready.compile()
            fastest[case] = min(fastest[case], time.perf_counter() - start)
    assert Hierarchy.from_name("A1K16", 52).depth == 412
    assert Hierarchy.from_name("A1K16", 12).depth == 72
    print({case: round(seconds, 2) for case, seconds in fastest.items()})
    assert fastest["deep"] <= 1.2 * fastest["shallow"]
    assert fastest["deep"] <= 3.5 * fastest["dense"]
