"""What is measured of one model on the devices of a node: each check by itself, as plain JSON.

A check is described by a `Check`; `perform` does it in this process. `suites.isolated` runs a list
of them so that one that fails, or ends its process, costs no other.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

from experiments.suites import machine, models, profile
from experiments.suites.timing import Row
from xmod_jax import accounting
from xmod_jax.config import Compute, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

# Peak bfloat16 FLOPs a second of a device, dense, from its maker, by a part of its name.
_PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
}
_STATE_BYTES = 16  # a parameter's: itself, its gradient, two moments, float32
_LARGEST_PRODUCT = {"cpu": 1024}
_ATTENTION_ERROR = 0.02  # of outputs of size 1, bfloat16 against float32
_LOSS_ERROR = 0.02  # nats
_COSINE = 0.99  # of the two gradients of a dense model


@dataclasses.dataclass(frozen=True)
class Check:
    """One measurement.

    Attributes:
      kind: a name among `KINDS`.
      model: ``"dense"``, ``"mod"``, ``"moe_8_64"``, ``"A4K8"``, ...
      size: backbone of table 4.
      context: the paper's L, tokens; at mini scale what stands for it.
      batch: sequences of a step.
      scale: ``"paper"`` or ``"mini"``.
      compute: precision of products.
      mesh: devices along each axis.
      steps: measured training steps.
      forward: whether the validation forward pass is measured too.
    """

    kind: str
    model: str
    size: str
    context: int
    batch: int
    scale: str = "paper"
    compute: str = Compute.BFLOAT16.value
    mesh: str = "data:1"
    steps: int = 3
    forward: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.model} {self.size} L={self.context}"

    @property
    def length(self) -> int:
        """Tokens of a sequence at this scale."""
        from experiments.scales import SCALES

        return SCALES[self.scale].context(self.context)

    def model_config(self) -> ModelConfig:
        """The model at this scale."""
        from experiments.scales import SCALES

        scale = SCALES[self.scale]
        backbone = scale.backbone(self.size)
        return models.config(self.model, scale.active_depth, backbone, Compute(self.compute))

    def run_config(self) -> RunConfig:
        """A run of as many steps as are measured, with the recipe's optimiser."""
        train = TrainConfig(
            context_length=self.length,
            batch_size=self.batch,
            steps=self.steps + 1,
            optimizer=OptimizerConfig(),
        )
        family = f"{self.size}_{self.scale}"
        return RunConfig(
            "systems", self.model, self.model, family, self.scale, self.model_config(), train
        )

    def needed_bytes(self) -> float:
        """Least memory of a device: parameters, gradients and optimiser, cut over the mesh."""
        from xmod_jax.sharding import MeshShape

        parts = MeshShape.parse(self.mesh)
        return (
            _STATE_BYTES
            * accounting.exact_parameters(self.model_config())
            / (parts.fsdp * parts.tensor)
        )


def perform(check: Check) -> Row:
    """Does a check in this process.

    Raises:
      MemoryError: a device holds not even the model's state.
      Exception: whatever the device's software raises.
    """
    import jax

    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    needed = check.needed_bytes()
    if limit is not None and check.kind == "step" and needed > limit:
        raise MemoryError(
            f"needs {needed / 1e9:.0f} GB for parameters and optimiser, has {limit / 1e9:.0f} GB"
        )
    return KINDS[check.kind](check)


