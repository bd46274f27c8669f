"""The two scales of every experiment: `paper` as published, `mini` for two CPU cores.

Experiments speak in the paper's sizes (backbone ``"556M"``, context 32768); a scale turns them into
configurations. Hierarchies, K and A are the same at both. Sources: SPEC sections 6 and 7; what the
paper leaves open is decided in WORKSPACE.md.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np

from xmod_jax import accounting
from xmod_jax.config import (
    BYTE_VOCABULARY,
    Backbone,
    Compute,
    DataConfig,
    Execution,
    ModelConfig,
    MoE,
    OptimizerConfig,
    Routing,
    RunConfig,
    TrainConfig,
)
from xmod_jax.hierarchy import Hierarchy

PAPER_DEPTH = 28  # active layers of table 4's backbones
REFERENCE_CONTEXT = 32768  # tokens; the context of the main comparison
# Backbone: training compute C in paper FLOPs at 32k: the pilot and the main comparison (SPEC 6).
PUBLISHED_COMPUTE = {"165M": 3e19, "556M": 1e20, "936M": 1.5e20, "1.65B": 2.5e20}


def published_compute(n_act: float) -> float:
    """Training compute C (paper FLOPs) of a model of `n_act` active parameters at paper scale.

    Linear in log-log between the published points, its end segments continued: 298M, which has no
    published compute, gets 5.4e19. It does not depend on L. Not printed for the K, L and scale
    sweeps; decided to be that of the main comparison.
    """
    points = [
        (
            accounting.n_act(ModelConfig(Backbone.from_name(name), Hierarchy.dense(PAPER_DEPTH))),
            compute,
        )
        for name, compute in PUBLISHED_COMPUTE.items()
    ]
    x, y = np.log(np.array(points)).T
    segment = int(np.clip(np.searchsorted(x, math.log(n_act)) - 1, 0, len(x) - 2))
    slope = (y[segment + 1] - y[segment]) / (x[segment + 1] - x[segment])
    return math.exp(y[segment] + slope * (math.log(n_act) - x[segment]))


@dataclasses.dataclass(frozen=True)
class Scale(abc.ABC):
    """What turns an experiment's sizes into configurations.

    Attributes:
      name: ``"mini"`` or ``"paper"``.
      active_depth: active-equivalent depth of every run.
      prefix: N0, dense layers at the start of an X-MoD.
      tokens_per_step: tokens of an optimiser step, about the same at every L.
      micro_batches: micro-batches of a step; fewer where each would have under 8 sequences.
      eval_tokens: held-out tokens of an evaluation.
      evaluations: evaluations in a run, spread evenly, one at its end.
      checkpoints: checkpoints in a run, likewise.
      alignment: coefficient of the router alignment loss.
      peak_lr: peak learning rate.
      compute: precision of matrix products.
      data: source of tokens.
      budget: C of every run in paper FLOPs; None: what the backbone's size has, see `train_flops`.
    """

    name: str
    active_depth: int
    prefix: int
    tokens_per_step: int
    micro_batches: int
    eval_tokens: int
    evaluations: int
    checkpoints: int
    alignment: float
    peak_lr: float
    compute: Compute
    data: DataConfig
    budget: float | None = None

    @abc.abstractmethod
    def backbone(self, size: str) -> Backbone:
        """The backbone that stands for table 4's `size`."""

    @abc.abstractmethod
    def context(self, length: int) -> int:
        """The context length that stands for the paper's `length`, in tokens."""

    @abc.abstractmethod
    def train_flops(self, size: str) -> float:
        """C: paper FLOPs of every run whose backbone stands for `size`; the same at every L."""

    @abc.abstractmethod
    def family(self, size: str) -> str:
        """Name of the backbone family; a run is compared with its family's dense curve."""

    def holds(self, length: int, sparsity: int) -> bool:
        """Whether a sparse layer at the paper's `length` still routes two tokens or more."""
        return self.context(length) >= 2 * sparsity

    def hierarchy(self, name: str) -> Hierarchy:
        """`Hierarchy.from_name` at this scale's active depth and prefix."""
        return Hierarchy.from_name(name, self.active_depth, self.prefix)

    def run(
        self,
        experiment: str,
        name: str,
        architecture: str,
        hierarchy: Hierarchy,
        size: str = "556M",
        length: int = REFERENCE_CONTEXT,
        routing: Routing | None = None,
        moe: MoE | None = None,
    ) -> RunConfig:
        """One run at this scale.

        Args:
          experiment: the experiment's name.
          name: the run's name within it.
          architecture: ``"dense"``, ``"mod"``, ``"xmod"``, ``"moe"``, ...
          hierarchy: the layers.
          size: a backbone of table 4.
          length: the paper's context length, in tokens.
          routing: None for the X-MoD defaults.
          moe: experts in place of every FFN.
        """
        model = ModelConfig(self.backbone(size), hierarchy, routing or Routing(), self.compute, moe)
        train = self._train(model, size, length, cover=architecture == "dense")
        return RunConfig(
            experiment,
            name,
            architecture,
            self.family(size),
            self.name,
            model,
            train,
            self.data,
            execution=self._execution(train),
        )

    def dense(
        self, experiment: str, size: str = "556M", length: int = REFERENCE_CONTEXT, name="dense"
    ) -> RunConfig:
        """The dense reference of a backbone and length: K = 1."""
        return self.run(experiment, name, "dense", self.hierarchy("dense"), size, length)

    def xmod(
        self,
        experiment: str,
        hierarchy: str,
        size: str = "556M",
        length: int = REFERENCE_CONTEXT,
        suffix: str = "",
    ) -> RunConfig:
        """An X-MoD run, named after its hierarchy: ``"A4K8"`` is ``"xmod_a4k8"``."""
        name = f"xmod_{hierarchy.lower()}{suffix}"
        return self.run(experiment, name, "xmod", self.hierarchy(hierarchy), size, length)

    def moe(
        self,
        experiment: str,
        name: str,
        sparsity: int,
        size: str = "556M",
        granularity: int = 8,
        shared: int = 2,
    ) -> RunConfig:
        """A MoE run at L = 32k; see `MoE.fine_grained`."""
        experts = MoE.fine_grained(self.backbone(size), sparsity, granularity, shared)
        return self.run(experiment, name, "moe", self.hierarchy("dense"), size, moe=experts)

    def _train(self, model: ModelConfig, size: str, length: int, cover: bool) -> TrainConfig:
        context = self.context(length)
        batch = max(1, round(self.tokens_per_step / context))
        steps = accounting.steps_for_flops(
            model, context, self.budget or self.train_flops(size), batch * context, cover
        )
        return TrainConfig(
            context_length=context,
            batch_size=batch,
            steps=steps,
            alignment=self.alignment,
            eval_sequences=max(1, self.eval_tokens // context),
            optimizer=OptimizerConfig(peak_lr=self.peak_lr),
        )

    def _execution(self, train: TrainConfig) -> Execution:
        return Execution(
            accumulation=max(1, min(self.micro_batches, train.batch_size // 8)),
            eval_every=math.ceil(train.steps / self.evaluations),
            checkpoint_every=math.ceil(train.steps / self.checkpoints),
        )


class PaperScale(Scale):
    """As published."""

    def backbone(self, size: str) -> Backbone:
        """Table 4's own."""
        return Backbone.from_name(size)

    def context(self, length: int) -> int:
        """The paper's own."""
        return length

    def train_flops(self, size: str) -> float:
        """See `published_compute`."""
        dense = ModelConfig(self.backbone(size), Hierarchy.dense(self.active_depth))
        return published_compute(accounting.n_act(dense))

    def family(self, size: str) -> str:
        """The size; with another active depth than table 4's backbones, also that."""
        return size if self.active_depth == PAPER_DEPTH else f"{size}_depth{self.active_depth}"


class MiniScale(Scale):
    """Shrunk to seconds or minutes on two CPU cores."""

    def backbone(self, size: str) -> Backbone:
        """A sixteenth of the width and FFN, an eighth of the head dimension, 4 heads, bytes.

        556M becomes D = 64 with 4 heads of 16, 2 KV heads and d_ff = 192.
        """
        paper = Backbone.from_name(size)
        return Backbone(
            d_model=paper.d_model // 16,
            head_dim=paper.head_dim // 8,
            num_heads=4,
            num_kv_heads=2,
            d_ff=paper.d_ff // 16,
            vocab_size=BYTE_VOCABULARY,
        )

    def context(self, length: int) -> int:
        """32k becomes 256; from there three quarters of the paper's octaves, in multiples of 16.

        2k to 64k become 32, 48, 96, 160, 256, 432. A plain division would leave 2k so short that
        few K fit, and a floor would make two lengths of a sweep the same.
        """
        return 16 * round((length / REFERENCE_CONTEXT) ** 0.75 * 256 / 16)

    def train_flops(self, size: str) -> float:
        """What `MINI_DENSE_TOKENS` cost the dense model of that size at the 32k of this scale."""
        dense = ModelConfig(self.backbone(size), Hierarchy.dense(self.active_depth))
        return accounting.training_flops(dense, self.context(REFERENCE_CONTEXT), MINI_DENSE_TOKENS)

    def family(self, size: str) -> str:
        """Size and depth: the anchor sweep is deeper than the others."""
        return f"mini_{size}_depth{self.active_depth}"


PAPER = PaperScale(
    name="paper",
    active_depth=PAPER_DEPTH,
    prefix=4,
    tokens_per_step=5 * 2**19,  # "about 2.5M": a multiple of every L
    micro_batches=10,
    eval_tokens=200_000_000,
    evaluations=5,
    checkpoints=50,
    alignment=1e-4,
    peak_lr=3.2e-3,
    compute=Compute.BFLOAT16,
    data=DataConfig("data/fineweb_edu_gpt2"),
)
MINI_DENSE_TOKENS = 196_608
MINI = MiniScale(
    name="mini",
    active_depth=10,
    prefix=2,
    tokens_per_step=1024,
    micro_batches=1,
    eval_tokens=32_768,
    evaluations=2,
    checkpoints=2,
    alignment=1e-1,  # 1e-4 leaves the threshold 0.5 uncalibrated in a few hundred steps
    peak_lr=1.28e-2,  # best for dense among 3.2e-3, 1.28e-2 and 2.56e-2 in a few hundred steps
    compute=Compute.FLOAT32,
    data=DataConfig("embedded"),
)
SCALES: dict[str, Scale] = {"mini": MINI, "paper": PAPER}
