"""Parameters and FLOPs of a model from its configuration alone; no arrays (SPEC section 5).

There are TWO FLOP counts, and their names keep them apart:

- **Paper FLOPs** (`flops_per_token`, `training_flops`; ``flops`` in the records): the forward pass
  of the layers, attention over the full L x L square, without the head. Comparisons are matched in
  this count: ``C = phi * tokens``.
- **Hardware FLOPs** (`forward_hardware_flops_per_token`, `train_hardware_flops_per_token`;
  ``hardware_flops`` in the records): what a device executes, with backward pass, head and causal
  attention by blocks. Speed and `mfu` come from this count, never from the other.

Neither counts embedding look-up, norms, rotations, router vectors, selection or the optimiser.

An architecture joins by adding its layers to `layer_kinds`; all else follows from that table.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from xmod_jax.config import Backbone, ModelConfig, MoE, RunConfig, Sparse, Update

ATTENTION_BLOCK = 256  # largest edge of an attention block in tokens
FFN_ROWS = 4096  # of a sequence in an FFN at once; products of as many rows lose no speed


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """`count` equal layers of a model and what a token costs in one of them.

    Attributes:
      name: ``"dense"``, ``"moe"``, ``"sparse"`` or ``"attention"``.
      count: number of such layers in the model.
      matrices: parameters in the matrices of one layer.
      vectors: parameters of one layer outside matrices: norms, router vector, gate scale.
      matmul_share: share of `matrices` that a token of the sequence passes on average.
      attention_share: attention work relative to all L queries over all L keys; 0 without
        attention.
      full_rows: matrix parameters, at most ``matrices * matmul_share``, that every token passes in
        a layer whose other rows are routed (keys and values of Selected-Q/full-KV).
      sparsity: K; the layer executes ``ceil(L / K)`` rows of a sequence.
      unpriced: matrix parameters that every token passes and paper FLOPs leave out: MoE routers.
      kept: matrix parameters whose product the backward pass does not form again, because no
        gradient needs it: a residual's last product, where nothing but a sum follows.
      noted: matrix parameters whose product need not be formed again where products are kept
        (`Execution.keep_products`).
      hidden: likewise, in an FFN that takes at most `FFN_ROWS` rows at once.
    """

    name: str
    count: int
    matrices: int
    vectors: int
    matmul_share: Fraction = Fraction(1)
    attention_share: Fraction = Fraction(1)
    full_rows: int = 0
    sparsity: int = 1
    unpriced: int = 0
    kept: int = 0
    noted: int = 0
    hidden: int = 0


def attention_matrices(backbone: Backbone) -> int:
    """Parameters in the matrices q, k, v and o."""
    return 2 * _query_matrix(backbone) + _key_value_matrices(backbone)


def ffn_matrices(backbone: Backbone) -> int:
    """Parameters in SwiGLU's gate, up and down."""
    return 3 * backbone.d_model * backbone.d_ff


def layer_matrices(backbone: Backbone) -> int:
    """Parameters in the matrices of one dense layer."""
    return attention_matrices(backbone) + ffn_matrices(backbone)


def _query_matrix(backbone: Backbone) -> int:
    return backbone.d_model * backbone.num_heads * backbone.head_dim


def _key_value_matrices(backbone: Backbone) -> int:
    return 2 * backbone.d_model * backbone.num_kv_heads * backbone.head_dim


def layer_kinds(model: ModelConfig) -> tuple[LayerKind, ...]:
    """The model's layers by kind; kinds without a layer are left out (SPEC 5)."""
    hierarchy, backbone = model.hierarchy, model.backbone
    norms = 2 * backbone.d_model + 2 * backbone.head_dim
    dense = LayerKind(
        "dense",
        hierarchy.dense_layers,
        layer_matrices(backbone),
        norms,
        kept=backbone.d_model * backbone.d_ff,
        noted=attention_matrices(backbone),
        hidden=2 * backbone.d_model * backbone.d_ff,
    )
    attention = LayerKind(
        "attention",
        hierarchy.attention_layers,
        attention_matrices(backbone),
        backbone.d_model + 2 * backbone.head_dim,
        kept=_query_matrix(backbone),
        noted=attention_matrices(backbone) - _query_matrix(backbone),
    )
    first = dense if model.moe is None else _moe_layer(model, model.moe, norms)
    kinds = (first, attention, _sparse_layer(model, norms))
    return tuple(kind for kind in kinds if kind.count)


