"""How long runs will take: hardware FLOPs over a rate that was recorded, or else measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable

from xmod_jax import accounting
from xmod_jax.config import Compute, RunConfig
from xmod_jax.records import RunRecord

# Share of a bare matrix product's rate that a training step reaches; only for a first guess.
EFFICIENCY = 0.3
PROBE_SECONDS = 0.2


def work(run: RunConfig) -> float:
    """Hardware FLOPs of a whole run: training steps and evaluations."""
    train, every = run.train, run.execution.eval_every
    step = accounting.run_hardware_flops_per_token(run)
    forward = accounting.forward_hardware_flops_per_token(run.model, train.context_length)
    evaluations = math.ceil(train.steps / every) if every else 1
    # Sparse models are evaluated under three routing rules.
    passes = 3 if run.model.hierarchy.sparse_layers else 1
    held_out = evaluations * passes * train.eval_sequences * train.context_length
    return step * train.tokens + forward * held_out


def recorded_rate(runs: Iterable[RunRecord]) -> float | None:
    """Hardware FLOPs per second of training, the median over runs; None without a record."""
    rates = []
    for run in runs:
        speeds = [record["tokens_per_s"] for record in run.train if record.get("tokens_per_s")]
        if speeds:
            rates.append(statistics.median(speeds) * run.accounting["hardware_flops_per_token"])
    return statistics.median(rates) if rates else None


def measured_rate(run: RunConfig) -> float:
    """A first guess in hardware FLOPs per second: a matrix product of the run's size, timed."""
    import jax  # here, because a plan made from records needs no device
    import jax.numpy as jnp

    backbone = run.model.backbone
    rows = min(4096, run.train.tokens_per_step)
    dtype = jnp.bfloat16 if run.model.compute is Compute.BFLOAT16 else jnp.float32
    x = jnp.ones((rows, backbone.d_model), dtype)
    weight = jnp.ones((backbone.d_model, backbone.d_ff), dtype)
    product = jax.jit(jnp.matmul)
    product(x, weight).block_until_ready()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < PROBE_SECONDS:
        product(x, weight).block_until_ready()
        count += 1
    flops = 2 * count * rows * backbone.d_model * backbone.d_ff
    return EFFICIENCY * jax.device_count() * flops / (time.perf_counter() - start)
