"""The layer hierarchy of a sparse-depth model: which layers are dense, which are sparse.

The paper's hierarchy (SPEC 1): ``[Dense] x N0 + ([Sparse(K)] x (A*K) + [Dense]) x N1``.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from xmod_jax.fields import settle

_NAME = re.compile(r"A(?P<stride>\d+(?:\.\d+)?)K(?P<sparsity>-?\d+(?:\.\d+)?)", re.IGNORECASE)
MOD_SPARSITY = 8


@dataclasses.dataclass(frozen=True)
class StageGroup:
    """`count` identical stages, each of `sparse_layers` sparse layers and then its dense anchor.

    Attributes:
      count: number of stages.
      sparse_layers: sparse layers of one stage.
      anchor: whether a dense layer ends each stage.
      attentions: full-attention layers of one stage (Routed-FFN); each stands before an equal share
        of its sparse layers.
    """

    count: int
    sparse_layers: int
    anchor: bool = True
    attentions: int = 0

    def __post_init__(self) -> None:
        settle(self)
        if self.attentions < 0 or (self.attentions and self.sparse_layers % self.attentions):
            raise ValueError(
                f"{self.sparse_layers} sparse layers cannot be shared by {self.attentions} "
                "attention layers"
            )
        if self.count < 1 or self.sparse_layers < 1:
            raise ValueError(
                f"a stage group needs at least one stage and one sparse layer, got {self.count} "
                f"stages of {self.sparse_layers}"
            )


@dataclasses.dataclass(frozen=True)
class Hierarchy:
    """Dense prefix, then groups of stages in order.

    Attributes:
      prefix: number of dense layers before the first stage (N0).
      groups: the stages; a shorter first stage is a group of its own.
      sparsity: K, a sparse layer updates 1/K of a sequence's tokens.
    """

    prefix: int
    groups: tuple[StageGroup, ...] = ()
    sparsity: int = 1

    def __post_init__(self) -> None:
        settle(self)
        if self.prefix < 0:
            raise ValueError(f"prefix must be at least 0 dense layers, got {self.prefix}")
        if self.sparsity < 1:
            raise ValueError(f"token sparsity K must be at least 1, got {self.sparsity}")
        if self.depth == 0:
            raise ValueError("a hierarchy needs at least one layer")

    @property
    def sparse_layers(self) -> int:
        """Number of sparse layers in the model."""
        return sum(group.count * group.sparse_layers for group in self.groups)

    @property
    def dense_layers(self) -> int:
        """Number of dense layers in the model, prefix and anchors together."""
        return self.prefix + sum(group.count for group in self.groups if group.anchor)

    @property
    def attention_layers(self) -> int:
        """Number of attention-only layers (Routed-FFN)."""
        return sum(group.count * group.attentions for group in self.groups)

    @property
    def depth(self) -> int:
        """Number of layers, dense and sparse; attention-only ones belong to sparse FFNs."""
        return self.dense_layers + self.sparse_layers

    @property
    def active_depth(self) -> Fraction:
        """Layers that a token passes on average (active-equivalent depth)."""
        return self.dense_layers + Fraction(self.sparse_layers, self.sparsity)

    @property
    def anchor_stride(self) -> Fraction:
        """A: average sparse updates of a token in a regular (the last) stage; 0 when dense."""
        if not self.groups:
            return Fraction(0)
        return Fraction(self.groups[-1].sparse_layers, self.sparsity)

    @classmethod
    def dense(cls, depth: int) -> Hierarchy:
        """`depth` dense layers."""
        return cls(prefix=depth)

    @classmethod
    def mod(cls, active_depth: int = 28, sparsity: int = MOD_SPARSITY) -> Hierarchy:
        """The MoD baseline: a dense layer, then alternating sparse and dense ones (SPEC 1)."""
        return cls._of_stride(Fraction(1, sparsity), sparsity, active_depth, prefix=1, name="mod")

    def routed_ffn(self) -> Hierarchy:
        """The same with sparse layers that are FFNs: ``(attention + K sparse FFNs) x A + anchor``.

        Raises:
          ValueError: A is not an integer.
        """
        groups = []
        for group in self.groups:
            attentions, rest = divmod(group.sparse_layers, self.sparsity)
            if rest:
                raise ValueError(
                    f"routed FFNs need an integer A, got {group.sparse_layers}/{self.sparsity}"
                )
            groups.append(dataclasses.replace(group, attentions=attentions))
        return dataclasses.replace(self, groups=tuple(groups))

    def without_anchors(self) -> Hierarchy:
        """All sparse layers in one stage behind the prefix, as many as hold the active depth."""
        sparse = (self.active_depth - self.prefix) * self.sparsity
        return Hierarchy(self.prefix, (StageGroup(1, int(sparse), anchor=False),), self.sparsity)

    @classmethod
    def from_name(cls, name: str, active_depth: int = 28, prefix: int = 4) -> Hierarchy:
        """Builds a hierarchy from ``"dense"``, ``"mod"`` or ``"A<stride>K<sparsity>"``.

        Args:
          name: for instance ``"A3K16"``: 3 sparse updates per token and stage, K = 16.
          active_depth: active-equivalent depth to hold, ``N0 + sum over stages of (1 + A)``.
          prefix: N0, dense layers at the start. Ignored for dense and MoD.

        Raises:
          ValueError: unknown name, K < 1, A*K not an integer, or a depth that cannot be met.
        """
        if name.lower() == "dense":
            return cls.dense(active_depth)
        if name.lower() == "mod":
            return cls.mod(active_depth)
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"hierarchy {name!r} is not 'dense', 'mod' or 'A<stride>K<sparsity>'")
        sparsity = Fraction(match["sparsity"])
        if sparsity < 1 or sparsity.denominator != 1:
            raise ValueError(f"{name}: token sparsity K must be an integer of at least 1")
        return cls._of_stride(Fraction(match["stride"]), int(sparsity), active_depth, prefix, name)

    @classmethod
    def _of_stride(
        cls, stride: Fraction, sparsity: int, active_depth: int, prefix: int, name: str
    ) -> Hierarchy:
        sparse = stride * sparsity
        if stride <= 0 or sparse.denominator != 1:
            raise ValueError(
                f"{name}: A*K must be a positive integer, got {float(stride):g}*{sparsity} = "
                f"{float(sparse):g}"
            )
        rest = active_depth - prefix
        stages, short = divmod(Fraction(rest), 1 + stride) if rest > 0 else (0, Fraction(-1))
        # Where 1+A does not divide the rest, the first stage is the shorter one (SPEC 1).
        short_sparse = (short - 1) * sparsity
        if stages < 1 or (short and (short_sparse < 0 or short_sparse.denominator != 1)):
            raise ValueError(
                f"{name}: active depth {active_depth} with {prefix} prefix layers cannot be met by "
                f"stages of active depth {float(1 + stride):g} (a shorter first stage allowed)"
            )
        groups = [StageGroup(int(stages), int(sparse))]
        if short_sparse > 0:
            groups.insert(0, StageGroup(1, int(short_sparse)))
        # A remainder of one layer is an anchor without sparse layers: one more prefix layer.
        return cls(prefix + (short == 1), tuple(groups), sparsity)
