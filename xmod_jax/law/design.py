"""From a law and a budget to K and A: the best feasible hierarchy, and how sure that is.

Legend: B draws of the bootstrap, M candidates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmod_jax import accounting
from xmod_jax.config import ModelConfig
from xmod_jax.errors import UserError
from xmod_jax.law.feasible import Candidate, Request, candidates, hierarchy_name, within_limits
from xmod_jax.law.terms import Law, LawFile

Array = NDArray[np.float64]

NEAR = 0.005  # nats; hierarchies this close to the best are as good
_TOLERANCE = 0.01  # share by which a value may lie outside a fitted range without a warning
_FLOAT32 = 4  # bytes
_SHOWN = 300  # characters of the fit's own warnings
# How messages call what ranges name, where they differ.
_LABELS = {"K_strided": "K at A other than 1", "flops": "train_flops"}


@dataclasses.dataclass(frozen=True)
class Asymptote:
    """The optimum at A = 1 for large K: ``K = factor * L^context * N_act^size`` (SPEC 8).

    Attributes:
      K: its value for the request, a real number.
      context: exponent of L, eta_L / (rho_N + rho_L).
      size: exponent of N_act, -eta_N / (rho_N + rho_L).
    """

    K: float
    context: float
    size: float


@dataclasses.dataclass(frozen=True)
class Design:
    """The answer to a request.

    Attributes:
      request: what was asked.
      best: the candidate with the smallest predicted Delta.
      delta: its predicted loss minus the dense loss at equal FLOPs, in nats.
      near: candidates within `NEAR` of it with their Delta, the best first.
      interval: ends for the law's Delta of `best`; None without bootstrap draws, as the next three.
      run_interval: ends for one training's Delta, its own noise included.
      K_interval, A_interval: ends for the best K and A, as each draw's law would choose.
      asymptote: the rule for large K; None where the law has no such optimum.
      warnings: what to know before trusting this, a sentence each.
    """

    request: Request
    best: Candidate
    delta: float
    near: tuple[tuple[Candidate, float], ...]
    interval: tuple[float, float] | None
    run_interval: tuple[float, float] | None
    K_interval: tuple[float, float] | None
    A_interval: tuple[float, float] | None
    asymptote: Asymptote | None
    warnings: tuple[str, ...]

    @property
    def dense(self) -> ModelConfig:
        """The dense model of equal backbone and active depth."""
        return self.request.model("dense")


def design(file: LawFile, request: Request) -> Design:
    """Finds the best K and A for a request under a law.

    Raises:
      UserError: no hierarchy meets the request and its limits, the compute is less than one
        sequence takes, or the law's coefficients give no number there.
    """
    searched = candidates(request, file.ranges)
    choices = within_limits(searched, request)
    _require_a_sequence(request)
    columns = _columns(request, choices)
    with np.errstate(all="ignore"):  # looked at below
        delta_M = file.law.delta(*columns)
    if not np.all(np.isfinite(delta_M)):
        raise UserError("the law's coefficients give no finite difference for this request")
    order = np.argsort(delta_M, kind="stable")
    best = int(order[0])
    near = order[delta_M[order] <= delta_M[best] + NEAR]
    intervals: dict[str, Any] = dict.fromkeys(("interval", "run", "K", "A"))
    if file.bootstrap is not None:
        with np.errstate(all="ignore"):
            draws_BM = file.bootstrap.delta(*columns)
        if not np.all(np.isfinite(draws_BM)):
            raise UserError("a bootstrap draw of the law gives no finite difference here")
        chosen_B = np.argmin(draws_BM, axis=1)
        intervals["interval"] = _pair(file.bootstrap.interval(draws_BM[:, best]))
        intervals["run"] = _pair(file.bootstrap.run_interval(draws_BM[:, best]))
        for name, values_M in (("K", columns[3]), ("A", columns[4])):
            # Quantiles that are draws, not means of two: half a K is no answer.
            ends = file.bootstrap.interval(values_M[chosen_B], method="inverted_cdf")
            intervals[name] = _pair(ends)
    return Design(
        request,
        choices[best],
        float(delta_M[best]),
        tuple((choices[i], float(delta_M[i])) for i in near),
        intervals["interval"],
        intervals["run"],
        intervals["K"],
        intervals["A"],
        asymptote(file.law, request),
        tuple(_warnings(file, request, searched, choices[best], float(delta_M[best]))),
    )


def _require_a_sequence(request: Request) -> None:
    dense, length = request.model("dense"), request.context
    tokens = accounting.tokens_for_flops(dense, length, request.train_flops)
    if tokens < length:
        least = accounting.training_flops(dense, length, length)
        raise UserError(
            f"train_flops = {request.train_flops:g} is less than the dense model takes for one "
            f"sequence of {length} tokens ({least:.3g})"
        )


def _columns(
    request: Request, choices: Sequence[Candidate]
) -> tuple[float, Array, int, Array, Array]:
    """What `Law.delta` takes: N_act, N [M], L, K [M], A [M]."""
    return (
        accounting.n_act(request.model("dense")),
        np.array([choice.total_params for choice in choices], float),
        request.context,
        np.array([choice.K for choice in choices], float),
        np.array([choice.A for choice in choices], float),
    )


def _pair(ends: Array) -> tuple[float, float]:
    return float(ends[0]), float(ends[1])


def asymptote(law: Law, request: Request) -> Asymptote | None:
    """The rule ``K ~ L^(eta_L/(rho_N+rho_L)) * N_act^(-eta_N/(rho_N+rho_L))`` with its factor.

    At A = 1 and large K, N/N_act is c*K, so Delta is ``-u N_act^-eta_N (1 - (c K)^-rho_N) + w
    L^-eta_L (K^rho_L - 1)`` and a constant; its derivative is 0 where
    ``K^(rho_N+rho_L) = u rho_N c^-rho_N N_act^-eta_N / (w rho_L L^-eta_L)``. None where u or w is
    0 or the hierarchy has no A = 1.
    """
    try:
        one, two = (request.model(hierarchy_name(k, 1)) for k in (2, 4))
    except ValueError:
        return None
    if law.u == 0 or law.w == 0:
        return None
    size = accounting.n_act(request.model("dense"))
    grown = accounting.total_parameters(two) - accounting.total_parameters(one)
    share = grown / (2 * size)  # c: N/N_act gained by one more K
    log_reward = math.log(law.u * law.rho_N) - law.rho_N * math.log(share)
    log_reward -= law.eta_N * math.log(size)
    log_penalty = math.log(law.w * law.rho_L) - law.eta_L * math.log(request.context)
    total = law.rho_N + law.rho_L
    try:
        K = math.exp((log_reward - log_penalty) / total)
    except OverflowError:  # for a law of extreme coefficients
        return None
    return Asymptote(K, law.eta_L / total, -law.eta_N / total)


def _warnings(
    file: LawFile,
    request: Request,
    searched: Sequence[Candidate],
    best: Candidate,
    delta: float,
) -> list[str]:
    found = _range_warnings(file.ranges, request, best) + _edge_warnings(request, searched, best)
    if delta >= 0:
        found.append("the law predicts no gain over the dense model at these FLOPs")
    if file.bootstrap is None:
        known = "unknown" if file.rmse is None else f"{file.rmse:.4g} nats on its own observations"
        found.append(f"no interval: the law has no bootstrap draws; its RMSE is {known}")
    if not file.seeds_agree:
        found.append("the fit of this law was not settled: its starts disagreed")
    if file.warnings:
        told = (
            f"the fit of this law has {len(file.warnings)} warning{'s' * (len(file.warnings) > 1)}"
        )
        found.append(f"{told} (in law.json): {'; '.join(file.warnings)[:_SHOWN]}")
    return found


def _range_warnings(
    ranges: Mapping[str, tuple[float, float]], request: Request, best: Candidate
) -> list[str]:
    dense = request.model("dense")
    size = accounting.n_act(dense)
    values = {
        "L": float(request.context),
        "n_act": float(size),
        "K" if best.A == 1 else "K_strided": float(best.K),
        "A": best.A,
        "n_total/n_act": best.total_params / size,
        "flops": request.train_flops,
        "dense_tokens": accounting.tokens_for_flops(dense, request.context, request.train_flops),
    }
    found = _unknown_ranges(ranges)
    for name, value in values.items():
        low, high = ranges.get(name, (value, value))
        if not low * (1 - _TOLERANCE) <= value <= high * (1 + _TOLERANCE):
            label = _LABELS.get(name, name)
            found.append(
                f"{label} = {value:.4g} lies outside the fitted range {low:.4g} to {high:.4g}: "
                "an extrapolation"
            )
    return found


def _unknown_ranges(ranges: Mapping[str, tuple[float, float]]) -> list[str]:
    """Tells what a law says nothing about; where it was fitted in tokens stands for its compute."""
    known = {*ranges, *(("flops",) if "dense_tokens" in ranges else ())}
    missing = [_LABELS.get(n, n) for n in ("L", "n_act", "K", "A", "flops") if n not in known]
    if not missing:
        return []
    return [f"the law names no fitted ranges of {', '.join(missing)}: nothing tells where it holds"]


def _edge_warnings(request: Request, searched: Sequence[Candidate], best: Candidate) -> list[str]:
    """Tells when the best stands at the end of the search, so that the law would go on.

    An end that `max_params` or `max_depth` sets is what was asked for and not told.
    """
    found = []
    for name, asked, value, largest in (
        ("K", request.sparsity, best.K, max(c.K for c in searched if c.A == best.A)),
        ("A", request.stride, best.A, max(c.A for c in searched)),
    ):
        if asked is None and value == largest:
            found.append(
                f"{name} = {value:g} is the largest that was searched: the law would still gain "
                "beyond it (--extrapolate leaves the fitted range)"
            )
    return found


def memory(model: ModelConfig) -> dict[str, int]:
    """Bytes of a training's float32 parameters and optimiser state, over all devices together.

    Muon keeps one momentum for every matrix inside a layer, AdamW two moments for the rest (SPEC
    6). Gradients take as much as the parameters while a step lasts; activations come on top.
    """
    matrices = sum(kind.count * kind.matrices for kind in accounting.layer_kinds(model))
    exact = accounting.exact_parameters(model)
    return {
        "parameters": _FLOAT32 * exact,
        "optimizer": _FLOAT32 * (matrices + 2 * (exact - matrices)),
    }


def record(found: Design, file: LawFile) -> dict[str, Any]:
    """The answer as JSON-ready numbers (a format that other programs may rely on).

    ``delta`` and the intervals are in nats; ``phi_ratio`` and ``hardware_flops_ratio`` compare one
    token with the dense model, in PAPER FLOPs and in executed FLOPs of training; ``tokens`` is what
    the compute buys, ``dense_tokens`` what it buys of the dense model; ``memory`` is in bytes.
    """
    request, model, length = found.request, found.best.model, found.request.context
    hardware = accounting.train_hardware_flops_per_token
    return {
        "K": found.best.K,
        "A": found.best.A,
        "hierarchy": found.best.name,
        "delta": found.delta,
        "interval": found.interval,
        "run_interval": found.run_interval,
        "K_interval": found.K_interval,
        "A_interval": found.A_interval,
        "level": file.bootstrap.level if file.bootstrap else None,
        "rmse": file.rmse,
        "layers": found.best.depth,
        "n_act": accounting.n_act(found.dense),
        "total_params": found.best.total_params,
        "phi_ratio": accounting.phi_ratio(model, length),
        "hardware_flops_ratio": hardware(model, length) / hardware(found.dense, length),
        "train_flops": request.train_flops,
        "context": length,
        "tokens": accounting.tokens_for_flops(model, length, request.train_flops),
        "dense_tokens": accounting.tokens_for_flops(found.dense, length, request.train_flops),
        "memory": memory(model),
        "near_optimal": [
            {
                "K": choice.K,
                "A": choice.A,
                "delta": delta,
                "total_params": choice.total_params,
                "layers": choice.depth,
            }
            for choice, delta in found.near
        ],
        "asymptotic": dataclasses.asdict(found.asymptote) if found.asymptote else None,
        "warnings": list(found.warnings),
    }
