"""Frozen, validated configuration of a model, a training run and its data.

Values are plain Python; `to_dict` and `from_dict` give the JSON form that a run directory keeps.
What of it makes two runs the same training is said in `xmod_jax.identity`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from typing import Any, TypeVar

from xmod_jax.fields import settle
from xmod_jax.hierarchy import Hierarchy

GPT2_VOCABULARY = 50_257
BYTE_VOCABULARY = 257  # 256 bytes and the end-of-text token
MAX_SEED = 2**32 - 1  # generators of random numbers take 32 bits
MAX_COUNT = 2**31 - 1  # of anything counted: positions, steps and sizes are int32 on a device
T = TypeVar("T")


class Update(enum.StrEnum):
    """How a sparse layer's block changes a routed token (SPEC 3)."""

    XMOD = "xmod"  # x <- x + g * r * (a + f)
    MOD = "mod"  # x <- x + a + r * f


class Sparse(enum.StrEnum):
    """What a sparse layer computes for its routed tokens (SPEC 4)."""

    LAYER = "layer"  # attention among the routed tokens, then their FFN
    FFN = "ffn"  # Routed-FFN: the FFN alone; full attention layers stand between (SPEC 4)
    FULL_KV = "full_kv"  # Selected-Q/full-KV: their queries attend to every token of the past


