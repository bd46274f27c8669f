"""What the routers of a model do: coverage, overlap, updates of a token, agreement (SPEC 10).

An interval is a run of consecutive sparse layers between layers that change every token; the
token-choice bias starts again behind it. Intervals of equal length T are taken together, those of
another length (a shorter first stage) stand beside them. All is reduced on the device, where the
stages already count by segments; the host receives sums of T + 1 numbers a batch.

Shapes: B sequences, L context, T sparse layers of an interval, N stages, P intervals of a stage.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from xmod_jax.config import from_dict
from xmod_jax.errors import UserError
from xmod_jax.inference.batches import NOT_FINITE
from xmod_jax.model import Decoder, Threshold, Thresholds, TopK


class Sums(NamedTuple):
    """Statistics of a batch summed over the N*P*B sequence-intervals of one stage group.

    Attributes:
      coverage: share of a sequence's tokens that some layer of the interval updated.
      jaccard: overlap of consecutive layers, where it is defined.
      defined: int32, number of sequence-intervals with an overlap, that is with a pair of
        consecutive layers of which one routed a token.
      updates: int32 [T + 1], token-intervals with 0, 1, ... T updates.
    """

    coverage: jax.Array
    jaccard: jax.Array
    defined: jax.Array
    updates: jax.Array


def threshold_sums(model: Decoder, tokens_BL: jax.Array, route: Threshold) -> tuple[Sums, ...]:
    """The statistics of a threshold-driven pass, by stage group; for `jax.jit`."""
    _, outputs = model(tokens_BL, route)
    return tuple(
        Sums(
            len(tokens_BL) * jnp.sum(out.coverage),
            jnp.nansum(out.jaccard_B),
            jnp.sum(~jnp.isnan(out.jaccard_B)),
            jnp.sum(out.updates, axis=(0, 1)),
        )
        for out in outputs
    )


def topk_agreement(model: Decoder, tokens_BL: jax.Array) -> jax.Array:
    """Share of the token-layers of a top-k-driven pass where r >= 0.5 decides as top-k does.

    NaN where the states are not finite: routers that read NaN agree on nothing.
    """
    states_BLD, outputs = model(tokens_BL, TopK())
    share = jnp.mean(jnp.concatenate([out.agreement_S.ravel() for out in outputs]))
    return jnp.where(jnp.all(jnp.isfinite(states_BLD)), share, jnp.nan)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a rule of selection would show over T layers.

    Attributes:
      coverage: share of tokens selected at least once.
      jaccard: overlap of consecutive layers' selections.
      updates: [T + 1] shares of tokens with 0, 1, ... T selections.
    """

    coverage: float
    jaccard: float
    updates: np.ndarray


def repeated_subset(layers: int, sparsity: int) -> Reference:
    """Every one of the T layers selects the same 1/K of the tokens: collapse (SPEC 10)."""
    share = 1 / sparsity
    updates = np.zeros(layers + 1)
    updates[0], updates[layers] = 1 - share, share
    return Reference(share, 1.0, updates)


def independent_subsets(layers: int, sparsity: int) -> Reference:
    """Each of the T layers selects every token with probability p = 1/K, independently (SPEC 10).

    Coverage ``1 - (1-p)^T``, Jaccard ``p / (2-p)``, counts Binomial(T, p).
    """
    share = 1 / sparsity
    updates = stats.binom.pmf(np.arange(layers + 1), layers, share)
    return Reference(1 - (1 - share) ** layers, share / (2 - share), updates)


