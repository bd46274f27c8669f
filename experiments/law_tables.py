"""Tables about the scaling law, as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xmod_jax.law import identifiability, validate
from xmod_jax.law.fit import Fit, Quality
from xmod_jax.law.observations import Table
from xmod_jax.law.terms import COEFFICIENTS, Law


def coefficients(fitted: Fit, count: int) -> str:
    """Coefficients beside the paper's, and the quality on the `count` fitted observations."""
    paper = Law.paper()
    lines = ["coefficient        fitted         paper"]
    for name in COEFFICIENTS:
        lines.append(f"{name:<11}{getattr(fitted.law, name):>14.6g}{getattr(paper, name):>14.6g}")
    if fitted.exposure is not None:
        for name in ("v", "eta_D", "rho_D"):
            lines.append(f"{name:<11}{getattr(fitted.exposure, name):>14.6g}")
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


def beyond(table: Table, predicted: np.ndarray) -> str:
    """Rows that were never fitted, predicted by the law as fitted."""
    lines = ["not fitted: L       N_act      K     A   observed  predicted     error"]
    for i in range(len(table)):
        lines.append(
            f"{table.L[i]:>13.0f}{table.n_act[i]:>12.4g}{table.K[i]:>7g}{table.A[i]:>6g}"
            f"{table.delta[i]:>11.4f}{predicted[i]:>11.4f}{predicted[i] - table.delta[i]:>10.4f}"
        )
    lines.append(f"{len(table)} rows: {_quality(Quality.of(table.delta, predicted))}\n")
    return "\n".join(lines)


def _group(name: str, value: float) -> str:
    return f"{name}={value:.6g}".ljust(18)


def _quality(quality: Quality) -> str:
    return (
        f"R2 on Delta {quality.r2_delta:.4f}, RMSE {quality.rmse:.5f} nats, "
        f"MAE {quality.mae:.5f} nats"
    )
