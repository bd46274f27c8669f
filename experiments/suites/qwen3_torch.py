"""Hugging Face's Qwen3 in PyTorch as a contender: the dense model of equal sizes, on all cores.

Needs the packages `torch` and `transformers`, which this project does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from experiments.suites.models import QWEN3_TORCH, Setting, backbone
from xmod_jax import accounting
from xmod_jax.config import Compute, ModelConfig
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy

INSTALL = "pip install torch transformers (a build for CPU is enough)"


def installed() -> bool:
    """Whether PyTorch and transformers are there."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def require(setting: Setting) -> None:
    """Refuses what this contender cannot do.

    Raises:
      UserError: the packages are missing; JAX runs on another device; not float32.
    """
    import jax

    if not installed():
        raise UserError(f"--models: {QWEN3_TORCH} needs PyTorch and transformers: {INSTALL}")
    if jax.default_backend() != "cpu":
        raise UserError(f"--models: {QWEN3_TORCH} is measured on CPU only; JAX runs elsewhere")
    if setting.compute is not Compute.FLOAT32:
        raise UserError(f"--models: {QWEN3_TORCH} is measured in float32 only")


def model(setting: Setting, depth: int) -> Any:
    """`Qwen3ForCausalLM` of the setting's sizes, random parameters, float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layer = backbone(setting.width)
    config = Qwen3Config(
        vocab_size=layer.vocab_size,
        hidden_size=layer.d_model,
        intermediate_size=layer.d_ff,
        num_hidden_layers=depth,
        num_attention_heads=layer.num_heads,
        num_key_value_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        max_position_embeddings=2 * setting.context,
        rms_norm_eps=layer.norm_eps,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)  # on CPU


def training(setting: Setting, depth: int) -> tuple[Callable[[], Any], float]:
    """Forward and backward pass, with `whole_step` an AdamW update too; and the model's own FLOPs.

    The FLOPs are those of causal attention and without recomputation: what the model needs, not
    what the library makes of it.
    """
    import torch

    made = model(setting, depth)
    made.train()
    shape = (setting.batch, setting.context)
    tokens = torch.randint(0, made.config.vocab_size, shape, generator=torch.Generator())
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        made(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        if setting.whole_step:
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()

    same = ModelConfig(backbone(setting.width), Hierarchy.dense(depth))
    per_token = accounting.train_hardware_flops_per_token(same, setting.context, recompute=False)
    return step, setting.tokens * per_token


def decoding(setting: Setting, depth: int, steps: int) -> tuple[Callable[[], Any], float]:
    """`steps` tokens behind a context whose keys and values are random, and the cache's bytes.

    Every call starts at the same context. PyTorch's cache grows by copying itself at each token;
    that is how the library decodes.
    """
    import torch
    from transformers import DynamicCache

    made = model(setting, depth)
    made.eval()
    layer = backbone(setting.width)
    shape = (setting.batch, layer.num_kv_heads, setting.context, layer.head_dim)
    cache = DynamicCache()
    for n in range(depth):
        cache.update(0.1 * torch.randn(shape), 0.1 * torch.randn(shape), n)
    token = torch.ones((setting.batch, 1), dtype=torch.long)

    @torch.inference_mode()
    def decode() -> None:
        for n in range(steps):
            place = torch.full((1,), setting.context + n)
            made(
                input_ids=token,
                position_ids=place[None].expand(setting.batch, 1),
                past_key_values=cache,
                use_cache=True,
            )
        cache.crop(-steps)

    return decode, float(2 * depth * 4 * torch.Size(shape).numel())
