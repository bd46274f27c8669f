"""Untrained models whose predictions are far from even, so that likeliest tokens are no ties."""

from __future__ import annotations

import jax
from flax import nnx

from xmod_jax.config import ModelConfig
from xmod_jax.model import Decoder


def decoder(config: ModelConfig, head: float) -> Decoder:
    """Random weights with a larger embedding, and a head `head` times as large."""
    built = jax.jit(lambda key: Decoder(config, rngs=nnx.Rngs(key)))(jax.random.key(1))
    built.embedding[...] *= 50
    built.head[...] *= head
    return built
