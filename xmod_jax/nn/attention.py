"""Causal grouped-query attention without an L x L buffer.

On an accelerator with cuDNN the fused kernel is used; elsewhere a blockwise one in plain JAX that
skips the blocks above the diagonal, forward and backward (Dao et al., FlashAttention-2).

Shapes: B batch, L rows in position order, H query heads, G key/value heads, R = H/G query heads per
key/value head, E head dim, N = B*G, n blocks of b rows, M = R*b query rows of a block, C rows of a
selection.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from xmod_jax.accounting import ATTENTION_BLOCK, attention_edge
from xmod_jax.nn.precision import widened

# Output and log-sum-exp of every row, in blocks; see `causal_attention`.
Saved = tuple[jax.Array, jax.Array] | None
_SELECTED_SCORES = 1 << 24  # scores of `selected_attention` that are formed at once
_FEW = 2  # blocks that go without a loop
_MASKED = -1e30  # finite, so that a row's maximum never turns into inf - inf


def is_fused(dtype: DTypeLike) -> bool:
    """Whether `causal_attention` is cuDNN's kernel here, which has nothing to save."""
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return jax.default_backend() == "gpu" and half


def causal_attention(
    q_BLHE: jax.Array, k_BLGE: jax.Array, v_BLGE: jax.Array, saved: Saved = None
) -> tuple[jax.Array, Saved]:
    """Causal attention; row i sees rows 0..i.

    Args:
      q_BLHE: queries, rotary phases already applied.
      k_BLGE: keys; G divides H.
      v_BLGE: values.
      saved: what an earlier call with the same arguments returned: its result is then given back
        without computing it, for a backward pass that recomputes everything else of a layer.

    Returns:
      [B, L, H, E] in the dtype of the queries, softmax in float32 (float64 for float64 input), and
      what to save; None from the fused kernel, whose statistics stay inside.
    """
    if is_fused(q_BLHE.dtype):
        # The causal flag, never a materialised mask or bias: those gave NaN at some lengths.
        out_BLHE = jax.nn.dot_product_attention(
            q_BLHE, k_BLGE, v_BLGE, is_causal=True, implementation="cudnn"
        )
        return out_BLHE, None
    return blockwise_attention(q_BLHE, k_BLGE, v_BLGE, ATTENTION_BLOCK, saved)