@dataclasses.dataclass(frozen=True)
class Intervals:
    """The intervals of one length under one threshold.

    Attributes:
      layers: T, sparse layers of an interval.
      count: how many intervals of this length the model has.
      coverage: share of tokens updated at least once, mean over sequence-intervals.
      jaccard: overlap of consecutive layers, mean over the pairs of an interval with a non-empty
        union, then over sequence-intervals; None where no interval has such a pair (T = 1).
      updates: token-intervals with 0, 1, ... T updates.
    """

    layers: int
    count: int
    coverage: float
    jaccard: float | None
    updates: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.layers < 1 or len(self.updates) != self.layers + 1 or min(self.updates) < 0:
            raise ValueError(
                f"{self.layers} layers need counts of 0 to {self.layers} updates, got "
                f"{self.updates}"
            )
        if not sum(self.updates):
            raise ValueError("no token-interval was counted")

    @property
    def shares(self) -> np.ndarray:
        """[T + 1] shares of token-intervals with 0, 1, ... T updates."""
        return np.array(self.updates) / sum(self.updates)


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """What `diagnose` measures; `record` and `from_record` are its JSON form.

    Attributes:
      sparsity: K.
      sequences: held-out sequences seen.
      calibrated: under the calibrated thresholds, by length of interval, longest first.
      threshold: under the paper's r >= 0.5, likewise.
      agreement: share of token-layers of a top-k pass where r >= 0.5 decides as top-k does.
    """

    sparsity: int
    sequences: int
    calibrated: tuple[Intervals, ...]
    threshold: tuple[Intervals, ...]
    agreement: float

    def __post_init__(self) -> None:
        if self.sparsity < 1:
            raise ValueError(f"sparsity must be at least 1, got {self.sparsity}")

    def record(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Diagnostics:
        """Reads `record`'s form, whatever stands beside it; ValueError where it is not that."""
        names = {field.name for field in dataclasses.fields(cls)}
        return from_dict(cls, {name: value for name, value in record.items() if name in names})


def diagnose(
    model: Decoder,
    thresholds: Thresholds,
    batches: Iterable[np.ndarray],
    jit: Callable[..., Any] = jax.jit,
    progress: Callable[[int], None] = lambda sequences: None,
) -> Diagnostics:
    """Two threshold-driven passes and a top-k one over held-out batches.

    Args:
      model: a model with sparse layers.
      thresholds: calibrated thresholds of the biased logits, as of `Decoder.thresholds`.
      batches: int32 [B, L + 1]; the last token of a sequence is a target only.
      jit: compiles the passes.
      progress: told after every batch how many sequences were seen.

    Raises:
      ValueError: the model has no sparse layer, or there is no batch.
      UserError: the model's states are not finite.
    """
    hierarchy = model.config.hierarchy
    if not hierarchy.groups:
        raise ValueError("a model without sparse layers routes nothing")
    sums, agreement = jit(threshold_sums), jit(topk_agreement)
    routes = {"calibrated": Threshold(thresholds), "threshold": Threshold(model.thresholds())}
    parts: dict[str, list[tuple[Sums, ...]]] = {name: [] for name in routes}
    agreements, rows = [], []
    for tokens_BL1 in batches:
        tokens_BL = tokens_BL1[:, :-1]
        made = {name: sums(model, tokens_BL, route) for name, route in routes.items()}
        # Fetched at every batch: what is only queued is no progress.
        share, made = jax.device_get((agreement(model, tokens_BL), made))
        if not np.isfinite(share):
            raise UserError(NOT_FINITE)
        for name, part in made.items():
            parts[name].append(part)
        agreements.append(share)
        rows.append(len(tokens_BL))
        progress(sum(rows))
    if not rows:
        raise ValueError("no held-out batch")
    passes = {name: _by_length(model, part, sum(rows)) for name, part in parts.items()}
    pooled = float(np.average(agreements, weights=rows))
    return Diagnostics(hierarchy.sparsity, sum(rows), **passes, agreement=pooled)


def _by_length(
    model: Decoder, batches: list[tuple[Sums, ...]], sequences: int
) -> tuple[Intervals, ...]:
    """Groups of equal interval length together, over all batches, longest first."""
    counts: dict[int, int] = collections.Counter()
    lists: dict[int, list[Sums]] = collections.defaultdict(list)
    for index, group in enumerate(model.config.hierarchy.groups):
        of_a_stage = max(1, group.attentions)
        layers = group.sparse_layers // of_a_stage
        counts[layers] += group.count * of_a_stage
        lists[layers] += [batch[index] for batch in batches]
    measured = []
    for layers in sorted(counts, reverse=True):
        # In float64 and int64: a large evaluation has more token-intervals than int32 holds.
        columns = zip(*lists[layers], strict=True)
        coverage, jaccard, defined, updates = (np.sum(np.array(c, "f8"), axis=0) for c in columns)
        measured.append(
            Intervals(
                layers,
                counts[layers],
                float(coverage / (sequences * counts[layers])),
                float(jaccard / defined) if defined else None,
                tuple(int(count) for count in updates),
            )
        )
    return tuple(measured)