class Compute(enum.StrEnum):
    """Precision of activations and matrix products; parameters and routers stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Scores(enum.StrEnum):
    """How the logits of a MoE router weigh the experts that a token passes."""

    SIGMOID = "sigmoid"  # sigmoids of the chosen, scaled to a mean of 1
    SOFTMAX = "softmax"  # softmax among the chosen: a sum of 1 (Qwen3-MoE, norm_topk_prob)
    SOFTMAX_ALL = "softmax_all"  # softmax among all experts (Qwen3-MoE without it)


class SparseStart(enum.StrEnum):
    """What the sparse layers of an upcycled model begin with."""

    NEW = "new"  # weights of their own
    COPIED = "copied"  # those of their stage's anchor


# Metadata of a field that older configurations lack: at its default the JSON form leaves it out, so
# that a run keeps its hash when a later version can do more.
_ADDED = {"added": True}


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not 0 < value < math.inf:
            raise ValueError(f"{type(owner).__name__}.{name} must be positive, got {value}")
        _countable(f"{type(owner).__name__}.{name}", value)


def _not_negative(owner: object, *names: str) -> None:
    for name in names:
        if getattr(owner, name) < 0:
            raise ValueError(f"{name} must be at least 0, got {getattr(owner, name)}")


def _countable(name: str, value: float) -> None:
    if isinstance(value, int) and value > MAX_COUNT:
        # Not the value: it may have more digits than anybody reads.
        raise ValueError(f"{name} must be at most {MAX_COUNT}")


@dataclasses.dataclass(frozen=True)
class Backbone:
    """Sizes of the Qwen3-style layer (SPEC 2, table 4), all counts of elements.

    Attributes:
      d_model: D, width of the residual stream.
      head_dim: E, width of a head.
      num_heads: H, query heads.
      num_kv_heads: G, key/value heads; divides H.
      d_ff: F, width of the SwiGLU FFN.
      vocab_size: V.
      rope_base: base of the rotary embedding's wavelengths.
      norm_eps: epsilon of every RMSNorm.
    """

    d_model: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    vocab_size: int = GPT2_VOCABULARY
    rope_base: float = 1e6
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, *(field.name for field in dataclasses.fields(self)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_name(cls, name: str) -> Backbone:
        """A backbone of table 4: ``"165M"``, ``"298M"``, ``"556M"``, ``"936M"``, ``"1.65B"``."""
        if name not in BACKBONES:
            raise ValueError(f"unknown backbone {name!r}; known: {', '.join(BACKBONES)}")
        return BACKBONES[name]


BACKBONES = {
    "165M": Backbone(512, 64, 16, 8, 1536),
    "298M": Backbone(768, 64, 16, 8, 2304),
    "556M": Backbone(1024, 128, 16, 8, 3072),
    "936M": Backbone(1536, 128, 16, 8, 3840),
    "1.65B": Backbone(2048, 128, 16, 8, 6144),
}


@dataclasses.dataclass(frozen=True)
class Routing:
    """A sparse layer's router and update (SPEC 3; defaults and evidence in WORKSPACE.md).

    Attributes:
      update: the X-MoD or the MoD update rule.
      sparse: what a sparse layer computes.
      bias_scale: tau of the token-choice bias ``tau * b_i``; 0 switches it off.
      gate_init: initial value of the learnable gate scale g_l (X-MoD only).
      router_init_std: standard deviation of the initial router vectors.
      calibration_decay: decay per step of the running mean behind the calibrated threshold.
    """

    update: Update = Update.XMOD
    sparse: Sparse = Sparse.LAYER
    bias_scale: float = 1.0
    gate_init: float = 1.0
    router_init_std: float = 0.02
    calibration_decay: float = 0.95

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, "router_init_std")
        if self.bias_scale < 0 or not math.isfinite(self.bias_scale):
            raise ValueError(f"bias_scale must be at least 0, got {self.bias_scale}")
        if not 0 <= self.calibration_decay < 1:
            raise ValueError(f"calibration_decay must be in [0, 1), got {self.calibration_decay}")

    @classmethod
    def mod(cls) -> Routing:
        """Mixture-of-Depths: its own update, no token-choice bias, no gate scale (SPEC 4)."""
        return cls(update=Update.MOD, bias_scale=0.0)


@dataclasses.dataclass(frozen=True)
class MoE:
    """Mixture of experts in place of every FFN (SPEC 4; defaults and evidence in WORKSPACE.md).

    Attributes:
      experts: X, routed experts of a layer.
      active: routed experts that a token passes.
      shared: experts that every token passes beside those.
      d_expert: FFN width of one expert, routed or shared.
      balance: coefficient of the auxiliary load-balancing loss.
      bias_rate: step of the auxiliary-loss-free balancing, per optimiser step: an expert's
        selection bias moves by this much against its load.
      scores: how a token's experts are weighed.
    """

    experts: int
    active: int
    shared: int
    d_expert: int
    balance: float = 1e-3
    bias_rate: float = 1e-3
    scores: Scores = dataclasses.field(default=Scores.SIGMOID, metadata=_ADDED)

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, "experts", "active", "d_expert")
        if self.active > self.experts:
            raise ValueError(f"active {self.active} of only {self.experts} experts")
        for name in ("shared", "balance", "bias_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"MoE.{name} must be at least 0, got {getattr(self, name)}")
            _countable(f"MoE.{name}", getattr(self, name))

    @classmethod
    def fine_grained(
        cls, backbone: Backbone, sparsity: int, granularity: int = 8, shared: int = 2
    ) -> MoE:
        """Experts that are FFNs cut into `granularity` parts, ``granularity * sparsity`` of them.

        A token passes as many matrix parameters as in the dense FFN: ``8:64`` of table 6 is
        sparsity 8, granularity 8: 64 routed experts of width d_ff / 8, 6 active and 2 shared.
        """
        if backbone.d_ff % granularity:
            raise ValueError(
                f"d_ff {backbone.d_ff} is not a multiple of the granularity {granularity}"
            )
        experts = granularity * sparsity
        return cls(experts, granularity - shared, shared, backbone.d_ff // granularity)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A model: sizes of a layer, arrangement of the layers, routing, precision, experts."""

    backbone: Backbone
    hierarchy: Hierarchy
    routing: Routing = Routing()
    compute: Compute = Compute.FLOAT32
    moe: MoE | None = None

    def __post_init__(self) -> None:
        settle(self)
        if self.moe is not None and self.hierarchy.groups:
            raise ValueError("experts take the place of dense FFNs: the hierarchy must be dense")
        leads = any(group.attentions for group in self.hierarchy.groups)
        if self.hierarchy.groups and leads != (self.routing.sparse is Sparse.FFN):
            raise ValueError(
                "routed FFNs, and only they, need attention layers in every stage "
                "(Hierarchy.routed_ffn)"
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimiser and schedule (SPEC 6).

    Attributes:
      matrices: ``"muon"`` or ``"adamw"``, for the matrices inside layers; the rest is AdamW's.
      peak_lr: peak learning rate.
      warmup: share of the tokens in linear warm-up.
      final: learning rate at the end, as a share of the peak (cosine in between).
      weight_decay: decoupled weight decay, times the learning rate.
      clip: largest global gradient norm.
    """

    matrices: str = "muon"
    peak_lr: float = 3.2e-3
    warmup: float = 0.01
    final: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, "peak_lr", "clip")
        if self.matrices not in ("muon", "adamw"):
            raise ValueError(f"matrices must be 'muon' or 'adamw', got {self.matrices!r}")
        if not 0 <= self.warmup < 1 or not 0 <= self.final <= 1 or self.weight_decay < 0:
            raise ValueError(
                "warmup must be in [0, 1), final in [0, 1] and weight_decay at least 0, got "
                f"{self.warmup}, {self.final}, {self.weight_decay}"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What a training run computes.

    Attributes:
      context_length: L, tokens of a sequence.
      batch_size: sequences of one optimiser step.
      steps: optimiser steps; tokens = steps * batch_size * context_length.
      alignment: coefficient of the router alignment loss.
      eval_sequences: held-out sequences of an evaluation.
      seed: of parameters and data order.
    """

    context_length: int
    batch_size: int
    steps: int
    alignment: float = 1e-4
    eval_sequences: int = 64
    seed: int = 0
    optimizer: OptimizerConfig = OptimizerConfig()

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, "context_length", "batch_size", "steps", "eval_sequences")
        _not_negative(self, "alignment", "seed")
        if self.seed > MAX_SEED:
            raise ValueError(f"seed must be at most {MAX_SEED}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step."""
        return self.batch_size * self.context_length

    @property
    def tokens(self) -> int:
        """Training tokens of the whole run."""
        return self.steps * self.tokens_per_step


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a training run is executed, watched and saved: the losses are its own but for rounding.

    A run may go on with other values (`xmod_jax.identity`).

    Attributes:
      accumulation: micro-batches that a step's batch is cut into; divides the batch size. Experts
        balance by micro-batch, so for a MoE it is part of what is computed.
      keep_products: whether the backward pass is given the layers' matrix products of the forward
        pass instead of forming them again: faster, for several times the memory of activations.
      eval_every: steps between evaluations (the last step always evaluates); 0 for the end only.
      checkpoint_every: steps between checkpoints (the last step always saves); 0 for the end only.
      keep_checkpoints: newest checkpoints kept.
    """

    accumulation: int = 1
    keep_products: bool = False
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        settle(self)
        _positive(self, "accumulation", "keep_checkpoints")
        for name in ("eval_every", "checkpoint_every"):
            _not_negative(self, name)
            _countable(f"Execution.{name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of a run.

    Attributes:
      source: where they are: what ``--data`` takes (`xmod_jax.data.sources`). A label: data may
        move, and one folder has many spellings.
      hash: fingerprint of their content (`Dataset.hash`), by which a run knows its data; empty
        while nobody has looked at them.
    """

    source: str = "embedded"
    hash: str = dataclasses.field(default="", metadata=_ADDED)

    def __post_init__(self) -> None:
        settle(self)

    @property
    def content(self) -> str:
        """What the data are known by: their fingerprint, or their name before it is known."""
        return self.hash or self.source

    def __str__(self) -> str:
        return f"{self.source} (content {self.hash})" if self.hash else self.source


@dataclasses.dataclass(frozen=True)
class Start:
    """The weights that a run starts from instead of random ones.

    Attributes:
      directory: where they were read: a run directory, or a folder of another library. A label:
        the folder may move.
      hash: identity of what was read: the run's (`identity.config_hash`), or that of the imported
        weights.
      step: of the checkpoint.
      sparse: what sparse layers that the weights do not hold begin with.
    """

    directory: str
    hash: str
    step: int = 0
    sparse: SparseStart = SparseStart.NEW

    def __post_init__(self) -> None:
        settle(self)
        _not_negative(self, "step")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run; what a run directory's config.json holds.

    Attributes:
      experiment: name of the experiment the run belongs to.
      name: name of the run within it (what ``--only`` and ``--run`` take).
      architecture: ``"dense"``, ``"mod"``, ``"xmod"``, ...
      family: backbone family; runs are compared with the dense curve of their family.
      scale: ``"mini"`` or ``"paper"``.
      model: the architecture.
      train: what its training computes.
      data: what it is trained and evaluated on.
      start: weights that it starts from; None: random ones.
      execution: how it is executed.
      budget: factor of the scale's compute that its steps come from; a label.
      suffix: what sets its directory apart from that of the same run with a sweep's first seed, for
        instance ``"_seed1"``; a label.
    """

    experiment: str
    name: str
    architecture: str
    family: str
    scale: str
    model: ModelConfig
    train: TrainConfig
    data: DataConfig = DataConfig()
    start: Start | None = dataclasses.field(default=None, metadata=_ADDED)
    execution: Execution = Execution()
    budget: float = dataclasses.field(default=1.0, metadata=_ADDED)
    suffix: str = dataclasses.field(default="", metadata=_ADDED)

    def __post_init__(self) -> None:
        settle(self)
        if self.train.batch_size % self.execution.accumulation:
            raise ValueError(
                f"batch_size {self.train.batch_size} is not a multiple of accumulation "
                f"{self.execution.accumulation}"
            )

    @property
    def folder(self) -> str:
        """The name of its run directory in a sweep."""
        return self.name + self.suffix

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return self.train.batch_size // self.execution.accumulation


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionary of a configuration, ready for JSON."""
    return typing.cast(dict[str, Any], json.loads(json.dumps(_plain(config))))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    entries = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {
        field.name: _plain(entry)
        for field, entry in entries
        if not (field.metadata == _ADDED and entry == field.default)
    }


def from_dict(kind: type[T], values: Any) -> T:
    """Rebuilds a dataclass from its JSON form, a configuration for instance from `to_dict`'s.

    Raises:
      ValueError: unknown or missing fields, values of another type or that `kind` refuses.
    """
    return typing.cast(T, _build(kind, values, kind.__name__))


def _build(kind: Any, value: Any, where: str) -> Any:
    """`value` as the annotation `kind` says; ValueError where it is something else."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) - set(hints):
            raise ValueError(f"{where}: unknown or malformed fields in {value!r}")
        built = {key: _build(hints[key], entry, f"{where}.{key}") for key, entry in value.items()}
        try:
            return typing.cast(Any, kind)(**built)
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: not a list: {value!r}")
        return tuple(_build(typing.get_args(kind)[0], entry, where) for entry in value)
    if isinstance(kind, types.UnionType):
        present = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _build(present[0], value, where)
    if issubclass(kind, enum.Enum):
        return kind(value)
    # A whole number may stand for a float, as it does in JSON; True is no number.
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: {value!r} is not of type {kind.__name__}")
    return value
