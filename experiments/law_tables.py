"""Tables about the scaling law, as text for a terminal."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import tables
from xmod_jax.law import identifiability, validate
from xmod_jax.law.fit import Fit, Quality
from xmod_jax.law.observations import Table
from xmod_jax.law.terms import COEFFICIENTS, Draws, Law


def coefficients(fitted: Fit, count: int) -> str:
    """Coefficients beside the paper's, and the quality on the `count` fitted observations."""
    paper = Law.paper()
    lines = ["coefficient        fitted         paper"]
    for name in COEFFICIENTS:
        lines.append(
            f"{name:<11}{_number(getattr(fitted.law, name))}{_number(getattr(paper, name))}"
        )
    if fitted.exposure is not None:
        for name in ("v", "eta_D", "rho_D"):
            lines.append(f"{name:<11}{_number(getattr(fitted.exposure, name))}")
    lines.append(f"{count} observations: {_quality(fitted.quality)}\n")
    return "\n".join(lines)


def residuals(fitted: Fit, table: Table) -> str:
    """Residuals (observed minus fitted Delta, in nats) of every group of equal L, N_act, A, K."""
    residual = table.delta - fitted.predict(table)
    lines = ["group               rows      mean      RMSE    largest   mean Delta"]
    for name in ("L", "n_act", "A", "K"):
        tolerance = identifiability.N_ACT_TOLERANCE if name == "n_act" else 0.0
        values = getattr(table, name)
        for value in identifiability.distinct(values, tolerance):
            mask = (values >= value) & (values <= value * (1 + tolerance))
            part = residual[mask]
            lines.append(
                f"{_group(name, value)}{len(part):>6}{part.mean():>10.4f}"
                f"{np.sqrt(np.mean(part**2)):>10.4f}{np.abs(part).max():>11.4f}"
                f"{table.delta[mask].mean():>13.4f}"
            )
    return "\n".join(lines) + "\n"


def validation(predictions: Sequence[validate.Prediction]) -> str:
    """Errors (predicted minus observed Delta, in nats) of every group, fitted without it."""
    lines = ["withheld            rows      mean      RMSE    largest"]
    for prediction in predictions:
        label = _group(prediction.group.variable, prediction.group.value)
        if prediction.refused is not None:
            lines.append(f"{label}  not predicted: {prediction.refused}")
            continue
        error = prediction.predicted - prediction.observed
        lines.append(
            f"{label}{len(error):>6}{error.mean():>10.4f}{np.sqrt(np.mean(error**2)):>10.4f}"
            f"{np.abs(error).max():>11.4f}"
        )
    overall = validate.held_out(predictions)
    lines.append(f"all groups withheld: {_quality(overall)}\n" if overall else "")
    return "\n".join(lines)


def dropping(compared: validate.Comparison) -> str:
    """The verdict on the term P_D, and on how many rows it rests."""
    if compared.without is None or compared.including is None:
        return "No withheld group is predicted both with and without P_D: nothing tells its worth."
    verdict = "is supported" if compared.supported else "is NOT supported"
    return (
        f"Dropping P_D {verdict} by the {compared.rows} rows of the {compared.groups} groups that "
        f"both laws predict: RMSE {compared.without.rmse:.5f} nats without it, "
        f"{compared.including.rmse:.5f} with it."
    )


def repeated(warnings: Sequence[str]) -> str:
    """All warnings of a command, counted, for its end; empty without one."""
    if not warnings:
        return ""
    count = f"{len(warnings)} warning{'s' * (len(warnings) > 1)}"
    return "\n".join([f"\n{count}:", *(f"warning: {warning}" for warning in warnings)])


def beyond(table: Table, predicted: np.ndarray) -> str:
    """Rows that were never fitted, predicted by the law as fitted."""
    lines = ["not fitted: L       N_act      K     A   observed  predicted     error"]
    for i in range(len(table)):
        lines.append(
            f"{table.L[i]:>13.0f}{tables.short(table.n_act[i]):>12}{table.K[i]:>7g}{table.A[i]:>6g}"
            f"{table.delta[i]:>11.4f}{predicted[i]:>11.4f}{predicted[i] - table.delta[i]:>10.4f}"
        )
    lines.append(f"{len(table)} rows: {_quality(Quality.of(table.delta, predicted))}\n")
    return "\n".join(lines)