def _moe_layer(model: ModelConfig, moe: MoE, norms: int) -> LayerKind:
    """A token passes attention, its active experts and the shared ones.

    The router's matrix counts among the parameters (so table 6's 8.48B and 4.58B follow) and not
    among paper FLOPs, as router vectors do not.
    """
    expert = 3 * model.backbone.d_model * moe.d_expert
    router = model.backbone.d_model * moe.experts
    attention = attention_matrices(model.backbone)
    passed = attention + (moe.active + moe.shared) * expert
    matrices = attention + (moe.experts + moe.shared) * expert + router
    share = Fraction(passed, matrices)
    return LayerKind(
        "moe",
        model.hierarchy.depth,
        matrices,
        norms,
        share,
        unpriced=router,
        kept=model.backbone.d_model * moe.shared * moe.d_expert,
        noted=attention + 2 * model.backbone.d_model * moe.shared * moe.d_expert,
    )


def _sparse_layer(model: ModelConfig, norms: int) -> LayerKind:
    """1/K of a layer's matrices and 1/K^2 of its attention: 1/K of the queries and of the keys.

    Routed FFNs have no attention; with full keys and values their two matrices count whole and
    attention 1/K.
    """
    hierarchy, backbone = model.hierarchy, model.backbone
    matrices = layer_matrices(backbone)
    share = Fraction(1, hierarchy.sparsity)
    attention, full = share**2, 0
    noted, hidden = attention_matrices(backbone), ffn_matrices(backbone)
    if model.routing.sparse is Sparse.FFN:
        matrices, attention, norms = ffn_matrices(backbone), Fraction(0), backbone.d_model
        noted, hidden = matrices, 0
    elif model.routing.sparse is Sparse.FULL_KV:
        attention, full = share, _key_value_matrices(backbone)
        noted, hidden = 0, 0
    passed = share * (matrices - full) + full
    router = backbone.d_model + (model.routing.update is Update.XMOD)
    return LayerKind(
        "sparse",
        hierarchy.sparse_layers,
        matrices,
        norms + router,
        passed / matrices,
        attention,
        full,
        hierarchy.sparsity,
        noted=noted,
        hidden=hidden,
    )


def _vocabulary_matrices(backbone: Backbone) -> int:
    return 2 * backbone.vocab_size * backbone.d_model


def total_parameters(model: ModelConfig) -> int:
    """N as the paper counts: matrices of every layer, input embedding, output head (SPEC 5)."""
    layers = sum(kind.count * kind.matrices for kind in layer_kinds(model))
    return layers + _vocabulary_matrices(model.backbone)


def exact_parameters(model: ModelConfig) -> int:
    """Elements of every trainable array of the model: `total_parameters` plus all vectors.

    The vectors are the norms of each layer and the final one, the routers, and the gate scales
    (X-MoD update only). State without a gradient (the calibrated thresholds) is not counted.
    """
    vectors = sum(kind.count * kind.vectors for kind in layer_kinds(model))
    return total_parameters(model) + vectors + model.backbone.d_model


def active_parameters(model: ModelConfig) -> int:
    """Matrix parameters that a token passes on average, embedding and head included (rounded)."""
    layers = sum(kind.count * kind.matrices * kind.matmul_share for kind in layer_kinds(model))
    return round(layers) + _vocabulary_matrices(model.backbone)


def n_act(model: ModelConfig) -> int:
    """N_act: total parameters of the dense model of equal backbone and active depth (SPEC 5)."""
    layers = model.hierarchy.active_depth * layer_matrices(model.backbone)
    return round(layers) + _vocabulary_matrices(model.backbone)


def _paper_flops(
    backbone: Backbone, context_length: int, matmul: Fraction, attention: Fraction
) -> float:
    full_attention = 4 * context_length * backbone.num_heads * backbone.head_dim
    return float(2 * matmul + full_attention * attention)


