"""The paper's sweeps as observations made from a law (SPEC 7), shared by the tests of the law."""

from __future__ import annotations

import json
import pathlib

from experiments.suites.law import CONTEXTS, K_GRID, dense_loss, grid, simulated_rows
from xmod_jax import accounting
from xmod_jax.config import BACKBONES, ModelConfig
from xmod_jax.hierarchy import Hierarchy

__all__ = ["CONTEXTS", "K_GRID", "TABLE8", "dense_loss", "grid", "paper_rows", "parameters"]

TABLE8 = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "table8_law_coefficients.json").read_text()
)
paper_rows = simulated_rows


def parameters(family: str, layers: int) -> int:
    """Total parameters of `layers` layers of a backbone, embedding and head included."""
    b = BACKBONES[family]
    attention = 2 * b.d_model * b.head_dim * (b.num_heads + b.num_kv_heads)
    return layers * (attention + 3 * b.d_model * b.d_ff) + 2 * b.vocab_size * b.d_model


def tokens_of(family: str, length: int, name: str, flops: float) -> float:
    """Training tokens that `flops` buy."""
    model = ModelConfig(BACKBONES[family], Hierarchy.from_name(name))
    return accounting.tokens_for_flops(model, length, flops)