def _step(check: Check) -> Row:
    """Seconds of a training step, optimiser included; tokens a second, MFU, memory of a device."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from xmod_jax import sharding
    from xmod_jax.training.step import abstract_state, initial_state, make_step

    run = check.run_config()
    shape = sharding.MeshShape.parse(check.mesh)
    shape.check(run)
    mesh = shape.make()
    draw = models.random_tokens(run.model, check.batch, check.length + 1)
    tokens = sharding.spread(draw, mesh, P(sharding.BATCH_AXES))
    begin = time.perf_counter()
    step = jax.jit(make_step(run, mesh), donate_argnums=0)
    compiled = step.lower(abstract_state(run, mesh), tokens).compile()
    row: Row = {"compile_s": time.perf_counter() - begin}
    state = initial_state(run, mesh)
    seconds, losses = [], []
    for _ in range(check.steps + 1):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, tokens))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(metrics.loss))
    row |= _speed(check, run.model, seconds[1:], shape.size)
    row |= {"loss": losses[-1], "ok": bool(np.isfinite(losses).all())}
    row |= _memory(compiled)
    if check.forward:
        row |= _forward(check, state, draw, mesh)
    return row


def _speed(check: Check, model: ModelConfig, seconds: list[float], devices: int) -> Row:
    rate = check.batch * check.length / statistics.median(seconds)
    row: Row = {
        "layers": model.hierarchy.depth,
        "parameters": accounting.total_parameters(model),
        "step_s": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "tokens/s": rate,
    }
    peak, product = _peak(), _product_rate(check.compute)
    own = rate * accounting.train_hardware_flops_per_token(model, check.length, recompute=False)
    from xmod_jax.nn.attention import is_fused

    saved = not is_fused(model.compute.value)
    done = rate * accounting.train_hardware_flops_per_token(
        model, check.length, saved_attention=saved
    )
    row["mfu"] = None if peak is None else accounting.mfu(own, peak * devices)
    row["of_product"] = done / (product * devices)
    return row


def _peak() -> float | None:
    import jax

    kind = jax.devices()[0].device_kind
    return next((peak for name, peak in _PEAKS.items() if name in kind), None)


@functools.cache
def _product_rate(compute: str) -> float:
    """FLOPs a second of a large product on one device, the best of a few."""
    import jax

    size = _LARGEST_PRODUCT.get(jax.default_backend(), 8192)
    call, flops = machine.product(compute, size)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return flops / min(seconds)


def _memory(compiled: Any) -> Row:
    """Bytes of a device: what the compiled step plans, and the most that was in use."""
    import jax

    analysis = compiled.memory_analysis()
    planned = None
    if analysis is not None:
        planned = (
            analysis.argument_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes
            + analysis.temp_size_in_bytes
        ) / 1e9
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {"planned_GB": planned, "peak_GB": None if peak is None else peak / 1e9}


def _forward(check: Check, state: Any, draw: Any, mesh: Any) -> Row:
    """A pass of validation under threshold routing, thresholds as the steps calibrated them."""
    import jax

    from xmod_jax.model import Threshold
    from xmod_jax.training.evaluation import compiled_statistics

    run = compiled_statistics(mesh)
    seconds = []
    for _ in range(check.steps + 1):
        begin = time.perf_counter()
        found = jax.block_until_ready(run(state.model, draw, Threshold(state.thresholds)))
        seconds.append(time.perf_counter() - begin)
    routed = found.get("routed")
    return {
        "forward_s": statistics.median(seconds[1:]),
        "forward_tokens/s": check.batch * check.length / statistics.median(seconds[1:]),
        "routed": None if routed is None else float(routed),
    }


def _gradients(check: Check, compute: Compute) -> Any:
    """Loss and gradient of one batch, the same parameters and tokens whatever the precision."""
    import jax
    import numpy as np

    from xmod_jax.training.step import training_loss

    config = dataclasses.replace(check.model_config(), compute=compute)
    model = models.random_model(config)
    tokens = jax.device_put(models.random_tokens(config, check.batch, check.length + 1))
    objective = lambda model: training_loss(model, tokens, 0.0)[0]
    with jax.default_matmul_precision("highest" if compute is Compute.FLOAT32 else "default"):
        loss, gradient = jax.jit(jax.value_and_grad(objective))(model)
    return float(loss), [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(gradient)]


def _precision(check: Check) -> Row:
    """Loss and gradient in bfloat16 against float32; a routed model turns decisions over too."""
    import numpy as np

    wide_loss, wide = _gradients(check, Compute.FLOAT32)
    loss, narrow = _gradients(check, Compute.BFLOAT16)
    dot, own, other = (
        sum(float(np.vdot(a, b)) for a, b in zip(first, second, strict=True))
        for first, second in ((wide, narrow), (wide, wide), (narrow, narrow))
    )
    cosine = dot / np.sqrt(own * other)
    routed = bool(check.model_config().hierarchy.groups)
    close = abs(loss - wide_loss) <= _LOSS_ERROR and (routed or cosine >= _COSINE)
    return {
        "loss_float32": wide_loss,
        "loss_bfloat16": loss,
        "gradient_cosine": float(cosine),
        "ok": bool(close),
    }


def _attention(check: Check) -> Row:
    """The attention that bfloat16 takes on this device against the blockwise one in float32."""
    import jax
    import jax.numpy as jnp

    from xmod_jax.nn.attention import ATTENTION_BLOCK, blockwise_attention, causal_attention

    layer = check.model_config().backbone
    shape = (check.batch, check.length)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    qkv = [
        jax.random.normal(jax.random.key(n), (*shape, count, layer.head_dim), jnp.bfloat16)
        for n, count in enumerate(heads)
    ]
    weight = jax.random.normal(jax.random.key(3), qkv[0].shape)

    def outcome(attend: Any, inputs: Any) -> Any:
        loss = lambda *inputs: jnp.sum(attend(*inputs)[0].astype(jnp.float32) * weight)
        output = jax.jit(lambda *inputs: attend(*inputs)[0])(*inputs)
        return output, *jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs)

    reference = functools.partial(blockwise_attention, block=ATTENTION_BLOCK)
    with jax.default_matmul_precision("highest"):
        wide = outcome(reference, [leaf.astype(jnp.float32) for leaf in qkv])
    narrow = outcome(causal_attention, qkv)
    errors = {}
    for name, a, b in zip(("output", "dq", "dk", "dv"), narrow, wide, strict=True):
        apart = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        errors[f"error_{name}"] = float(apart)
    return errors | {"ok": all(error <= _ATTENTION_ERROR for error in errors.values())}


def _routing(check: Check) -> Row:
    """Share of routing (gather, scatter, top-k, sort) in the gradient's time, from a trace."""
    import jax

    config = check.model_config()
    tokens = jax.device_put(models.random_tokens(config, check.batch, check.length + 1))
    text, seconds = profile.of_gradient(models.random_model(config), tokens, keep=False)
    return {"traced_s": sum(seconds.values())} | profile.by_kind(text, seconds)


KINDS = {
    "step": _step,
    "precision": _precision,
    "attention": _attention,
    "routing": _routing,
}
