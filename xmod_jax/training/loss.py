"""Cross-entropy in chunks: never a [B, L, V] float32 array.

Shapes: B batch, L context, D width, V vocabulary, T tokens of a chunk, n chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xmod_jax.nn.precision import full_einsum

CHUNK_ELEMENTS = 1 << 23  # logits of one chunk: 32 MiB in float32


def cross_entropy(
    states_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array, weight_BL: jax.Array
) -> jax.Array:
    """Sum over tokens of weight * negative log-likelihood, in nats; a float32 scalar.

    Args:
      states_BLD: normalised states.
      head_DV: output head, cast to the dtype of the states.
      targets_BL: int32 tokens to predict.
      weight_BL: weight of each token, 0 for padding.
    """
    x_nTD, target_nT, weight_nT = _chunks(head_DV, states_BLD, targets_BL, weight_BL)
    return _summed(x_nTD, head_DV, target_nT, weight_nT)


def token_losses(
    states_BLD: jax.Array, head_DV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood of every token in nats, and the likeliest token there (int32).

    Both [B, L]; the lowest id of equally likely ones. Arguments as in `cross_entropy`.
    """

    def chunk(item):
        logits_TV, _, loss_T = _chunk(item[0], head_DV, item[1])
        return loss_T, jnp.argmax(logits_TV, axis=-1).astype(jnp.int32)

    of_all = lax.map(chunk, _chunks(head_DV, states_BLD, targets_BL))
    back = lambda value_nT: value_nT.reshape(-1)[: targets_BL.size].reshape(targets_BL.shape)
    return back(of_all[0]), back(of_all[1])


def _chunks(head_DV: jax.Array, states_BLD: jax.Array, *of_tokens_BL: jax.Array):
    """States [n, T, D] and what belongs to each token [n, T], in chunks; zeros at the end."""
    D, V = head_DV.shape
    count = of_tokens_BL[0].size
    T = min(count, max(128, CHUNK_ELEMENTS // V))
    n = -(-count // T)
    pad = n * T - count
    x_nTD = jnp.pad(states_BLD.reshape(count, D), ((0, pad), (0, 0))).reshape(n, T, D)
    rest = (jnp.pad(value.reshape(count), (0, pad)).reshape(n, T) for value in of_tokens_BL)
    return x_nTD, *rest


def _chunk(x_TD, head_DV, target_T):
    """Logits, their log-normaliser and the negative log-likelihoods of one chunk."""
    wide = jnp.promote_types(jnp.float32, x_TD.dtype)
    logits_TV = jnp.matmul(x_TD, head_DV.astype(x_TD.dtype), preferred_element_type=wide)
    norm_T = jax.nn.logsumexp(logits_TV, axis=-1)
    hit_T = jnp.take_along_axis(logits_TV, target_T[:, None], axis=-1)[:, 0]
    return logits_TV, norm_T, norm_T - hit_T


def _weighted(loss_T, weight_T):
    """Sum of weight * loss, whose terms no accelerator may round."""
    return full_einsum("t,t->", loss_T, weight_T)


@jax.custom_vjp
def _summed(x_nTD, head_DV, target_nT, weight_nT):
    def chunk(total, item):
        x_TD, target_T, weight_T = item
        return total + _weighted(_chunk(x_TD, head_DV, target_T)[2], weight_T), None

    start = jnp.zeros((), jnp.promote_types(jnp.float32, x_nTD.dtype))
    return lax.scan(chunk, start, (x_nTD, target_nT, weight_nT))[0]


def _summed_forward(x_nTD, head_DV, target_nT, weight_nT):
    """Forms the gradients at once, while a chunk's logits are at hand: three products, not four."""
    wide = jnp.promote_types(jnp.float32, x_nTD.dtype)

    def chunk(carry, item):
        total, dhead_DV = carry
        x_TD, target_T, weight_T = item
        logits_TV, norm_T, loss_T = _chunk(x_TD, head_DV, target_T)
        hot_TV = jax.nn.one_hot(target_T, head_DV.shape[1], dtype=wide)
        dlogits_TV = (jnp.exp(logits_TV - norm_T[:, None]) - hot_TV) * weight_T[:, None]
        dlogits_TV = dlogits_TV.astype(x_TD.dtype)
        dhead_DV += jnp.matmul(x_TD.T, dlogits_TV, preferred_element_type=wide)
        dx_TD = dlogits_TV @ head_DV.T.astype(x_TD.dtype)
        return (total + _weighted(loss_T, weight_T), dhead_DV), dx_TD

    start = jnp.zeros((), wide), jnp.zeros(head_DV.shape, wide)
    (total, dhead_DV), dx_nTD = lax.scan(chunk, start, (x_nTD, target_nT, weight_nT))
    return total, (dx_nTD, dhead_DV.astype(head_DV.dtype))


def _summed_backward(saved, bar):
    dx_nTD, dhead_DV = saved
    # In the precision of `bar`, a number of tokens' inverse: rounded, it would scale all gradients.
    scaled = lambda gradient: (gradient * bar).astype(gradient.dtype)
    return scaled(dx_nTD), scaled(dhead_DV), None, None


_summed.defvjp(_summed_forward, _summed_backward)
