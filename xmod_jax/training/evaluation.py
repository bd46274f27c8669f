"""Held-out loss under top-k, the paper's threshold and the calibrated one, named apart (SPEC 3).

Top-k routing looks at the whole sequence and is not causal; its loss is a diagnostic, never the
result. Shapes: B sequences, L context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xmod_jax import sharding
from xmod_jax.model import Decoder, Route, Threshold, Thresholds, TopK
from xmod_jax.nn import collectives
from xmod_jax.nn.moe import ExpertOutput
from xmod_jax.training.compilation import jit
from xmod_jax.training.loss import cross_entropy

# A statistic that is not defined, until it is on the host. They are shares, and a NaN that leaves a
# program ends it where JAX is asked to look for NaNs.
_UNDEFINED = -1.0

Evaluator = Callable[[Decoder, Thresholds, Iterable[np.ndarray]], dict[str, float | None]]


def batch_statistics(model: Decoder, tokens_BL1: jax.Array, route: Route) -> dict[str, jax.Array]:
    """Mean loss of a batch under one routing, and statistics of the routing.

    Returns:
      ``loss``; under top-k ``agreement``, the share of token-layers on which the 0.5 threshold
      would decide the same; under a threshold ``routed``, the share of token-layers routed, and
      ``coverage`` and ``jaccard`` of the intervals between dense layers (SPEC 10). -1: undefined.
    """
    states_BLD, outputs = model(tokens_BL1[:, :-1], route)
    targets_BL = tokens_BL1[:, 1:]
    ones_BL = jnp.ones(targets_BL.shape, jnp.float32)
    loss = cross_entropy(states_BLD, model.whole_head(), targets_BL, ones_BL) / targets_BL.size
    fields = {"agreement_S": "agreement"}
    if isinstance(route, Threshold):
        fields = {"routed_S": "routed", "coverage": "coverage", "jaccard_B": "jaccard"}
    stages = [out for out in outputs if not isinstance(out, ExpertOutput)]
    statistics = {
        name: jnp.concatenate([getattr(out, field).ravel() for out in stages])
        for field, name in fields.items()
        if stages
    }
    mean = lambda value: collectives.batch_nanmean(value, _UNDEFINED)
    means = {name: mean(value) for name, value in statistics.items()}
    return {"loss": collectives.batch_mean(loss)} | means


def compiled_statistics(
    mesh: Mesh | None,
) -> Callable[[Decoder, np.ndarray, Route], dict[str, jax.Array]]:
    """`batch_statistics` of a batch that every process holds whole."""
    if mesh is None:
        return jit(batch_statistics)
    sharding.check_axes(mesh)

    def on_mesh(model: Decoder, tokens_BL1: jax.Array, route: Route, spec: P) -> Any:
        specs = (sharding.specs(model), spec, P())
        run = jax.shard_map(
            batch_statistics, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
        )
        return run(model, tokens_BL1, route)

    program = jit(on_mesh, static_argnums=3)

    def run(model: Decoder, tokens_BL1: np.ndarray, route: Route) -> dict[str, jax.Array]:
        spec = sharding.batch_spec(len(tokens_BL1), mesh)
        return program(model, sharding.spread(tokens_BL1, mesh, spec), route, spec)

    return run


def make_evaluator(mesh: Mesh | None = None) -> Evaluator:
    """An evaluator that compiles once per shape of batch.

    It takes a model, its calibrated thresholds and held-out batches (int32 [B, L + 1]; weighed by
    rows) and gives the fields of an evaluation record; None where a statistic is undefined.
    """
    compiled = compiled_statistics(mesh)

    def evaluate(
        model: Decoder, thresholds: Thresholds, batches: Iterable[np.ndarray]
    ) -> dict[str, float | None]:
        routes: dict[str, Route] = {"topk": TopK()}
        if model.config.hierarchy.groups:
            routes["threshold"] = Threshold(model.thresholds())
            routes["calibrated"] = Threshold(thresholds)
        parts: dict[str, list[Any]] = {name: [] for name in routes}
        rows = []
        for tokens_BL1 in batches:
            rows.append(len(tokens_BL1))
            # One batch ahead of the device, not all: whoever stops the batches waits for few.
            jax.block_until_ready([values[-2:-1] for values in parts.values()])
            for name, route in routes.items():
                parts[name].append(compiled(model, tokens_BL1, route))
        fetched = {name: list(map(_defined, each)) for name, each in jax.device_get(parts).items()}
        means = {name: _weighted(values, rows) for name, values in fetched.items()}
        return _record(means)

    return evaluate


def _defined(statistics: dict[str, Any]) -> dict[str, Any]:
    """With NaN in place of what is undefined."""
    empty = lambda name, value: name != "loss" and value == _UNDEFINED
    return {n: np.float32("nan") if empty(n, v) else v for n, v in statistics.items()}


def _weighted(values: list[dict[str, Any]], rows: list[int]) -> dict[str, float]:
    """Means over batches by their rows; of a statistic over the batches that define it."""
    means = {}
    for name in values[0]:
        column, weights = np.array([value[name] for value in values]), np.array(rows)
        if name != "loss" and not np.isnan(column).all():
            column, weights = column[~np.isnan(column)], weights[~np.isnan(column)]
        means[name] = float(np.average(column, weights=weights))
    return means


def _record(means: dict[str, dict[str, float]]) -> dict[str, float | None]:
    """Flat fields; a dense model routes nothing, so its three losses are one."""
    top_k = means["topk"]
    threshold, calibrated = (means.get(name, top_k) for name in ("threshold", "calibrated"))
    fields = {
        "loss_topk": top_k["loss"],
        "loss_threshold": threshold["loss"],
        "loss_calibrated": calibrated["loss"],
        "routed_threshold": threshold.get("routed"),
        "routed_calibrated": calibrated.get("routed"),
        "coverage_threshold": threshold.get("coverage"),
        "coverage": calibrated.get("coverage"),
        "jaccard_threshold": threshold.get("jaccard"),
        "jaccard": calibrated.get("jaccard"),
        "agreement": top_k.get("agreement"),
    }
    # A statistic may be undefined (an interval of one layer has no pairs); a loss may not.
    defined = lambda name, value: name.startswith("loss") or (value is not None and value == value)
    return {name: value if defined(name, value) else None for name, value in fields.items()}
