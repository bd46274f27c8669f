"""The Qwen3-style layer (SPEC 2) as plain NNX pytrees, and the sparse layer around it (SPEC 3).

Modules hold parameters in float32 and never change in `__call__`; matrices are cast to the dtype of
the activations. Stacked modules (layers on axis 0) are made with `jax.vmap` over their constructor
and taken apart by `jax.lax.scan`. On a mesh a layer's matrices are gathered where the layer begins,
in the forward pass and in the backward pass again (`nn/collectives.py`).

Shapes: B batch, L rows (tokens of a context, or the routed ones), D width, H query heads, G
key/value heads, E head dim, F FFN width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from xmod_jax.accounting import FFN_ROWS
from xmod_jax.config import Backbone, Routing, Sparse, Update
from xmod_jax.nn import collectives
from xmod_jax.nn.attention import Saved, causal_attention, selected_attention
from xmod_jax.nn.precision import broadcast_as, widened

INIT_STD = 0.02  # of every matrix, as Qwen3's initializer_range
# ``(x_BLI, w_IO) -> x w``: `linear`, or `Products`.
Product = Callable[[jax.Array, jax.Array], jax.Array]


class Phases(NamedTuple):
    """Where tokens stand; travels with gathered rows.

    Attributes:
      cos_BLe: rotary phases, float32 [B, L, E/2].
      sin_BLe: likewise.
      position_BL: int32 positions.
    """

    cos_BLe: jax.Array
    sin_BLe: jax.Array
    position_BL: jax.Array


def rotary_phases(positions_BL: jax.Array, head_dim: int, base: float) -> Phases:
    """Phases of RoPE at integer positions [B, L] (SPEC 2: base 1e6, original positions)."""
    wavelength_e = base ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_BLe = positions_BL[..., None].astype(jnp.float32) * wavelength_e
    return Phases(jnp.cos(angle_BLe), jnp.sin(angle_BLe), positions_BL)


def rotate(x_BLHE: jax.Array, phases: Phases) -> jax.Array:
    """Applies RoPE, pairing element e with e + E/2 as Qwen3 does."""
    first, second = jnp.split(x_BLHE, 2, axis=-1)
    cos = phases.cos_BLe[..., None, :].astype(x_BLHE.dtype)
    sin = phases.sin_BLe[..., None, :].astype(x_BLHE.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@jax.custom_vjp
def linear(x_BLI: jax.Array, w_IO: jax.Array) -> jax.Array:
    """x w, with the matrix in the dtype of x."""
    return x_BLI @ w_IO.astype(x_BLI.dtype)


def _linear_backward(saved, bar_BLO):
    # Autodiff would form the matrix's gradient transposed, with a transposed copy of `bar`.
    x_BLI, w_IO = saved
    dx_BLI = jnp.einsum("blo,io->bli", bar_BLO, w_IO.astype(bar_BLO.dtype))
    rows = bar_BLO.shape[0] * bar_BLO.shape[1]
    dw_IO = jax.lax.dot_general(
        x_BLI.reshape(rows, -1),
        bar_BLO.reshape(rows, -1),
        (((0,), (0,)), ((), ())),
        preferred_element_type=w_IO.dtype,
    )
    return dx_BLI, dw_IO


linear.defvjp(lambda x_BLI, w_IO: (linear(x_BLI, w_IO), (x_BLI, w_IO)), _linear_backward)


@jax.custom_vjp
def _known(x_BLI: jax.Array, w_IO: jax.Array, y_BLO: jax.Array) -> jax.Array:
    """`linear` where its result is known already; gradients as if it had been computed."""
    return y_BLO


_known.defvjp(
    lambda x_BLI, w_IO, y_BLO: (y_BLO, (x_BLI, w_IO)),
    lambda saved, bar_BLO: (*_linear_backward(saved, bar_BLO), None),
)


class Products:
    """`linear` that notes its results, or gives back what it noted in the forward pass.

    Lives while a layer is traced: one notes, another one takes the notes in the same order.
    """

    def __init__(self, known: Sequence[jax.Array] = ()):
        self._known = list(known)
        self.made: list[jax.Array] = []

    def __call__(self, x_BLI: jax.Array, w_IO: jax.Array) -> jax.Array:
        known = self._known
        y_BLO = _known(x_BLI, w_IO, known.pop(0)) if known else linear(x_BLI, w_IO)
        self.made.append(y_BLO)
        return y_BLO


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in at least float32."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = widened(x)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * inverse).astype(x.dtype) * broadcast_as(self.scale[...], x)


def matrix(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    return nnx.Param(INIT_STD * jax.random.normal(rngs.params(), shape, jnp.float32))


class Attention(nnx.Module):
    """Grouped-query causal attention with RMSNorm on each head's queries and keys."""

    def __init__(self, config: Backbone, *, rngs: nnx.Rngs):
        D, E = config.d_model, config.head_dim
        self.query = matrix(rngs, D, config.num_heads * E)
        self.key = matrix(rngs, D, config.num_kv_heads * E)
        self.value = matrix(rngs, D, config.num_kv_heads * E)
        self.output = matrix(rngs, config.num_heads * E, D)
        self.query_norm = RMSNorm(E, config.norm_eps)
        self.key_norm = RMSNorm(E, config.norm_eps)
        self.head_dim = E

    def __call__(
        self, x_BLD: jax.Array, phases: Phases, saved: Saved = None, product: Product = linear
    ) -> tuple[jax.Array, Saved]:
        """Attends among the given rows, which stand in position order.

        `saved` and the second result are those of `causal_attention`.
        """
        attend = functools.partial(causal_attention, saved=saved)
        return self.through(attend, x_BLD, phases, product)

    def through(
        self,
        attend: Callable[..., tuple[jax.Array, Any]],
        x_BLD: jax.Array,
        phases: Phases,
        product: Product = linear,
    ) -> tuple[jax.Array, Any]:
        """Attention by ``attend(q_BLHE, k_BLGE, v_BLGE) -> (out_BLHE, anything)``.

        What `attend` returns beside its output (a cache, say) is the second result.
        """
        x_BLD = collectives.enter_tensor(x_BLD)
        q_BLHE = self._queries(x_BLD, phases, product)
        out_BLHE, beside = attend(q_BLHE, *self.keys_values(x_BLD, phases, product))
        return self._out(out_BLHE, product), beside

    def keys_values(
        self, x_BLD: jax.Array, phases: Phases, product: Product = linear
    ) -> tuple[jax.Array, jax.Array]:
        """Keys, rotated to their positions, and values of the rows, each [B, L, G, E]."""
        k_BLGE = self.key_norm(self._heads(x_BLD, self.key, product))
        return rotate(k_BLGE, phases), self._heads(x_BLD, self.value, product)

    def selected(
        self, rows_BCD: jax.Array, row_phases: Phases, x_BLD: jax.Array, phases: Phases
    ) -> jax.Array:
        """The given rows attend to every token of the stream up to their own position."""
        rows_BCD, x_BLD = collectives.enter_tensor((rows_BCD, x_BLD))
        q_BCHE = self._queries(rows_BCD, row_phases, linear)
        k_BLGE, v_BLGE = self.keys_values(x_BLD, phases)
        out_BCHE = selected_attention(q_BCHE, k_BLGE, v_BLGE, row_phases.position_BL)
        return self._out(out_BCHE, linear)

    def _heads(self, x_BLD: jax.Array, weight: nnx.Param, product: Product) -> jax.Array:
        return product(x_BLD, weight[...]).reshape(*x_BLD.shape[:2], -1, self.head_dim)

    def _queries(self, x_BLD: jax.Array, phases: Phases, product: Product) -> jax.Array:
        return rotate(self.query_norm(self._heads(x_BLD, self.query, product)), phases)

    def _out(self, x_BLHE: jax.Array, product: Product) -> jax.Array:
        out_BLD = product(x_BLHE.reshape(*x_BLHE.shape[:2], -1), self.output[...])
        return collectives.leave_tensor(out_BLD)