def flops_per_token(model: ModelConfig, context_length: int) -> float:
    """phi: PAPER FLOPs of one token, forward pass of the layers (SPEC 5).

    ``phi = 2 * (matrix parameters a token passes) + 4 * L * H * E * (effective attention layers)``.

    Args:
      model: the model.
      context_length: L, in tokens.
    """
    kinds = layer_kinds(model)
    matmul = sum((kind.count * kind.matrices * kind.matmul_share for kind in kinds), Fraction(0))
    attention = sum((kind.count * kind.attention_share for kind in kinds), Fraction(0))
    return _paper_flops(model.backbone, context_length, matmul, attention)


def dense_flops_per_token(model: ModelConfig, context_length: int) -> float:
    """phi (PAPER FLOPs) of the dense model of equal backbone and active depth."""
    depth = model.hierarchy.active_depth
    matmul = depth * layer_matrices(model.backbone)
    return _paper_flops(model.backbone, context_length, matmul, depth)


def phi_ratio(model: ModelConfig, context_length: int) -> float:
    """phi relative to the dense model of equal backbone and active depth (table 1)."""
    return flops_per_token(model, context_length) / dense_flops_per_token(model, context_length)


def token_exposure(model: ModelConfig, context_length: int) -> float:
    """Training tokens relative to that dense model at equal PAPER FLOPs: ``1 / phi_ratio``."""
    return 1 / phi_ratio(model, context_length)


def training_flops(model: ModelConfig, context_length: int, tokens: float) -> float:
    """C: PAPER FLOPs of training on `tokens` tokens, ``C = phi * tokens`` (forward only)."""
    return flops_per_token(model, context_length) * tokens


def tokens_for_flops(model: ModelConfig, context_length: int, flops: float) -> float:
    """Training tokens that `flops` PAPER FLOPs buy; not rounded to steps."""
    return flops / flops_per_token(model, context_length)


def steps_for_flops(
    model: ModelConfig, context_length: int, flops: float, tokens_per_step: int, cover: bool = False
) -> int:
    """Optimiser steps of `tokens_per_step` tokens that `flops` PAPER FLOPs buy, at least 1.

    Args:
      model: the model.
      context_length: L, in tokens.
      flops: PAPER FLOPs.
      tokens_per_step: tokens of one step.
      cover: round up, so that the run spends at least `flops`; else round down. A dense reference
        rounds up and every other run down: then the dense curve covers each of them.
    """
    steps = tokens_for_flops(model, context_length, flops) / tokens_per_step
    return max(1, math.ceil(steps) if cover else math.floor(steps))


