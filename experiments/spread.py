"""A number over several seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
      values: one for each seed, at least one.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """The values that are known and finite; None where none is."""
        known = tuple(v for v in values if v is not None and math.isfinite(v))
        return cls(known) if known else None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for a single seed."""
        deviation = self.deviation
        return None if deviation is None else deviation / math.sqrt(len(self.values))
