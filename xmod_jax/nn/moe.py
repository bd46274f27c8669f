"""Mixture of experts in place of a dense FFN (SPEC 4): dropless, fine-grained, shared experts.

Balanced twice: by an auxiliary loss on the router's scores, and by a bias that moves against an
expert's load and enters the selection only (Wang et al., auxiliary-loss-free load balancing).

Shapes: B batch, L context, T = B*L tokens, D width, X routed experts, k active experts of a token,
F expert width, N layers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xmod_jax.config import Backbone, MoE, Scores
from xmod_jax.nn import collectives
from xmod_jax.nn.grouped import Groups, block_rows, collect, grouped_matmul, sort_by_group, spread
from xmod_jax.nn.layers import (
    NEEDED,
    NOTHING,
    Attention,
    Kept,
    Phases,
    Product,
    Products,
    RMSNorm,
    SwiGLU,
    linear,
    matrix,
)
from xmod_jax.nn.precision import full_einsum, widened
from xmod_jax.nn.stacks import pick


class ExpertBias(nnx.Variable):
    """Selection bias of every expert: state that moves with the load, without a gradient."""


class ExpertOutput(NamedTuple):
    """What MoE layers return beside the stream; a leading axis of layers [N] where several.

    Attributes:
      balance: auxiliary load-balancing loss, differentiable; 1 when balanced.
      load_X: share of the valid tokens' copies that each routed expert got; no gradient.
    """

    balance: jax.Array
    load_X: jax.Array


class Choice(NamedTuple):
    """Which experts each token passes; saved for the backward pass.

    Attributes:
      expert_Tk: int32; X for tokens of padding.
      groups: where the copies stand.
    """

    expert_Tk: jax.Array
    groups: Groups


class Experts(nnx.Module):
    """Routed experts, a router over them, and the shared experts as one FFN of their joint width.

    A token's routed part is the sum of its chosen experts, weighted by their scores. Sigmoid scores
    are scaled to a mean of 1: with equal scores it is a dense FFN of the same active width.
    """

    def __init__(self, d_model: int, config: MoE, *, rngs: nnx.Rngs):
        X, F = config.experts, config.d_expert
        self.router = matrix(rngs, d_model, X)
        self.bias = ExpertBias(jnp.zeros(X, jnp.float32))
        self.gate = matrix(rngs, X, d_model, F)
        self.up = matrix(rngs, X, d_model, F)
        self.down = matrix(rngs, X, F, d_model)
        self.shared = SwiGLU(d_model, config.shared * F, rngs=rngs) if config.shared else None
        self.active, self.scores = config.active, config.scores

    def __call__(
        self,
        x_BLD: jax.Array,
        valid_BL: jax.Array | None,
        choice: Choice | None,
        product: Product = linear,
    ) -> tuple[jax.Array, ExpertOutput, Choice]:
        """Runs the experts on normalised states; `choice` gives what an earlier call chose.

        `product` forms the shared experts' products.
        """
        B, L, D = x_BLD.shape
        x_TD = x_BLD.reshape(B * L, D)
        valid_T = jnp.ones(B * L, bool) if valid_BL is None else valid_BL.reshape(-1)
        score_TX = self._scores(x_TD)
        X = score_TX.shape[1]
        block = block_rows(B * L * self.active, X)
        if choice is None:
            expert_Tk = jnp.where(valid_T[:, None], self._chosen(score_TX), X)
            choice = Choice(expert_Tk, sort_by_group(expert_Tk, X, block))
        groups = choice.groups
        weight_Tk = self._weights(score_TX, jnp.minimum(choice.expert_Tk, X - 1))
        # On a mesh with `tensor` every device has a part of each expert's columns.
        x_TD, weight_Tk = collectives.enter_tensor((x_TD, weight_Tk))
        rows_MD = spread(x_TD, groups)
        grouped = lambda rows, weight: grouped_matmul(rows, weight[...], groups.size_X, block)
        hidden_MF = jax.nn.silu(grouped(rows_MD, self.gate)) * grouped(rows_MD, self.up)
        out_TD = collect(grouped(hidden_MF, self.down), weight_Tk, groups)
        out_BLD = collectives.leave_tensor(out_TD).reshape(B, L, D)
        if self.shared is not None:
            out_BLD = out_BLD + self.shared(x_BLD, product)
        return out_BLD, _balance(score_TX, groups.size_X, valid_T, self.active), choice

    def of_few(self, stack: Experts, index: tuple[Any, ...], x_BLD: jax.Array) -> jax.Array:
        """The output for few tokens: one expert after the other, read where it lies in the stack.

        Args:
          stack: the experts of all layers, every leaf [N, ...].
          index: of this layer in it; of this module the router and the shared experts are read.
          x_BLD: normalised states; tokens of padding get what any token would.
        """
        x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
        score_TX = self._scores(x_TD)
        expert_Tk = self._chosen(score_TX)
        weight_Tk = self._weights(score_TX, expert_Tk).astype(x_BLD.dtype)

        def add(n, out_TD):
            t, j = n // self.active, n % self.active
            matrices = stack.gate[...], stack.up[...], stack.down[...]
            gate, up, down = pick(matrices, (*index, expert_Tk[t, j]))
            x_1D = jax.lax.dynamic_slice_in_dim(x_TD, t, 1)
            hidden_1F = jax.nn.silu(linear(x_1D[None], gate)) * linear(x_1D[None], up)
            old_1D = jax.lax.dynamic_slice_in_dim(out_TD, t, 1)
            new_1D = old_1D + weight_Tk[t, j] * linear(hidden_1F, down)[0]
            return jax.lax.dynamic_update_slice_in_dim(out_TD, new_1D, t, 0)

        out_TD = jax.lax.fori_loop(0, len(x_TD) * self.active, add, jnp.zeros_like(x_TD))
        out_BLD = out_TD.reshape(x_BLD.shape)
        return out_BLD if self.shared is None else out_BLD + self.shared(x_BLD)

    def _scores(self, x_TD: jax.Array) -> jax.Array:
        x_TD = widened(x_TD)
        squash = jax.nn.sigmoid if self.scores is Scores.SIGMOID else jax.nn.softmax
        return squash(full_einsum("td,dx->tx", x_TD, self.router[...].astype(x_TD.dtype)))

    def _chosen(self, score_TX: jax.Array) -> jax.Array:
        biased_TX = jax.lax.stop_gradient(score_TX) + self.bias[...]
        return jax.lax.top_k(biased_TX, self.active)[1]

    def _weights(self, score_TX: jax.Array, expert_Tk: jax.Array) -> jax.Array:
        chosen_Tk = jnp.take_along_axis(score_TX, expert_Tk, axis=1)
        if self.scores is Scores.SOFTMAX_ALL:
            return chosen_Tk
        total = self.active if self.scores is Scores.SIGMOID else 1
        return total * chosen_Tk / jnp.sum(chosen_Tk, axis=1, keepdims=True)


def _balance(score_TX, size_X, valid_T, active) -> ExpertOutput:
    """Expert's load times its mean share of the scores, summed over experts and scaled by X.

    The load is that of the whole batch, wherever its parts lie; the mean share is this part's, so
    that the mean over parts is the loss of the batch.
    """
    size_X, count = collectives.batch_sum((size_X, jnp.sum(valid_T)))
    count = jnp.maximum(count, 1)
    load_X = size_X / (count * active)
    share_TX = score_TX / jnp.sum(score_TX, axis=1, keepdims=True)
    sum_X = jnp.sum(jnp.where(valid_T[:, None], share_TX, 0), axis=0)
    mean_X = sum_X / count * collectives.batch_parts()
    return ExpertOutput(len(load_X) * jnp.sum(load_X * mean_X), load_X)


def move_bias(bias_NX: jax.Array, load_NX: jax.Array, rate: float) -> jax.Array:
    """Biases after a step: down for an expert above the mean load, up below, then recentred.

    Without recentring their mean drifts, and with it the meaning of every score.
    """
    moved_NX = bias_NX + rate * jnp.sign(jnp.mean(load_NX, -1, keepdims=True) - load_NX)
    return moved_NX - jnp.mean(moved_NX, axis=-1, keepdims=True)


class MoEBlock(nnx.Module):
    """A decoder layer whose FFN is `Experts`."""

    def __init__(self, backbone: Backbone, config: MoE, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(backbone.d_model, backbone.norm_eps)
        self.attention = Attention(backbone, rngs=rngs)
        self.ffn_norm = RMSNorm(backbone.d_model, backbone.norm_eps)
        self.ffn = Experts(backbone.d_model, config, rngs=rngs)


SavedLayer = tuple[Kept, Choice] | None


def moe_forward(
    block: MoEBlock,
    x_BLD: jax.Array,
    phases: Phases,
    valid_BL: jax.Array | None,
    saved: SavedLayer = None,
    keep: bool = False,
) -> tuple[jax.Array, ExpertOutput, SavedLayer]:
    """One layer: the new stream, its balance, and what the backward pass need not do again."""
    kept, choice = (NOTHING, None) if saved is None else saved
    product = Products(kept.products)
    block = collectives.gathered(block, x_BLD.dtype)
    normed_BLD = block.attention_norm(x_BLD)
    a_BLD, attended = block.attention(normed_BLD, phases, kept.attention, product)
    u_BLD = x_BLD + a_BLD
    f_BLD, output, choice = block.ffn(block.ffn_norm(u_BLD), valid_BL, choice, product)
    kept = Kept(attended, tuple(product.made[:NEEDED]) if keep else ())
    return u_BLD + f_BLD, output, (kept, choice)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def moe_layer(
    block: MoEBlock,
    x_BLD: jax.Array,
    phases: Phases,
    valid_BL: jax.Array | None,
    keep: bool = False,
) -> tuple[jax.Array, ExpertOutput]:
    """`moe_forward` for training: keeps x, the attention output and the choice of experts.

    With `keep` the products of attention and of the shared experts too.
    """
    return moe_forward(block, x_BLD, phases, valid_BL)[:2]


def _layer_forward(block, x_BLD, phases, valid_BL, keep):
    y_BLD, output, saved = moe_forward(block, x_BLD, phases, valid_BL, keep=keep)
    return (y_BLD, output), (block, x_BLD, phases, valid_BL, saved)


def _layer_backward(_, residuals: Any, bars: Any) -> Any:
    block, x_BLD, phases, valid_BL, saved = residuals
    bar_BLD, bar_output = bars
    layer = lambda block, x_BLD: _differentiable(
        *moe_forward(block, x_BLD, phases, valid_BL, saved)
    )
    dblock, dx_BLD = jax.vjp(layer, block, x_BLD)[1]((bar_BLD, bar_output.balance))
    return dblock, dx_BLD, None, None


def _differentiable(y_BLD, output, _):
    return y_BLD, output.balance


moe_layer.defvjp(_layer_forward, _layer_backward)