def attention_pairs(length: int, block: int = ATTENTION_BLOCK) -> int:
    """Query-key pairs that causal attention by blocks computes for one sequence.

    Blocks above the diagonal are skipped, those on it computed whole, a last incomplete block is
    padded.
    """
    edge = attention_edge(length, block)
    blocks = -(-length // edge)
    return blocks * (blocks + 1) // 2 * edge * edge


def attention_edge(length: int, block: int = ATTENTION_BLOCK) -> int:
    """Edge of the blocks of a sequence, in tokens: `block`, of shorter ones their half.

    Up to half a block is one block: two would save less than they cost.
    """
    if length > block:
        return block
    return length if 2 * length <= block else -(-length // 2)


@dataclasses.dataclass(frozen=True)
class _Executed:
    """Executed forward FLOPs of one sequence, and those that the backward pass executes again."""

    matmul: float
    attention: float
    recomputed: float
    saved: float  # attention that is not executed again, since its output is kept
    head: float


def _executed(
    model: ModelConfig, context_length: int, block: int, keep_products: bool = False
) -> _Executed:
    backbone = model.backbone
    matmul = attention = recomputed = saved = 0
    for kind in layer_kinds(model):
        rows = -(-context_length // kind.sparsity)
        pairs = attention_pairs(rows, block)
        if kind.full_rows:
            pairs = rows * context_length  # keys after a query are masked, not skipped
        elif not kind.attention_share:
            pairs = 0
        products = kind.count * 4 * pairs * backbone.num_heads * backbone.head_dim
        routed = kind.matrices - kind.full_rows
        if kind.name == "moe":
            routed = round(kind.matrices * kind.matmul_share) + kind.unpriced
        products_of_rows = kind.count * 2 * (routed * rows + kind.full_rows * context_length)
        matmul += products_of_rows
        attention += products
        known = kind.kept
        if keep_products:
            known += kind.noted + (kind.hidden if rows <= FFN_ROWS else 0)
        recomputed += products_of_rows - kind.count * 2 * known * rows
        if kind.name == "sparse" and not (keep_products and kind.noted):
            recomputed += products
        else:
            saved += products
    head = 2 * backbone.vocab_size * backbone.d_model * context_length
    return _Executed(matmul, attention, recomputed, saved, head)


def forward_hardware_flops_per_token(
    model: ModelConfig, context_length: int, block: int = ATTENTION_BLOCK
) -> float:
    """HARDWARE FLOPs of a forward pass (training capacity ``ceil(L/K)``), a token's share.

    Args:
      model: the model.
      context_length: L, in tokens.
      block: edge of an attention block, in tokens (see `attention_pairs`).
    """
    done = _executed(model, context_length, block)
    return (done.matmul + done.attention + done.head) / context_length


def train_hardware_flops_per_token(
    model: ModelConfig,
    context_length: int,
    block: int = ATTENTION_BLOCK,
    recompute: bool = True,
    saved_attention: bool = True,
    keep_products: bool = False,
) -> float:
    """HARDWARE FLOPs of a training step, forward and backward, a token's share.

    The backward pass costs twice the forward in matrix products, 2.5 times in attention (its
    scores are formed again from the saved statistics).

    Args:
      model: the model.
      context_length: L, in tokens.
      block: edge of an attention block, in tokens (see `attention_pairs`).
      recompute: count what rematerialisation executes again: the products of every layer that a
        gradient needs, and the attention of sparse layers (that of the others is saved). True is
        what a device does (``hardware_flops`` of the records); False is the model's own work, the
        count that `mfu` wants. Not counted: an FFN on more than 4096 routed rows goes in parts,
        whose hidden products are formed once more.
      saved_attention: whether dense layers keep their attention's output for the backward pass;
        the fused kernel of a GPU does not let them (`xmod_jax.nn.attention.is_fused`).
      keep_products: as in `Execution`; attention of sparse layers is then saved too.
    """
    done = _executed(model, context_length, block, keep_products)
    flops = 3 * done.matmul + 3.5 * done.attention + 3 * done.head
    if recompute:
        flops += done.recomputed
        flops += 0 if saved_attention else done.saved
    return flops / context_length


def run_hardware_flops_per_token(run: RunConfig, saved_attention: bool = True) -> float:
    """`train_hardware_flops_per_token` of a run as it is trained."""
    return train_hardware_flops_per_token(
        run.model,
        run.train.context_length,
        saved_attention=saved_attention,
        keep_products=run.execution.keep_products,
    )


def mfu(model_flops_per_s: float, peak_flops: float) -> float:
    """Model FLOPs utilisation: share of the devices' peak spent on the model's own work.

    Args:
      model_flops_per_s: HARDWARE FLOPs per second counted WITHOUT recomputation: tokens per second
        times `train_hardware_flops_per_token` with ``recompute=False``. Paper FLOPs do not belong
        here, nor do parameters that no token passes.
      peak_flops: peak FLOPs per second of all devices together.
    """
    if not peak_flops > 0:
        raise ValueError(f"peak_flops must be positive, got {peak_flops}")
    return model_flops_per_s / peak_flops


def summary(
    model: ModelConfig, context_length: int, keep_products: bool = False
) -> dict[str, float]:
    """The accounting that a run directory keeps: plain numbers, JSON-ready.

    ``flops_per_token`` is the paper's count, ``hardware_flops_per_token`` one training step's with
    recomputation.
    """
    hardware = train_hardware_flops_per_token(model, context_length, keep_products=keep_products)
    return {
        "layers": model.hierarchy.depth,
        "n_act": n_act(model),
        "total_params": total_parameters(model),
        "active_params": active_parameters(model),
        "exact_params": exact_parameters(model),
        "flops_per_token": flops_per_token(model, context_length),
        "phi_ratio": phi_ratio(model, context_length),
        "token_exposure": token_exposure(model, context_length),
        "hardware_flops_per_token": hardware,
    }
