"""The decoder with every layer on every token and masks in place of gathers; threshold routing.

Slow and plain. Shapes never depend on a decision, so a change after position t cannot even reorder
the sums of a token at or before t: causality holds here to the bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xmod_jax.config import Sparse, Update
from xmod_jax.model import Decoder
from xmod_jax.nn.layers import rotary_phases, rotate


def attend(module, x_BLD, phases, keys_BL):
    """Every token attends to those tokens at or before it that `keys_BL` marks."""
    B, L, _ = x_BLD.shape
    heads = lambda weight: (x_BLD @ weight[...]).reshape(B, L, -1, module.head_dim)
    q_BLHE = rotate(module.query_norm(heads(module.query)), phases)
    k_BLGE = rotate(module.key_norm(heads(module.key)), phases)
    repeat = q_BLHE.shape[2] // k_BLGE.shape[2]
    k_BLHE, v_BLHE = (jnp.repeat(a, repeat, axis=2) for a in (k_BLGE, heads(module.value)))
    s_BHLM = jnp.einsum("blhe,bmhe->bhlm", q_BLHE, k_BLHE) * module.head_dim**-0.5
    see_BLM = jnp.tril(jnp.ones((L, L), bool)) & keys_BL[:, None]
    p_BHLM = jax.nn.softmax(jnp.where(see_BLM[:, None], s_BHLM, -1e30), axis=-1)
    o_BLHE = jnp.einsum("bhlm,bmhe->blhe", p_BHLM, v_BLHE)
    return o_BLHE.reshape(B, L, -1) @ module.output[...]


def experts(module, x_BLD):
    """Every expert on every token, weighted by 0 where it is not chosen."""
    score_BLX = jax.nn.sigmoid(x_BLD @ module.router[...])
    X = score_BLX.shape[-1]
    _, chosen_BLk = jax.lax.top_k(score_BLX + module.bias[...], module.active)
    hot_BLX = jnp.sum(jax.nn.one_hot(chosen_BLk, X), axis=-2)
    weight_BLX = hot_BLX * score_BLX
    weight_BLX *= module.active / jnp.sum(weight_BLX, axis=-1, keepdims=True)
    out_BLD = jnp.zeros_like(x_BLD) if module.shared is None else module.shared(x_BLD)
    for x in range(X):
        hidden = jax.nn.silu(x_BLD @ module.gate[...][x]) * (x_BLD @ module.up[...][x])
        out_BLD += weight_BLX[..., x, None] * (hidden @ module.down[...][x])
    return out_BLD


def dense(block, x_BLD, phases):
    """A dense layer, or one of experts."""
    all_BL = jnp.ones(x_BLD.shape[:2], bool)
    x_BLD = x_BLD + attend(block.attention, block.attention_norm(x_BLD), phases, all_BL)
    if not hasattr(block, "ffn"):
        return x_BLD
    h_BLD = block.ffn_norm(x_BLD)
    return x_BLD + (experts(block.ffn, h_BLD) if hasattr(block.ffn, "router") else block.ffn(h_BLD))


def sparse(layer, kind, x_BLD, phases, mask_BL, score_BL):
    """A sparse layer on every token; those of `mask_BL` take the result."""
    block = layer.block
    if kind is Sparse.FFN:
        a_BLD = jnp.zeros_like(x_BLD)
    else:
        keys_BL = jnp.ones_like(mask_BL) if kind is Sparse.FULL_KV else mask_BL
        a_BLD = attend(block.attention, block.attention_norm(x_BLD), phases, keys_BL)
    f_BLD = block.ffn(block.ffn_norm(x_BLD + a_BLD))
    r_BL1 = score_BL[..., None]
    if layer.update is Update.MOD:
        new_BLD = x_BLD + a_BLD + r_BL1 * f_BLD
    else:
        new_BLD = x_BLD + layer.gate[...] * r_BL1 * (a_BLD + f_BLD)
    return jnp.where(mask_BL[..., None], new_BLD, x_BLD)


def masked_logits(model: Decoder, tokens_BL: jax.Array, threshold: float):
    """Logits [B, L, V], and the routing decisions [layers, B, L]."""
    config, take = model.config, lambda tree, *i: jax.tree.map(lambda leaf: leaf[i], tree)
    positions_BL = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
    phases = rotary_phases(positions_BL, config.backbone.head_dim, config.backbone.rope_base)
    x_BLD = model.embedding[...][tokens_BL]
    for n in range(config.hierarchy.prefix):
        x_BLD = dense(take(model.prefix, n), x_BLD, phases)
    decisions = []
    for group, stages in zip(config.hierarchy.groups, model.groups, strict=True):
        length = group.sparse_layers // max(1, group.attentions)
        for n in range(group.count):
            for s in range(group.sparse_layers):
                if s % length == 0:
                    chosen_BL = jnp.zeros(tokens_BL.shape)
                    if group.attentions:
                        x_BLD = dense(take(stages.lead, n, s // length), x_BLD, phases)
                layer = take(stages.sparse, n, s)
                z_BL = x_BLD @ layer.router[...] - config.routing.bias_scale * chosen_BL
                mask_BL = z_BL >= threshold
                kind = config.routing.sparse
                x_BLD = sparse(layer, kind, x_BLD, phases, mask_BL, jax.nn.sigmoid(z_BL))
                chosen_BL += mask_BL
                decisions.append(mask_BL)
            if group.anchor:
                x_BLD = dense(take(stages.anchor, n), x_BLD, phases)
    return model.logits(model.final_norm(x_BLD)), jnp.array(decisions)
