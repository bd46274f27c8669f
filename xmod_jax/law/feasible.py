"""What a design may choose from: the hierarchies that exist for a backbone and its limits.

The search covers every hierarchy that can be built (A*K whole, active depth met). It stays where
the law was fitted in A, and for A > 1 also in the K that were seen there: with A the predicted gain
only grows, and for A > 1 the stride term grows faster in K than the context penalty, so outside the
data the law would always ask for more. At A <= 1 it has an optimum in K, and K is searched beyond
the fitted range. `Request.extrapolate` lifts these limits.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from xmod_jax import accounting
from xmod_jax.config import BACKBONES, MAX_COUNT, Backbone, ModelConfig
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy

LARGEST_K = 256  # of the search; the paper's largest is 24
DEEPEST = 1000  # largest active depth; the paper's is 28
_COUNT = re.compile(r"(?P<number>[0-9.]+(e[+-]?[0-9]+)?)(?P<unit>[kMBT]?)", re.ASCII)
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_OFF = 0.1  # a scaled backbone may miss the size that was asked for by this share


@dataclasses.dataclass(frozen=True)
class Request:
    """What a model is wanted for.

    Attributes:
      train_flops: C, training compute in PAPER FLOPs (forward count).
      context: L, tokens.
      backbone: sizes of a layer.
      active_depth: active-equivalent layers, held by every candidate.
      prefix: N0, dense layers at the start.
      stride: A, where it is given; None: searched.
      sparsity: K, where it is given; None: searched.
      max_params: largest total parameters N; None: no limit.
      max_depth: largest number of layers; None: no limit.
      extrapolate: search K and A beyond the fitted ranges.
    """

    train_flops: float
    context: int
    backbone: Backbone
    active_depth: int = 28
    prefix: int = 4
    stride: float | None = None
    sparsity: int | None = None
    max_params: float | None = None
    max_depth: int | None = None
    extrapolate: bool = False

    def __post_init__(self) -> None:
        for name in ("train_flops", "max_params", "max_depth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name} must be positive and finite, got {value:g}")
        if not 1 <= self.context <= MAX_COUNT:
            raise UserError(f"context must be from 1 to {MAX_COUNT} tokens")
        if not 1 <= self.active_depth <= DEEPEST:
            raise UserError(f"active_depth must be from 1 to {DEEPEST} layers")
        if self.sparsity is not None and not 2 <= self.sparsity <= self.context // 2:
            raise UserError(
                f"K must be from 2 to L/2 = {self.context // 2}: a sparse layer that routes a "
                "single token attends to nothing else"
            )

    def model(self, name: str) -> ModelConfig:
        """The model of a hierarchy's name; ValueError where there is none."""
        hierarchy = Hierarchy.from_name(name, self.active_depth, self.prefix)
        return ModelConfig(self.backbone, hierarchy)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A feasible hierarchy: token sparsity, anchor stride, its model, N and number of layers."""

    K: int
    A: float
    model: ModelConfig
    total_params: int

    @property
    def name(self) -> str:
        """As `Hierarchy.from_name` takes it: ``"A3K16"``."""
        return hierarchy_name(self.K, self.A)

    @property
    def depth(self) -> int:
        """Layers, dense and sparse."""
        return self.model.hierarchy.depth


def hierarchy_name(K: int, A: float) -> str:
    """``"A0.5K8"`` for K = 8 and A = 0.5."""
    return f"A{A:g}K{K}"


def candidates(request: Request, ranges: Mapping[str, tuple[float, float]]) -> list[Candidate]:
    """Every hierarchy that meets a request but for its limits, by A, then K.

    Args:
      request: the request.
      ranges: the law's fitted ranges; limits as the head of this module tells.

    Raises:
      UserError: there is none.
    """
    found, reasons = [], []
    for stride in _strides(request, ranges):
        for sparsity in _sparsities(request, stride, ranges):
            try:
                model = request.model(hierarchy_name(sparsity, stride))
            except ValueError as error:
                reasons.append(str(error))
                continue
            found.append(Candidate(sparsity, stride, model, accounting.total_parameters(model)))
    if not found:
        reason = reasons[0] if reasons else f"L = {request.context} is too short for K >= 2"
        raise UserError(f"no hierarchy meets the request: {reason}")
    return found


def within_limits(found: Sequence[Candidate], request: Request) -> list[Candidate]:
    """Those of `found` that keep the request's `max_params` and `max_depth`.

    Raises:
      UserError: there is none.
    """
    params = math.inf if request.max_params is None else request.max_params
    depth = math.inf if request.max_depth is None else request.max_depth
    within = [c for c in found if c.total_params <= params and c.depth <= depth]
    if not within:
        least = min(found, key=lambda candidate: candidate.total_params)
        raise UserError(
            f"no hierarchy stays within the limits: the smallest, {least.name}, has "
            f"{least.total_params:.4g} parameters and {least.depth} layers"
        )
    return within


def _strides(request: Request, ranges: Mapping[str, tuple[float, float]]) -> list[float]:
    if request.stride is not None:
        return [request.stride]
    low, high = (0.0, math.inf) if request.extrapolate else ranges.get("A", (0.0, math.inf))
    largest = request.active_depth - request.prefix - 1  # one stage, its anchor apart
    strides = [0.5, *(float(stride) for stride in range(1, largest + 1))]
    # Where nothing fits, A = 1 lets the hierarchy say why.
    return [stride for stride in strides if low <= stride <= high] or [1.0]


def _sparsities(
    request: Request, stride: float, ranges: Mapping[str, tuple[float, float]]
) -> Sequence[int]:
    if request.sparsity is not None:
        return [request.sparsity]
    largest = min(LARGEST_K, request.context // 2)
    if stride > 1 and not request.extrapolate:
        largest = min(largest, int(ranges.get("K_strided", (2, largest))[1]))
    return range(2, largest + 1)


def count(text: str) -> float:
    """A number of parameters from ``"10B"``, ``"556M"``, ``"5.4e8"``.

    Raises:
      UserError: anything else, or not above 0.
    """
    match = _COUNT.fullmatch(text.strip())
    try:
        value = float(match["number"]) * _UNITS[match["unit"]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise UserError(f"{text!r} is not a number of parameters: write 10B, 700M or 7e8")
    return value


def backbone_of_size(text: str, active_depth: int) -> Backbone:
    """The backbone for an N_act.

    A name of table 4 (``"556M"``) is that backbone. A number is met by table 4's nearest, its width
    and FFN scaled (in steps of 64) until the dense model of `active_depth` has about as many
    parameters, embedding and head included; heads stay.

    Raises:
      UserError: not a number, or none within 10% of it.
    """
    if text in BACKBONES:
        return BACKBONES[text]
    asked = count(text)

    def error(backbone: Backbone) -> float:
        dense = ModelConfig(backbone, Hierarchy.dense(active_depth))
        return abs(math.log(accounting.n_act(dense) / asked))

    near = min(BACKBONES.values(), key=error)
    share = near.d_ff / near.d_model
    scaled = (
        dataclasses.replace(near, d_model=width, d_ff=64 * round(share * width / 64))
        for width in range(64, 64 * 512, 64)
    )
    best = min(scaled, key=error)
    if error(best) > _OFF:
        raise UserError(
            f"no backbone of depth {active_depth} has about {text} parameters: "
            "give its sizes with --backbone"
        )
    return best


def backbone_of_sizes(sizes: Sequence[str]) -> Backbone:
    """The backbone of ``D,E,H,G,F[,V]``: width, head dimension, heads, KV heads, FFN, vocabulary.

    Raises:
      UserError: not five or six whole numbers, or sizes that do not fit together.
    """
    try:
        if len(sizes) not in (5, 6):
            raise ValueError(f"needs 5 or 6 sizes D,E,H,G,F[,V], got {len(sizes)}")
        return Backbone(*(int(size) for size in sizes))
    except ValueError as error:
        raise UserError(f"backbone {','.join(sizes)}: {error}") from error
