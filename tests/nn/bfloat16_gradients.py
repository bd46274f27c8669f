"""Gradients in bfloat16 against float32 where a sum in bfloat16 is one; run by test_precision.py.

    python -m tests.nn.bfloat16_gradients

XLA gives sums of bfloat16 on CPU a float32 accumulator, which an H100 does not. Here they are
formed term by term in bfloat16, so they stand still after a few hundred terms of one sign. Tokens
are of few kinds and all predict the same one: what is summed over the rows is of one sign.

Prints a JSON object: for each architecture the distance of every leaf's gradient, relative to its
norm.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.interpreters import mlir

from tests.test_model import ARCHITECTURES
from xmod_jax.config import Compute, ModelConfig
from xmod_jax.model import Decoder, TopK
from xmod_jax.nn import attention
from xmod_jax.nn.moe import ExpertOutput
from xmod_jax.training.loss import cross_entropy

BATCH, LENGTH = 3, 768  # a layer of K = 4 routes 576 rows
_GAP = 0.5  # between the routing scores of two kinds of token: bfloat16 keeps their order


def term_by_term(x: jax.Array, *, axes: tuple[int, ...], **_: Any) -> jax.Array:
    """`lax.reduce_sum`, for bfloat16 with a bfloat16 accumulator."""
    if x.dtype != jnp.bfloat16:
        return lax.reduce(x, np.zeros((), x.dtype)[()], lambda a, b: a + b, axes)
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    terms = lax.transpose(x, (*axes, *rest)).reshape(-1, *(x.shape[axis] for axis in rest))
    zero = jnp.zeros(terms.shape[1:], x.dtype)
    return lax.scan(lambda total, term: (total + term, None), zero, terms)[0]


def filled(config: ModelConfig, kinds: int) -> Decoder:
    """A decoder whose routing is that of the kinds of token, since no layer writes channel 0."""
    model = Decoder(config, rngs=nnx.Rngs(0))

    def fill(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if name.endswith("sparse.router.value"):
            return jnp.zeros_like(leaf).at[..., 0].set(1)
        if "scale" in name or "sparse.gate" in name or leaf.ndim < 2:
            return leaf
        writes = "attention.output" in name or "down" in name
        return (8 * leaf).at[..., 0].set(0) if writes else 8 * leaf

    model = jax.tree_util.tree_map_with_path(fill, model)
    table = 50 / 8 * model.embedding[...]
    score = _GAP * (np.arange(kinds) - (kinds - 1) / 2)
    model.embedding[...] = table.at[:kinds, 0].set(score)
    return model


def gradients(config: ModelConfig, compute: Compute) -> Decoder:
    kinds = config.hierarchy.sparsity if config.hierarchy.groups else 4
    # A layer then takes all tokens of a kind, and the next layer those of the next.
    tau = _GAP * kinds if config.routing.bias_scale else 0.0
    routing = dataclasses.replace(config.routing, bias_scale=tau)
    model = filled(dataclasses.replace(config, compute=compute, routing=routing), kinds)
    random, each = np.random.default_rng(0), np.repeat(np.arange(kinds), LENGTH // kinds)
    drawn = [random.permutation(each) for _ in range(BATCH)]
    tokens_BL = jnp.asarray(np.stack(drawn), jnp.int32)
    targets_BL = jnp.full_like(tokens_BL, 9)

    def loss(model: Decoder) -> jax.Array:
        states_BLD, outputs = model(tokens_BL, TopK())
        ones_BL = jnp.ones(tokens_BL.shape)
        total = cross_entropy(states_BLD, model.whole_head(), targets_BL, ones_BL) / ones_BL.size
        for out in outputs:
            aside = out.balance if isinstance(out, ExpertOutput) else out.alignment_S
            total += 0.1 * jnp.mean(aside)
        return total

    return jax.jit(jax.grad(loss))(model)


def errors(config: ModelConfig) -> dict[str, float]:
    """Relative distance of every leaf; leaves without a gradient are left out."""
    narrow, wide = (gradients(config, each) for each in (Compute.BFLOAT16, Compute.FLOAT32))
    found = {}
    for (path, got), want in zip(
        jax.tree_util.tree_leaves_with_path(narrow), jax.tree.leaves(wide), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if not name.endswith("ffn.bias.value"):
            found[name] = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    return found


def main() -> None:
    lowering = mlir.lower_fun(term_by_term, multiple_results=False)
    mlir.register_lowering(lax.reduce_sum_p, lowering)
    attention._SELECTED_SCORES = 1 << 18  # several blocks of rows
    still = jax.jit(lambda x: lax.reduce_sum(x, (0,)))(jnp.ones(4096, jnp.bfloat16))
    assert still == 256, f"sums of bfloat16 have more than its bits: {still}"
    json.dump({name: errors(config) for name, config in ARCHITECTURES.items()}, sys.stdout)


if __name__ == "__main__":
    main()