class SwiGLU(nnx.Module):
    """Gated FFN: ``(silu(x W_gate) * (x W_up)) W_down``."""

    def __init__(self, d_model: int, d_ff: int, *, rngs: nnx.Rngs):
        self.gate = matrix(rngs, d_model, d_ff)
        self.up = matrix(rngs, d_model, d_ff)
        self.down = matrix(rngs, d_ff, d_model)

    def __call__(self, x_BLD: jax.Array, product: Product = linear) -> jax.Array:
        x_BLD = collectives.enter_tensor(x_BLD)
        gate_BLF = jax.nn.silu(product(x_BLD, self.gate[...]))
        hidden_BLF = gate_BLF * product(x_BLD, self.up[...])
        return collectives.leave_tensor(product(hidden_BLF, self.down[...]))


def by_rows(function: Callable[[jax.Array], jax.Array], x_BLD: jax.Array, rows: int) -> jax.Array:
    """``function(x_BLD)``, of which each row of the result depends on that row alone.

    Long sequences go through in parts of at most `rows`, backward too, where a part's values are
    computed again: an FFN's [L, F] arrays are never whole.
    """
    B, L, D = x_BLD.shape
    parts = -(-L // rows)
    if parts == 1:
        return function(x_BLD)
    length = -(-L // parts)
    whole_BLD = jnp.pad(x_BLD, ((0, 0), (0, parts * length - L), (0, 0)))
    parts_nBLD = whole_BLD.reshape(B, parts, length, D).swapaxes(0, 1)
    out_nBLD = jax.lax.map(jax.checkpoint(function, prevent_cse=False), parts_nBLD)
    return out_nBLD.swapaxes(0, 1).reshape(B, parts * length, D)[:, :L]


class DecoderBlock(nnx.Module):
    """Pre-norm attention and FFN; gives the two residuals instead of adding them."""

    def __init__(self, config: Backbone, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config.d_model, config.d_ff, rngs=rngs)

    def __call__(
        self, x_BLD: jax.Array, phases: Phases, saved: Saved = None, product: Product = linear
    ) -> tuple[jax.Array, jax.Array, Saved]:
        """Returns a = Attention(norm(x)) and f = FFN(norm(x + a)), both [B, L, D].

        `saved` and the third result are those of `causal_attention`.
        """
        a_BLD, saved = self.attention(self.attention_norm(x_BLD), phases, saved, product)
        # An FFN in parts is computed again in its backward pass: there is nothing to note.
        inner = product if x_BLD.shape[1] <= FFN_ROWS else linear
        ffn = lambda x_BLD: self.ffn(self.ffn_norm(x_BLD), inner)
        return a_BLD, by_rows(ffn, x_BLD + a_BLD, FFN_ROWS), saved


class Kept(NamedTuple):
    """What a layer's backward pass need not compute again.

    Attributes:
      attention: see `causal_attention`.
      products: results of matrix products in the order in which they are formed; none unless they
        are asked for: they take 9 arrays like the stream where that and the attention take 2.
    """

    attention: Saved = None
    products: tuple[jax.Array, ...] = ()


NOTHING = Kept()
# Products of a layer's that its gradient needs, where nothing but a sum follows the last one.
NEEDED = 6


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dense_layer(
    block: DecoderBlock, x_BLD: jax.Array, phases: Phases, keep: bool = False
) -> jax.Array:
    """x + a + f, a dense layer. Its backward pass needs x and the attention output only.

    The rest is recomputed: products linear in L are cheap beside what they would hold in memory,
    attention is not. With `keep` the products are kept too.
    """
    return dense_forward(block, x_BLD, phases)[0]


def dense_forward(
    block: DecoderBlock,
    x_BLD: jax.Array,
    phases: Phases,
    kept: Kept = NOTHING,
    keep: bool = False,
) -> tuple[jax.Array, Kept]:
    """`dense_layer`, and what `dense_backward` needs beside the arguments."""
    block = collectives.gathered(block, x_BLD.dtype)
    product = Products(kept.products)
    a_BLD, f_BLD, saved = block(x_BLD, phases, kept.attention, product)
    return x_BLD + a_BLD + f_BLD, Kept(saved, tuple(product.made[:NEEDED]) if keep else ())


def dense_backward(
    block: DecoderBlock, x_BLD: jax.Array, phases: Phases, kept: Kept, bar_BLD: jax.Array
) -> tuple[DecoderBlock, jax.Array]:
    """Gradients of `dense_layer` to the block and to x; the phases are constants."""
    return _backward(dense_forward, block, x_BLD, phases, kept, bar_BLD)


def _backward(forward, params, x_BLD, phases, kept, bar_BLD):
    """Gradients of a layer, through its forward pass with what that kept."""
    layer = lambda params, x_BLD: forward(params, x_BLD, phases, kept)[0]
    return jax.vjp(layer, params, x_BLD)[1](bar_BLD)


def _dense_layer_forward(block, x_BLD, phases, keep):
    y_BLD, kept = dense_forward(block, x_BLD, phases, keep=keep)
    return y_BLD, (block, x_BLD, phases, kept)


def _dense_layer_backward(_, residuals, bar_BLD):
    block, x_BLD, phases, kept = residuals
    return *dense_backward(block, x_BLD, phases, kept, bar_BLD), None


dense_layer.defvjp(_dense_layer_forward, _dense_layer_backward)


class AttentionLayer(nnx.Module):
    """Pre-norm attention alone, ``x + Attention(norm(x))``: what leads routed FFNs (SPEC 4)."""

    def __init__(self, config: Backbone, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)


def attention_forward(
    layer: AttentionLayer,
    x_BLD: jax.Array,
    phases: Phases,
    kept: Kept = NOTHING,
    keep: bool = False,
) -> tuple[jax.Array, Kept]:
    """The layer, and what `attention_backward` needs beside the arguments."""
    layer = collectives.gathered(layer, x_BLD.dtype)
    product = Products(kept.products)
    normed_BLD = layer.attention_norm(x_BLD)
    a_BLD, saved = layer.attention(normed_BLD, phases, kept.attention, product)
    # No gradient needs the last product's result, to which the stream is added.
    return x_BLD + a_BLD, Kept(saved, tuple(product.made[:-1]) if keep else ())


def attention_backward(
    layer: AttentionLayer, x_BLD: jax.Array, phases: Phases, kept: Kept, bar_BLD: jax.Array
) -> tuple[AttentionLayer, jax.Array]:
    """Gradients of `attention_forward` to the layer and to x."""
    return _backward(attention_forward, layer, x_BLD, phases, kept, bar_BLD)


class FFNBlock(nnx.Module):
    """Pre-norm FFN alone; gives the residual."""

    def __init__(self, config: Backbone, *, rngs: nnx.Rngs):
        self.ffn_norm = RMSNorm(config.d_model, config.norm_eps)
        self.ffn = SwiGLU(config.d_model, config.d_ff, rngs=rngs)

    def __call__(self, x_BLD: jax.Array, product: Product = linear) -> jax.Array:
        return self.ffn(self.ffn_norm(x_BLD), product)


class SparseLayer(nnx.Module):
    """A block, its router vector and, for the X-MoD update, its gate scale (SPEC 3, 4)."""

    def __init__(self, config: Backbone, routing: Routing, *, rngs: nnx.Rngs):
        block = FFNBlock if routing.sparse is Sparse.FFN else DecoderBlock
        self.block = block(config, rngs=rngs)
        std = routing.router_init_std
        shape = (config.d_model,)
        self.router = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))
        if routing.update is Update.XMOD:
            self.gate = nnx.Param(jnp.asarray(routing.gate_init, jnp.float32))
        self.update = routing.update


