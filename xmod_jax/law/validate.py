"""How well the law predicts what it has not seen (SPEC section 8).

Whole groups are withheld in turn (every L, every N_act, every A but 1), the law is refitted without
them and predicts them. Rows beyond the fitted range are predicted by the law as fitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmod_jax.errors import UserError
from xmod_jax.law import identifiability
from xmod_jax.law.fit import DEFAULT_SEARCH, Quality, fit
from xmod_jax.law.observations import Table
from xmod_jax.law.stage import Search

Array = NDArray[np.float64]

# The candidate with P_D must predict withheld groups better by this share to earn its place.
WORTH = 0.05


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows withheld together.

    Attributes:
      variable: ``"L"``, ``"n_act"`` or ``"A"``.
      value: its value in the group.
      mask: the rows, bool [n].
    """

    variable: str
    value: float
    mask: NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A group and what the law fitted without it says: Delta [m] in nats.

    `refused` tells why the other rows do not determine the law; nothing is predicted then.
    """

    group: Group
    observed: Array
    predicted: Array
    refused: str | None = None

    @property
    def quality(self) -> Quality:
        """Errors of the prediction; of no meaning where it was refused."""
        return Quality.of(self.observed, self.predicted)


def groups(table: Table) -> list[Group]:
    """The groups of a table in order of variable and value.

    L is withheld within the sweep that varies L (A = 1, an N_act seen at several L), N_act within
    the one that varies N_act (A = 1, an L seen with several N_act). Withholding every row of the
    context length at which the scale and anchor sweeps were made, or of the N_act of the K-L sweep,
    would leave nothing to fit a scale dependence from.
    """
    reference = identifiability.is_reference_stride(table)
    found = []
    sizes = identifiability.one_size(table.n_act)
    for variable, values, others in (("L", table.L, sizes), ("n_act", sizes, table.L)):
        swept = np.zeros(len(table), bool)
        for other in np.unique(others[reference]):
            row = reference & (others == other)
            if len(np.unique(values[row])) > 1:
                swept |= row
        for value in np.unique(values[swept]):
            found.append(Group(variable, float(value), swept & (values == value)))
    strides = identifiability.distinct(table.A[~reference])
    return found + [Group("A", float(stride), stride == table.A) for stride in strides]


def withhold(
    table: Table,
    search: Search = DEFAULT_SEARCH,
    candidate: bool = False,
    progress: Callable[[Sequence[Group]], Iterable[Group]] = iter,
) -> list[Prediction]:
    """Predicts every group with the law fitted to all other rows.

    Args:
      table: in-range observations.
      search: effort and seed of each refit.
      candidate: validate the law with the exposure term P_D.
      progress: wraps the groups, for a progress bar.
    """
    predictions = []
    for group in progress(groups(table)):
        withheld = table.select(group.mask)
        try:
            law = fit(table.select(~group.mask), search, candidate)
            predictions.append(Prediction(group, withheld.delta, law.predict(withheld)))
        except UserError as error:
            nothing = np.zeros(0)
            predictions.append(Prediction(group, nothing, nothing, refused=str(error)))
    return predictions


def held_out(predictions: Iterable[Prediction], variable: str | None = None) -> Quality | None:
    """Errors over all rows of the groups (of one variable); None where no group was predicted."""
    chosen = [
        prediction
        for prediction in predictions
        if prediction.refused is None and variable in (None, prediction.group.variable)
    ]
    if not chosen:
        return None
    observed = np.concatenate([prediction.observed for prediction in chosen])
    return Quality.of(observed, np.concatenate([prediction.predicted for prediction in chosen]))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Errors without and with P_D over the same rows: groups that both laws predicted.

    Attributes:
      groups: number of those groups.
      rows: of their rows, each counted as often as it was withheld.
      without, including: quality of the law without and with P_D; None without such a group.
    """

    groups: int
    rows: int
    without: Quality | None
    including: Quality | None

    @property
    def supported(self) -> bool | None:
        """Whether the law does about as well without P_D; None where nothing tells."""
        if self.without is None or self.including is None:
            return None
        return self.without.rmse <= self.including.rmse * (1 + WORTH)


def compare(reduced: Iterable[Prediction], candidate: Iterable[Prediction]) -> Comparison:
    """Compares the laws without and with P_D on the withheld groups that both predict."""
    sides = [
        {(p.group.variable, p.group.value): p for p in side if p.refused is None}
        for side in (reduced, candidate)
    ]
    common = [key for key in sides[0] if key in sides[1]]
    without, including = ([side[key] for key in common] for side in sides)
    rows = sum(len(prediction.observed) for prediction in without)
    return Comparison(len(common), rows, held_out(without), held_out(including))


def record(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The errors in nats by variable and group, as law.json keeps them under ``validated``."""
    by_variable: dict[str, Any] = {}
    for variable in ("L", "n_act", "A"):
        quality = held_out(predictions, variable)
        members = [p for p in predictions if p.group.variable == variable]
        if not members:
            continue
        by_variable[variable] = {
            "rmse": quality.rmse if quality else None,
            "mae": quality.mae if quality else None,
            "groups": [
                {"value": p.group.value, "refused": p.refused}
                if p.refused
                else {
                    "value": p.group.value,
                    "rows": len(p.observed),
                    "rmse": p.quality.rmse,
                    "mean_error": float(np.mean(p.predicted - p.observed)),
                }
                for p in members
            ],
        }
    return by_variable
