"""The scaling law of the matched-FLOPs residual: its terms, its coefficients, its file.

SPEC section 8 (paper section on the scaling law). All arithmetic is NumPy float64 and broadcasts.

Units. N and N_act are plain parameter counts, input embedding and output head included (SPEC 5); L
is plain tokens. Table 8 prints no units; only this choice makes its coefficients sensible. At
556M and A = 1 it puts the best integer K at 3, 6, 10, 16, 24 for L = 2k, 4k, 8k, 16k, 32k (the
paper: 3 at 2k, growing with L). N in millions puts it at 8 for 2k and N in billions at 13; L in
thousands makes Delta +2 to +22 nats. Against the published matched-FLOPs losses the law is then
0.00 to 0.05 nats too pessimistic: A4K8 -0.180, -0.175, -0.169 (table 1: -0.224, -0.208, -0.172) and
A3K16 -0.217, -0.210, -0.203 (-0.270, -0.233, -0.209) at 556M, 936M, 1.65B, and -0.129 for A1K16 at
936M (table 3: -0.159). Leaving the embeddings out of N changes this by less than 0.01 nats.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from xmod_jax import storage
from xmod_jax.config import from_dict
from xmod_jax.errors import UserError

Array = NDArray[np.float64]


def capacity_reward(n_act: ArrayLike, n_total: ArrayLike, eta_N: Any, rho_N: Any) -> Array:
    """R_N = N_act^-eta_N * (1 - (N/N_act)^-rho_N), the sparse-capacity reward.

    Args:
      n_act: active-equivalent parameters. Positive.
      n_total: total parameters N.
      eta_N, rho_N: exponents; arrays of another leading axis broadcast over candidates.
    """
    log_act, log_total = np.log(np.asarray(n_act, float)), np.log(np.asarray(n_total, float))
    # expm1 keeps the digits of a reward close to 0 (N close to N_act, or a small exponent).
    return -np.exp(-eta_N * log_act) * np.expm1(-rho_N * (log_total - log_act))


def context_penalty(L: ArrayLike, K: ArrayLike, eta_L: Any, rho_L: Any) -> Array:
    """P_L = L^-eta_L * (K^rho_L - 1), the sparse-context correction.

    Args:
      L: context length in tokens.
      K: token sparsity.
      eta_L, rho_L: exponents; arrays of another leading axis broadcast over candidates.
    """
    return np.exp(-eta_L * np.log(np.asarray(L, float))) * np.expm1(
        rho_L * np.log(np.asarray(K, float))
    )


def stride_interaction(K: ArrayLike, A: ArrayLike, rho_K: Any, rho_A: Any) -> Array:
    """R_AK = (K^rho_K - 1) * ((2A/(A+1))^rho_A - 1), the anchor-stride interaction; 0 at A = 1.

    Args:
      K: token sparsity.
      A: anchor stride.
      rho_K, rho_A: exponents; arrays of another leading axis broadcast over candidates.
    """
    stride = np.asarray(A, float)
    return np.expm1(rho_K * np.log(np.asarray(K, float))) * np.expm1(
        rho_A * np.log(2 * stride / (stride + 1))
    )


def exposure_penalty(
    K: ArrayLike, tokens: ArrayLike, dense_tokens: ArrayLike, eta_D: Any, rho_D: Any
) -> Array:
    """P_D = D_dense^-eta_D * (((D_sparse/K)/D_dense)^-rho_D - 1), the candidate's exposure term.

    Args:
      K: token sparsity.
      tokens: D_sparse, training tokens of the sparse run.
      dense_tokens: D_dense, training tokens of the dense reference at equal FLOPs.
      eta_D, rho_D: exponents; arrays of another leading axis broadcast over candidates.
    """
    log_dense = np.log(np.asarray(dense_tokens, float))
    log_share = np.log(np.asarray(tokens, float)) - np.log(np.asarray(K, float)) - log_dense
    return np.exp(-eta_D * log_dense) * np.expm1(-rho_D * log_share)


@dataclasses.dataclass(frozen=True)
class Exposure:
    """The term ``+ v * P_D`` that the paper tried and dropped; v >= 0 (SPEC 8, candidate only)."""

    v: float
    eta_D: float
    rho_D: float

    def delta(self, K: ArrayLike, tokens: ArrayLike, dense_tokens: ArrayLike) -> Array:
        """Contribution to Delta in nats; arguments as of `exposure_penalty`, broadcasting."""
        return self.v * exposure_penalty(K, tokens, dense_tokens, self.eta_D, self.rho_D)


@dataclasses.dataclass(frozen=True)
class Law:
    """Delta = e - u*R_N + w*P_L - z*R_AK in nats, with u, w, z >= 0 (SPEC 8; units above)."""

    e: float
    u: float
    eta_N: float
    rho_N: float
    w: float
    eta_L: float
    rho_L: float
    z: float
    rho_K: float
    rho_A: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"coefficient {field.name} is not a number: {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"coefficient {field.name} is not finite: {value}")
            if field.name in ("u", "w", "z") and value < 0:
                raise ValueError(f"coefficient {field.name} must be at least 0, got {value}")
            object.__setattr__(self, field.name, float(value))  # NumPy has no large integers

    @classmethod
    def paper(cls) -> Law:
        """The published coefficients (table 8, reduced law; N in parameters, L in tokens)."""
        return cls(
            e=0.01848,
            u=0.93519,
            eta_N=0.07784,
            rho_N=1.19538,
            w=105.21108,
            eta_L=0.92624,
            rho_L=0.48494,
            z=0.07455,
            rho_K=0.79900,
            rho_A=0.28293,
        )

    def delta(
        self, n_act: ArrayLike, n_total: ArrayLike, L: ArrayLike, K: ArrayLike, A: ArrayLike
    ) -> Array:
        """Predicted loss minus the dense loss at equal FLOPs, in nats; arguments broadcast."""
        return (
            self.e
            - self.u * capacity_reward(n_act, n_total, self.eta_N, self.rho_N)
            + self.w * context_penalty(L, K, self.eta_L, self.rho_L)
            - self.z * stride_interaction(K, A, self.rho_K, self.rho_A)
        )


COEFFICIENTS = tuple(field.name for field in dataclasses.fields(Law))
LEVEL = 0.9  # coverage of an interval unless asked otherwise


@dataclasses.dataclass(frozen=True)
class Draws:
    """The law refitted to resampled observations (`xmod_jax.law.bootstrap`).

    Attributes:
      laws: one for each draw, B of them.
      seed: of the draws.
      level: share of the draws that an interval holds, between equal tails.
      noise: standard deviation of one training's Delta around the law, in nats.
      clusters: number of sweeps whose residuals were resampled.
    """

    laws: tuple[Law, ...]
    seed: int
    level: float
    noise: float
    clusters: int

    def __post_init__(self) -> None:
        if not self.laws or not 0 < self.level < 1 or not 0 <= self.noise < math.inf:
            raise ValueError(
                f"a bootstrap needs draws, a level in (0, 1) and a noise of at least 0, got "
                f"{len(self.laws)} draws, level {self.level}, noise {self.noise}"
            )

    def delta(
        self, n_act: ArrayLike, n_total: ArrayLike, L: ArrayLike, K: ArrayLike, A: ArrayLike
    ) -> Array:
        """Every draw's Delta [B, ...] in nats; arguments as of `Law.delta`."""
        return np.stack([law.delta(n_act, n_total, L, K, A) for law in self.laws])

    def interval(self, values_B: ArrayLike, method: Any = "linear") -> Array:
        """Lower and upper end [2, ...] of the draws' values [B, ...]; method of `np.quantile`."""
        tail = (1 - self.level) / 2
        return np.quantile(np.asarray(values_B), [tail, 1 - tail], axis=0, method=method)

    def run_interval(self, delta_B: Array) -> Array:
        """Ends [2] for one training's Delta: the law's uncertainty and a training's own noise."""
        normal = special.ndtri((np.arange(200) + 0.5) / 200)
        return self.interval(np.add.outer(np.asarray(delta_B), self.noise * normal).ravel())

    def coefficients(self) -> dict[str, Array]:
        """The draws [B] of every coefficient."""
        columns = np.array([dataclasses.astuple(law) for law in self.laws]).T
        return dict(zip(COEFFICIENTS, columns, strict=True))

    def record(self) -> dict[str, Any]:
        """The form that law.json keeps: plain numbers, with every coefficient's interval."""
        columns = self.coefficients()
        return {
            "seed": self.seed,
            "level": self.level,
            "noise": self.noise,
            "clusters": self.clusters,
            "intervals": {name: self.interval(values).tolist() for name, values in columns.items()},
            "draws": {name: values.tolist() for name, values in columns.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Draws:
        """Reads `record`'s form; KeyError, TypeError or ValueError where it is not that."""
        columns = [record["draws"][name] for name in COEFFICIENTS]
        laws = [dict(zip(COEFFICIENTS, row, strict=True)) for row in zip(*columns, strict=True)]
        own = {name: record[name] for name in ("seed", "level", "noise", "clusters")}
        return from_dict(cls, {"laws": laws} | own)


@dataclasses.dataclass(frozen=True)
class LawFile:
    """What law.json holds beside the coefficients (a format that other programs may rely on).

    Attributes:
      law: the coefficients.
      r2_delta: share of Delta's variance explained, in range; None where unknown.
      rmse: root mean square error of the raw loss in nats.
      mae: mean absolute error of the raw loss in nats.
      n_observations: number of observations fitted.
      ranges: smallest and largest fitted value of each of L, n_act, K, A, n_total/n_act, flops
        (training compute), dense_tokens (training tokens of the dense reference) and K_strided (K
        where A is not 1). A file of an earlier version has no flops.
      validated: what was predicted with its group withheld, and how well; empty: nothing was.
      seeds_agree: whether independent starts of the fit reached the same law.
      warnings: what the data leave undetermined, a sentence each.
      candidate: the law with P_D and how it compares with this one; empty: not tried.
      bootstrap: draws of the coefficients, for intervals; None: not drawn.
    """

    law: Law
    r2_delta: float | None
    rmse: float | None
    mae: float | None
    n_observations: int
    ranges: Mapping[str, tuple[float, float]]
    validated: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seeds_agree: bool = True
    warnings: tuple[str, ...] = ()
    candidate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bootstrap: Draws | None = None

    def __post_init__(self) -> None:
        for law in (self.law, *(self.bootstrap.laws if self.bootstrap else ())):
            _check_exponents(law)
        for name, (low, high) in self.ranges.items():
            if low > high:
                raise ValueError(f"the range of {name} ends below its start: {low}, {high}")
            if low <= 0:
                raise ValueError(f"the range of {name} must be above 0, got {low}, {high}")
        for name in ("rmse", "mae", "n_observations"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        if self.r2_delta is not None and self.r2_delta > 1:
            raise ValueError(f"r2_delta is at most 1, got {self.r2_delta}")

    @classmethod
    def paper(cls) -> LawFile:
        """The published law with its quality and the ranges of its sweeps (SPEC 7).

        Compute is that published for the smallest and for the largest size of the sweeps.
        """
        ranges = {"L": (2048.0, 32768.0), "n_act": (161.6e6, 914.3e6)}
        ranges |= {"K": (2.0, 20.0), "A": (0.5, 5.0), "K_strided": (4.0, 16.0)}
        ranges |= {"flops": (3e19, 1.5e20)}
        return cls(Law.paper(), 0.9853, 0.008758, None, 109, ranges)

    def save(self, path: pathlib.Path) -> None:
        """Writes the file; a reader sees the old or the new one, never half of it."""
        record = dataclasses.asdict(dataclasses.replace(self, bootstrap=None))
        record = record.pop("law") | record
        record["bootstrap"] = self.bootstrap.record() if self.bootstrap else None
        storage.write_json(path, record)

    @classmethod
    def load(cls, path: pathlib.Path) -> LawFile:
        """Reads a law.json; only the ten coefficients are required.

        Raises:
          UserError: no such file, not JSON, or a coefficient missing or impossible.
        """
        record = storage.read_json(path)
        missing = [name for name in COEFFICIENTS if name not in record]
        if missing:
            raise UserError(f"{path}: not a law.json: missing {', '.join(missing)}")
        try:
            named = {"rmse": record.get("rmse_reduced")} | record  # as table 8 calls it
            quality = from_dict(_Quality, {k: named[k] for k in _QUALITY if k in named})
            return cls(
                law=Law(**{name: record[name] for name in COEFFICIENTS}),
                ranges={name: _range(ends) for name, ends in record.get("ranges", {}).items()},
                validated=dict(record.get("validated", {})),
                candidate=dict(record.get("candidate", {})),
                bootstrap=Draws.from_record(drawn) if (drawn := record.get("bootstrap")) else None,
                **vars(quality),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a law.json: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Quality:
    """Fields of `LawFile` that are plain values, with what they are in a file that lacks them."""

    r2_delta: float | None = None
    rmse: float | None = None
    mae: float | None = None
    n_observations: int = 0
    seeds_agree: bool = True
    warnings: tuple[str, ...] = ()


_QUALITY = tuple(field.name for field in dataclasses.fields(_Quality))


def _check_exponents(law: Law) -> None:
    """Refuses what no fit gives; one may look a step beyond its bounds on the way."""
    for name, value in dataclasses.asdict(law).items():
        if name.startswith("eta") and value < 0:
            raise ValueError(f"coefficient {name} must be at least 0, got {value}")
        # At 0 its term is 0 whatever the others are.
        if name.startswith("rho") and value <= 0:
            raise ValueError(f"coefficient {name} must be above 0, got {value}")


def _range(ends: Any) -> tuple[float, float]:
    low, high = ends
    if isinstance(low, bool) or isinstance(high, bool):
        raise ValueError(f"a range has two numbers, got {ends}")
    return 0.0 + low, 0.0 + high  # TypeError for what is no number