def blockwise_attention(
    q_BLHE: jax.Array, k_BLGE: jax.Array, v_BLGE: jax.Array, block: int, saved: Saved = None
) -> tuple[jax.Array, Saved]:
    """`causal_attention` in plain JAX, at most `block` rows at a time; any length."""
    B, L, H, E = q_BLHE.shape
    G = k_BLGE.shape[2]
    b = attention_edge(L, block)
    n = -(-L // b)
    pad = ((0, 0), (0, n * b - L), (0, 0), (0, 0))
    # Padding comes last, so that causality hides it from every real row.
    q = jnp.pad(q_BLHE * jnp.asarray(E**-0.5, q_BLHE.dtype), pad).reshape(B, n, b, G, H // G, E)
    q_nNME = q.transpose(1, 0, 3, 4, 2, 5).reshape(n, B * G, H // G * b, E)
    k_nNbE, v_nNbE = (
        jnp.pad(a, pad).reshape(B, n, b, G, E).transpose(1, 0, 3, 2, 4).reshape(n, B * G, b, E)
        for a in (k_BLGE, v_BLGE)
    )
    if saved is None:
        saved = _attend(q_nNME, k_nNbE, v_nNbE)
        o_nNME = saved[0]
    else:
        o_nNME = _attended(q_nNME, k_nNbE, v_nNbE, *saved)
    o = o_nNME.reshape(n, B, G, H // G, b, E).transpose(1, 0, 4, 2, 3, 5)
    return o.reshape(B, n * b, H, E)[:, :L], saved


def selected_attention(
    q_BCHE: jax.Array, k_BLGE: jax.Array, v_BLGE: jax.Array, position_BC: jax.Array
) -> jax.Array:
    """Attention of some rows to all keys at or before their position (Selected-Q/full-KV).

    Args:
      q_BCHE: queries of the rows, rotary phases already applied.
      k_BLGE: keys of every position; G divides H.
      v_BLGE: values of every position.
      position_BC: int32 positions of the rows.

    Returns:
      [B, C, H, E] in the dtype of the queries, softmax in float32. A few rows go at a time, and
      their scores are formed again in the backward pass.
    """
    B, C, H, E = q_BCHE.shape
    L, G = k_BLGE.shape[1:3]
    b = max(8, min(C, _SELECTED_SCORES // (B * H * L)))
    n = -(-C // b)
    pad = ((0, 0), (0, n * b - C))
    q = jnp.pad(q_BCHE * jnp.asarray(E**-0.5, q_BCHE.dtype), (*pad, (0, 0), (0, 0)))
    q_nBbGRE = q.reshape(B, n, b, G, H // G, E).swapaxes(0, 1)
    position_nBb = jnp.pad(position_BC, pad).reshape(B, n, b).swapaxes(0, 1)
    # Wide outside of the loop, so that its turns' gradients are summed there.
    wide = widened(k_BLGE), widened(v_BLGE)

    @jax.checkpoint
    def rows(item):
        q_BbGRE, position_Bb = item
        k_BLGE, v_BLGE = (each.astype(q_BCHE.dtype) for each in wide)
        s_BGRbL = _product("bcgre,blge->bgrcl", q_BbGRE, k_BLGE)
        visible_BbL = jnp.arange(L) <= position_Bb[..., None]
        p_BGRbL = jax.nn.softmax(jnp.where(visible_BbL[:, None, None], s_BGRbL, _MASKED), axis=-1)
        o_BbGRE = _product("bgrcl,blge->bcgre", p_BGRbL.astype(v_BLGE.dtype), v_BLGE)
        return o_BbGRE.astype(q_BCHE.dtype)

    o_nBbGRE = lax.map(rows, (q_nBbGRE, position_nBb))
    return o_nBbGRE.swapaxes(0, 1).reshape(B, n * b, H, E)[:, :C]


@jax.custom_vjp
def _attend(q_nNME, k_nNbE, v_nNbE):
    """The output and each row's log-sum-exp, the latter without gradient."""
    return _attend_forward(q_nNME, k_nNbE, v_nNbE)[0]


@jax.custom_vjp
def _attended(q_nNME, k_nNbE, v_nNbE, o_nNME, lse_nNM):
    """`_attend`'s output where it is known already; gradients as if it had been computed."""
    return o_nNME


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched product with the accumulator (at least float32) as its result."""
    out = jnp.promote_types(jnp.float32, a.dtype)
    return jnp.einsum(equation, a, b, preferred_element_type=out)


def _visible(shape: tuple[int, int], keys: int, b: int) -> jax.Array:
    """Mask of a diagonal block whose axis `keys` are keys; row r*b + i sees keys 0..i.

    Made in the layout in which it is used: a transposed one is read element by element.
    """
    place = lambda axis: lax.broadcasted_iota(jnp.int32, shape, axis)
    return place(keys) <= place(1 - keys) % b


def _attend_forward(q_nNME, k_nNbE, v_nNbE):
    M, b = q_nNME.shape[2], k_nNbE.shape[2]
    visible_Mb = _visible((M, b), 1, b)

    def values(s_NMb, top_NM, j):
        p_NMb = jnp.exp(s_NMb - top_NM[..., None])
        return p_NMb.sum(-1), _product("nmb,nbe->nme", p_NMb.astype(v_nNbE.dtype), v_nNbE[j])

    def diagonal(q_NME, i):
        s_NMb = jnp.where(visible_Mb, _product("nme,nbe->nmb", q_NME, k_nNbE[i]), _MASKED)
        top_NM = s_NMb.max(-1)  # every row sees its own key, so it is real
        return top_NM, *values(s_NMb, top_NM, i)

    def block(q_NME, j, carry):
        top_NM, sum_NM, acc_NME = carry
        s_NMb = _product("nme,nbe->nmb", q_NME, k_nNbE[j])
        new_NM = jnp.maximum(top_NM, s_NMb.max(-1))
        shrink_NM = jnp.exp(top_NM - new_NM)
        p_NM, pv_NME = values(s_NMb, new_NM, j)
        return new_NM, sum_NM * shrink_NM + p_NM, acc_NME * shrink_NM[..., None] + pv_NME

    def rows(_, item):
        i, q_NME = item
        carry = diagonal(q_NME, i)
        top_NM, sum_NM, acc_NME = _loop(0, i, functools.partial(block, q_NME), carry)
        o_NME = (acc_NME / sum_NM[..., None]).astype(q_NME.dtype)
        return None, (o_NME, top_NM + jnp.log(sum_NM))

    _, (o_nNME, lse_nNM) = _scan(rows, None, q_nNME)
    return (o_nNME, lse_nNM), (q_nNME, k_nNbE, v_nNbE, o_nNME, lse_nNM)


def _attend_backward(residuals, do_nNME):
    q_nNME, k_nNbE, v_nNbE, o_nNME, lse_nNM = residuals
    n, N, b, E = k_nNbE.shape
    M = q_nNME.shape[2]
    delta_nNM = (widened(o_nNME) * widened(do_nNME)).sum(-1)
    kT_nNEb = k_nNbE.swapaxes(-1, -2)
    visible_bM = _visible((b, M), 0, b)

    def block(i, keys, visible_bM=None):
        # Scores, and the gradient of q, transposed: no product then has a transposed left side,
        # which XLA multiplies at a third of the rate on CPU.
        k_NbE, v_NbE, kT_NEb = keys
        s_NbM = _product("nbe,nme->nbm", k_NbE, q_nNME[i])
        dp_NbM = _product("nbe,nme->nbm", v_NbE, do_nNME[i])
        if visible_bM is not None:
            s_NbM = jnp.where(visible_bM, s_NbM, _MASKED)
            # Changes nothing, p is 0 there; keeps XLA from forming ds inside the product, slowly.
            dp_NbM = jnp.where(visible_bM, dp_NbM, 0)
        p_NbM = jnp.exp(s_NbM - lse_nNM[i][:, None])
        ds_NbM = (p_NbM * (dp_NbM - delta_nNM[i][:, None])).astype(k_NbE.dtype)
        return (
            _product("neb,nbm->nem", kT_NEb, ds_NbM),
            _product("nbm,nme->nbe", ds_NbM, q_nNME[i]),
            _product("nbm,nme->nbe", p_NbM.astype(v_NbE.dtype), do_nNME[i]),
        )

    def columns(dqT_nNEM, item):
        j, keys = item

        def later(i, carry):
            dqT_nNEM, *dkv_NbE = carry
            dqT_NEM, *more_NbE = block(i, keys)
            dqT_nNEM = _added(dqT_nNEM, dqT_NEM, i)
            return dqT_nNEM, *(old + new for old, new in zip(dkv_NbE, more_NbE, strict=True))

        dqT_NEM, *dkv_NbE = block(j, keys, visible_bM)
        carry = _added(dqT_nNEM, dqT_NEM, j), *dkv_NbE
        dqT_nNEM, *dkv_NbE = _loop(j + 1, n, later, carry)
        return dqT_nNEM, tuple(part.astype(k_nNbE.dtype) for part in dkv_NbE)

    start = jnp.zeros((n, N, E, M), delta_nNM.dtype)
    dqT_nNEM, (dk_nNbE, dv_nNbE) = _scan(columns, start, (k_nNbE, v_nNbE, kT_nNEb))
    return dqT_nNEM.swapaxes(-1, -2).astype(q_nNME.dtype), dk_nNbE, dv_nNbE


def _scan(body: Callable[..., Any], carry: Any, stacks: Any) -> tuple[Any, Any]:
    """`lax.scan` over ``(index, item)`` of stacks; a few items go without a loop.

    A loop's turn costs a fifth of a block's time on CPU.
    """
    n = jax.tree.leaves(stacks)[0].shape[0]
    if n > _FEW:
        return lax.scan(body, carry, (jnp.arange(n), stacks))
    outs = []
    for i in range(n):
        item = jax.tree.map(operator.itemgetter(i), stacks)
        carry, out = body(carry, (i, item))
        outs.append(out)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)


def _loop(first: Any, last: Any, body: Callable[..., Any], carry: Any) -> Any:
    """`lax.fori_loop`; none where `_scan` makes none and both bounds are plain numbers."""
    if not (isinstance(first, int) and isinstance(last, int)):
        return lax.fori_loop(first, last, body, carry)
    for i in range(first, last):
        carry = body(i, carry)
    return carry


def _added(stack: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    """The stack with a value added to one of its items, in place where it can be."""
    return lax.dynamic_update_index_in_dim(stack, stack[index] + value, index, 0)


_attend.defvjp(_attend_forward, lambda residuals, bars: _attend_backward(residuals, bars[0]))
_attended.defvjp(
    lambda *arguments: (arguments[3], arguments),
    lambda residuals, bar: (*_attend_backward(residuals, bar), None, None),
)
