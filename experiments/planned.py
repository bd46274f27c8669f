"""What a run's compiled step takes of each device: `plan`'s numbers and their text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from experiments import hlo, tables
from experiments.hlo import Collective
from xmod_jax import accounting
from xmod_jax.config import RunConfig
from xmod_jax.sharding import MeshShape


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step as compiled for one device of a mesh; sizes in bytes.

    Attributes:
      shape: the mesh.
      parameters: this device's part of the parameters.
      gradients: of these; where micro-batches are summed up twice those outside of stages, which
        add theirs in place.
      optimizer: its part of the optimiser's state.
      logits: one chunk of the loss's logits and their gradients.
      temporary: everything that is not kept between steps, gradients and logits included.
      collectives: what the devices exchange in a step.
    """

    shape: MeshShape
    parameters: int
    gradients: int
    optimizer: int
    logits: int
    temporary: int
    collectives: Sequence[Collective]

    @property
    def activations(self) -> int:
        """Temporaries beside gradients and logits: the stream, saved rows, work space."""
        return max(0, self.temporary - self.gradients - self.logits)

    @property
    def total(self) -> int:
        """Bytes that the device needs."""
        return self.parameters + self.optimizer + self.temporary

    @property
    def sent(self) -> float:
        """Bytes that the device sends in a step at the least, over all collectives."""
        # In a ring the whole array goes round once, for an all-reduce twice.
        rounds = {"all-reduce": 2, "reduce-scatter": self.shape.fsdp}
        return float(sum(part.bytes * rounds.get(part.kind, 1) for part in self.collectives))


def compile_step(run: RunConfig, shape: MeshShape) -> Plan:
    """Compiles the step of `run` from shapes alone; `shape.size` devices must be there."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from xmod_jax.sharding import BATCH_AXES
    from xmod_jax.training.loss import CHUNK_ELEMENTS
    from xmod_jax.training.step import abstract_state, make_step

    mesh, train = shape.make(), run.train
    state = abstract_state(run, mesh)
    tokens = jax.ShapeDtypeStruct(
        (train.batch_size, train.context_length + 1),
        "int32",
        sharding=NamedSharding(mesh, P(BATCH_AXES)),
    )
    step = jax.jit(make_step(run, mesh), donate_argnums=0)
    compiled = step.lower(state, tokens).compile()
    rows = run.micro_batch // shape.batch_parts * train.context_length
    vocabulary = run.model.backbone.vocab_size
    chunk = min(rows, max(128, CHUNK_ELEMENTS // vocabulary)) * vocabulary
    parameters, memory = _part_bytes(state.model), compiled.memory_analysis()
    outside = parameters - _part_bytes(state.model.groups)
    assert memory is not None  # XLA gives it on CPU
    return Plan(
        shape,
        parameters,
        parameters + (outside if run.execution.accumulation > 1 else 0),
        _part_bytes(state.optimizer),
        2 * 4 * chunk,
        int(memory.temp_size_in_bytes),
        hlo.collectives(compiled.as_text() or ""),
    )


def _part_bytes(tree: Any) -> int:
    import jax

    parts = ((leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in parts)


def text(run: RunConfig, plan: Plan, memory: float, peak: float, bandwidth: float) -> str:
    """The plan in words: memory by kind, collectives, times, whether it fits.

    Args:
      run: what was compiled.
      plan: how it came out.
      memory: bytes of a device.
      peak: FLOPs of a device in a second.
      bandwidth: bytes that a device sends in a second.
    """
    train = run.train
    per_token = accounting.run_hardware_flops_per_token(run)
    compute = per_token * train.tokens_per_step / plan.shape.size / peak
    sending = plan.sent / bandwidth
    verdict = "fits" if plan.total <= memory else "does NOT fit"
    return "\n".join(
        (
            f"{run.name} of {run.experiment} at {run.scale} scale on {plan.shape}, "
            f"{run.execution.accumulation} micro-batches of {run.micro_batch} x "
            f"{train.context_length} tokens a step",
            tables.text_table(("bytes of a device", "GB"), _memory_rows(plan)),
            f"{verdict} {memory / 1e9:.0f} GB; parameters and optimiser lie in parts over fsdp and "
            "tensor, stages keep routed rows only, logits are formed by chunks",
            tables.text_table(("collective", "runs a step", "GB a step"), _collective_rows(plan)),
            f"a step takes at least {tables.number(compute, 3)} s of products at the stated peak "
            f"and {tables.number(sending, 3)} s of sending at the stated bandwidth",
        )
    )


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    sizes = {
        "parameters": plan.parameters,
        "gradients": plan.gradients,
        "optimiser": plan.optimizer,
        "activations and work space": plan.activations,
        "logits": plan.logits,
        "total": plan.total,
    }
    return [(name, f"{size / 1e9:.2f}") for name, size in sizes.items()]


def _collective_rows(plan: Plan) -> list[tuple[str, str, str]]:
    rows = []
    for kind in sorted({part.kind for part in plan.collectives}):
        parts = [part for part in plan.collectives if part.kind == kind]
        runs, size = sum(part.runs for part in parts), sum(part.bytes for part in parts)
        rows.append((kind, str(runs), f"{size / 1e9:.3f}"))
    return rows