def intervals(fitted: Fit, draws: Draws) -> str:
    """Every coefficient with the interval that its bootstrap draws give."""
    lines = [f"coefficient        fitted    {draws.level:.0%} interval ({len(draws.laws)} draws)"]
    for name, values in draws.coefficients().items():
        low, high = draws.interval(values)
        lines.append(f"{name:<11}{_number(getattr(fitted.law, name))}{_number(low)}{_number(high)}")
    lines.append(
        f"{draws.clusters} sweeps resampled; a training lies {draws.noise:.4f} nats around the law "
        "(standard deviation)\n"
    )
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Observations and the Delta [n] predicted for them.

    Attributes:
      kind: ``"fitted"``, ``"withheld"`` (by a law fitted without the group) or ``"beyond"``.
      table: the observations.
      delta: predicted Delta [n] in nats.
      group: what was withheld together, as ``"L=2048"``; else empty.
    """

    kind: str
    table: Table
    delta: np.ndarray
    group: str = ""


def withheld(table: Table, predictions: Sequence[validate.Prediction]) -> list[Predicted]:
    """The groups of `table` that were predicted, without those that were refused."""
    return [
        Predicted(
            "withheld",
            table.select(prediction.group.mask),
            prediction.predicted,
            _group(prediction.group.variable, prediction.group.value).strip(),
        )
        for prediction in predictions
        if prediction.refused is None
    ]


def predictions_csv(predicted: Sequence[Predicted], draws: Draws | None) -> str:
    """A row for every prediction; low and high are the law's interval, empty where it has none.

    Rows withheld have none either: the draws are of the law that was fitted to them too.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = ("L", "n_act", "n_total", "K", "A")
    writer.writerow(["kind", "group", *columns, "observed", "predicted", "low", "high"])
    for part in predicted:
        values = [getattr(part.table, name) for name in columns]
        ends = np.full((2, len(part.table)), np.nan)
        if draws is not None and part.kind != "withheld":
            L, n_act, n_total, K, A = values
            ends = draws.interval(draws.delta(n_act, n_total, L, K, A))
        for row in zip(*values, part.table.delta, part.delta, *ends, strict=True):
            cells = ["" if np.isnan(value) else f"{value:.10g}" for value in row]
            writer.writerow([part.kind, part.group, *cells])
    return out.getvalue()


def design(answer: Mapping[str, Any]) -> str:
    """The recommendation of `xmod_jax.law.design.record`, for people."""
    memory = answer["memory"]
    level = answer["level"] or 0.0
    rows = [
        ("hierarchy", f"{answer['hierarchy']}, {answer['layers']} layers"),
        ("loss minus dense", f"{answer['delta']:+.4f} nats{_ends(answer['interval'], '+.4f')}"),
        ("one training's", _ends(answer["run_interval"], "+.4f").strip(" ,") or "-"),
        ("K", f"{answer['K']}{_ends(answer['K_interval'], 'g')}"),
        ("A", f"{answer['A']:g}{_ends(answer['A_interval'], 'g')}"),
        (
            "parameters",
            f"{tables.short(answer['total_params'])}, N_act {tables.short(answer['n_act'])}",
        ),
        ("phi / dense", f"{answer['phi_ratio']:.3f} (paper FLOPs of a token)"),
        ("hardware FLOPs / dense", f"{answer['hardware_flops_ratio']:.3f} (training, a token)"),
        (
            "tokens",
            f"{tables.short(answer['tokens'])}, dense {tables.short(answer['dense_tokens'])}",
        ),
        (
            "memory",
            f"{_bytes(memory['parameters'])} parameters, {_bytes(memory['optimizer'])} optimizer "
            "state, float32",
        ),
        ("rule for large K, A = 1", _rule(answer["asymptotic"])),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += [f"[..] are {level:.0%} intervals"] if answer["interval"] else []
    lines += ["", "within 0.005 nats of the best:", *_near(answer["near_optimal"]), ""]
    return "\n".join([*lines, repeated(answer["warnings"]).lstrip()]).rstrip()


def _ends(interval: Sequence[float] | None, digits: str) -> str:
    if interval is None:
        return ""
    return f", [{interval[0]:{digits}}, {interval[1]:{digits}}]"


def _bytes(size: float) -> str:
    return (
        f"{tables.number(size / 1e9, 3)} GB"
        if size >= 1e9
        else f"{tables.number(size / 1e6, 3)} MB"
    )


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _rule(rule: Mapping[str, float] | None) -> str:
    if rule is None:
        return "none: the fitted law has no such optimum"
    return f"K ~ L^{rule['context']:.3f} * N_act^{rule['size']:.3f}, here {rule['K']:.1f}"


def _near(choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """The near-optimal choices, one line for each A, and the one with the fewest parameters."""
    ordered = sorted(choices, key=lambda choice: (choice["A"], choice["K"]))
    lines = []
    for stride, group in itertools.groupby(ordered, lambda choice: choice["A"]):
        members = list(group)
        ends = members[0], members[-1]
        sparsities = _span(*(str(choice["K"]) for choice in ends))
        sizes = _span(*(tables.short(choice["total_params"]) for choice in ends))
        lines.append(f"  A = {stride:g}: K = {sparsities}, {sizes} parameters")
    least = min(choices, key=lambda choice: choice["total_params"])
    lines.append(
        f"  smallest: A = {least['A']:g}, K = {least['K']}, "
        f"{tables.short(least['total_params'])} parameters, {least['delta']:+.4f} nats"
    )
    return lines


def _group(name: str, value: float) -> str:
    written = tables.short(value) if name == "n_act" else tables.number(value)
    return f"{name}={written}".ljust(18)


def _number(value: float) -> str:
    return tables.number(value, 6).rjust(14)


def _quality(quality: Quality) -> str:
    return (
        f"R2 on Delta {quality.r2_delta:.4f}, RMSE {quality.rmse:.5f} nats, "
        f"MAE {quality.mae:.5f} nats"
    )
