"""Qwen3 folders made by hand, without any library of Hugging Face but safetensors."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, as Hugging Face has them."""
    D, V, E = config["hidden_size"], config["vocab_size"], config["head_dim"]
    H, G = config["num_attention_heads"] * E, config["num_key_value_heads"] * E
    named = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        named["lm_head.weight"] = (V, D)
    for n in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (D,),
            "post_attention_layernorm": (D,),
            "self_attn.q_proj": (H, D),
            "self_attn.k_proj": (G, D),
            "self_attn.v_proj": (G, D),
            "self_attn.o_proj": (D, H),
            "self_attn.q_norm": (E,),
            "self_attn.k_norm": (E,),
        }
        X, F = config.get("num_experts", 0), config["intermediate_size"]
        if X:
            layer["mlp.gate"] = (X, D)
            F = config["moe_intermediate_size"]
        for prefix in [f"mlp.experts.{x}" for x in range(X)] or ["mlp"]:
            layer |= {f"{prefix}.gate_proj": (F, D), f"{prefix}.up_proj": (F, D)}
            layer |= {f"{prefix}.down_proj": (D, F)}
        named |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    return named


def weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights, large enough for every part to count."""
    rng = np.random.default_rng(0)
    scale = lambda shape: 0.5 if len(shape) > 1 else 1.0
    return {
        name: (rng.normal(size=shape) * scale(shape)).astype(np.float32)
        for name, shape in shapes(config).items()
    }


def make(
    folder: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    shards: int = 1,
) -> dict[str, np.ndarray]:
    """Writes a folder; the tensors in it."""
    tensors = weights(config) if tensors is None else tensors
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[n::shards]}, folder / file)
        weight_map |= dict.fromkeys(names[n::shards], file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


# --- NumPy float64, after the published definition of Qwen3


def _norm(x, scale, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def _rotated(x_LHE, base):
    half = x_LHE.shape[-1] // 2
    angle = np.arange(len(x_LHE))[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x_LHE[..., :half], x_LHE[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _attention(x_LD, w, config):
    L, E, eps = len(x_LD), config["head_dim"], config["rms_norm_eps"]
    heads = lambda name: (x_LD @ w(f"self_attn.{name}_proj").T).reshape(L, -1, E)
    base = config["rope_theta"]
    q = _rotated(_norm(heads("q"), w("self_attn.q_norm"), eps), base)
    k = _rotated(_norm(heads("k"), w("self_attn.k_norm"), eps), base)
    repeats = q.shape[1] // k.shape[1]
    k, v = (np.repeat(part, repeats, axis=1) for part in (k, heads("v")))
    s_HLL = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(E)
    s_HLL[:, np.triu(np.ones((L, L), bool), 1)] = -np.inf
    p_HLL = np.exp(s_HLL - s_HLL.max(-1, keepdims=True))
    p_HLL /= p_HLL.sum(-1, keepdims=True)
    return np.einsum("hqk,khe->qhe", p_HLL, v).reshape(L, -1) @ w("self_attn.o_proj").T


def _ffn(x, w, prefix):
    gate = x @ w(f"{prefix}.gate_proj").T
    return (gate / (1 + np.exp(-gate)) * (x @ w(f"{prefix}.up_proj").T)) @ w(
        f"{prefix}.down_proj"
    ).T


def _experts(x_LD, w, config):
    z_LX = x_LD @ w("mlp.gate").T
    p_LX = np.exp(z_LX - z_LX.max(-1, keepdims=True))
    p_LX /= p_LX.sum(-1, keepdims=True)
    out_LD = np.zeros_like(x_LD)
    for t, p_X in enumerate(p_LX):
        chosen = np.argsort(-p_X, kind="stable")[: config["num_experts_per_tok"]]
        total = p_X[chosen].sum() if config["norm_topk_prob"] else 1
        for x in chosen:
            out_LD[t] += p_X[x] / total * _ffn(x_LD[t], w, f"mlp.experts.{x}")
    return out_LD


def logits(tensors: dict[str, np.ndarray], config: dict[str, Any], ids_L: np.ndarray) -> np.ndarray:
    """Logits [L, V] of one sequence."""
    get = lambda name: np.asarray(tensors[f"{name}.weight"], np.float64)
    x_LD = get("model.embed_tokens")[ids_L]
    eps = config["rms_norm_eps"]
    for n in range(config["num_hidden_layers"]):
        w = lambda name, n=n: get(f"model.layers.{n}.{name}")
        x_LD = x_LD + _attention(_norm(x_LD, w("input_layernorm"), eps), w, config)
        h_LD = _norm(x_LD, w("post_attention_layernorm"), eps)
        x_LD = x_LD + (
            _experts(h_LD, w, config) if "num_experts" in config else _ffn(h_LD, w, "mlp")
        )
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _norm(x_LD, get("model.norm"), eps) @ get(head).T
