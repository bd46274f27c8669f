"""The paper's sweeps as observations made from a law (SPEC 7), shared by the tests of the law."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from xmod_jax import accounting
from xmod_jax.config import BACKBONES, ModelConfig
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.law.observations import Row
from xmod_jax.law.terms import Law

TABLE8 = json.loads(
    (pathlib.Path(__file__).parents[1] / "data" / "table8_law_coefficients.json").read_text()
)
K_GRID = (2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
CONTEXTS = (2048, 4096, 8192, 16384, 32768)


def parameters(family: str, layers: int) -> int:
    """Total parameters of `layers` layers of a backbone, embedding and head included."""
    b = BACKBONES[family]
    attention = 2 * b.d_model * b.head_dim * (b.num_heads + b.num_kv_heads)
    return layers * (attention + 3 * b.d_model * b.d_ff) + 2 * b.vocab_size * b.d_model


def grid() -> list[tuple[str, int, float, int]]:
    """(family, L, A, K) of the K-L, scale and anchor sweeps: 101 distinct points."""
    points = [("556M", length, 1.0, k) for length in CONTEXTS for k in K_GRID]
    points.append(("556M", 2048, 1.0, 3))
    points += [(family, 32768, 1.0, k) for family in ("165M", "298M", "936M") for k in K_GRID]
    strides = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0)
    anchor = [("165M", 32768, a, k) for a in strides for k in (4, 8, 12, 16)]
    return points + [point for point in anchor if point not in points]


def dense_loss(family: str, length: float, flops: float) -> float:
    """An arbitrary dense curve, linear in log FLOPs, so that interpolation is exact."""
    return 2.6 + 0.1 * len(family) + 0.01 * np.log(length) - 0.12 * np.log(flops / 1e20)


def tokens_of(family: str, length: int, name: str, flops: float) -> float:
    """Training tokens that `flops` buy."""
    model = ModelConfig(BACKBONES[family], Hierarchy.from_name(name))
    return accounting.tokens_for_flops(model, length, flops)


def paper_rows(law: Law | None = None, noise: float = 0.0, seed: int = 0) -> list[Row]:
    """Sparse rows of the grid at 1e20 FLOPs and two dense rows per family and L around them."""
    law = law or Law.paper()
    rng = np.random.default_rng(seed)
    rows = []
    for family, length, a, k in grid():
        n_act = parameters(family, 28)
        name = f"A{a:g}K{k}"
        n_total = parameters(family, Hierarchy.from_name(name).depth)
        tokens = tokens_of(family, length, name, 1e20)
        delta = float(law.delta(n_act, n_total, length, k, a)) + noise * rng.standard_normal()
        loss = dense_loss(family, length, 1e20) + delta
        source = f"{family} L={length} {name}"
        rows.append(Row(family, length, n_act, n_total, k, a, 1e20, tokens, loss, source))
    for backbone, context in sorted({(row.family, row.L) for row in rows}):
        n_act = parameters(backbone, 28)
        for flops in (0.5e20, 1.5e20):
            loss = dense_loss(backbone, context, flops)
            source = f"{backbone} L={context:g} dense {flops:g}"
            tokens = tokens_of(backbone, int(context), "dense", flops)
            rows.append(Row(backbone, context, n_act, n_act, 1, 1, flops, tokens, loss, source))
    return rows