def sparse_update(
    layer: SparseLayer, rows_BCD: jax.Array, phases: Phases, score_BC: jax.Array, *stream: Any
) -> jax.Array:
    """New values of the routed rows under the layer's update rule (SPEC 3).

    Args:
      layer: the layer.
      rows_BCD: the routed rows in position order.
      phases: theirs.
      score_BC: float32 routing scores r.
      stream: Selected-Q/full-KV only: every token [B, L, D] and the phases of all.
    """
    return keeping_update(layer, rows_BCD, phases, score_BC, *stream)[0]


def keeping_update(
    layer: SparseLayer,
    rows_BCD: jax.Array,
    phases: Phases,
    score_BC: jax.Array,
    *stream: Any,
    kept: Kept = NOTHING,
) -> tuple[jax.Array, Kept]:
    """`sparse_update`, and what its backward pass need not compute again if it is given back.

    Selected-Q/full-KV keeps nothing: its keys and values are those of the whole stream.
    """
    block = collectives.gathered(layer.block, rows_BCD.dtype)
    product, saved = Products(kept.products), None
    if isinstance(block, FFNBlock):
        a_BCD, f_BCD = jnp.zeros_like(rows_BCD), block(rows_BCD, product)
    elif stream:
        a_BCD, f_BCD = _full_kv(block, rows_BCD, phases, *stream)
    else:
        a_BCD, f_BCD, saved = block(rows_BCD, phases, kept.attention, product)
    new_BCD = updated(layer, rows_BCD, a_BCD, f_BCD, score_BC)
    return new_BCD, Kept(saved, tuple(product.made))


def updated(
    layer: SparseLayer, rows_BCD: jax.Array, a_BCD: jax.Array, f_BCD: jax.Array, score_BC: jax.Array
) -> jax.Array:
    """New values of routed rows from the block's two residuals and the routing scores (SPEC 3)."""
    if layer.update is Update.MOD:
        return rows_BCD + a_BCD + broadcast_as(score_BC[..., None], rows_BCD) * f_BCD
    weight_BC = layer.gate[...] * score_BC
    return rows_BCD + broadcast_as(weight_BC[..., None], rows_BCD) * (a_BCD + f_BCD)


def _full_kv(block, rows_BCD, row_phases, x_BLD, phases):
    """The two residuals of the rows, whose queries read the keys and values of all tokens."""
    norm = block.attention_norm
    a_BCD = block.attention.selected(norm(rows_BCD), row_phases, norm(x_BLD), phases)
    return a_BCD, block.ffn(block.ffn_norm(rows_BCD + a_BCD))
