"""The rule behind ``--scale=auto``: paper where accelerators are present and the runs fit them."""

from __future__ import annotations

import dataclasses

from experiments.registry import Experiment
from xmod_jax import accounting
from xmod_jax.config import RunConfig
from xmod_jax.data import sources
from xmod_jax.errors import UserError

# float32 parameters, gradients and momenta, and a bfloat16 copy for the matrix products.
STATE_BYTES = 4 + 4 + 4 + 2


@dataclasses.dataclass(frozen=True)
class Devices:
    """What computes here.

    Attributes:
      kind: JAX's platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
      count: number of devices, over all processes.
      memory: bytes of one device; None where it does not say.
    """

    kind: str
    count: int
    memory: int | None


def local_devices() -> Devices:
    """The devices that JAX finds."""
    import jax  # here, because commands that only print plans need no devices

    devices = jax.devices()
    statistics = jax.local_devices()[0].memory_stats() or {}
    return Devices(jax.default_backend(), len(devices), statistics.get("bytes_limit"))


def bytes_per_device(run: RunConfig, devices: int) -> float:
    """Estimate of the memory that training `run` takes on each of `devices` devices.

    State is sharded over all; a micro-batch keeps, for every layer of the active depth, the
    bfloat16 stream and the attention output, and the float32 working set of one layer; with
    `Execution.keep_products` the layer's products too.
    """
    backbone = run.model.backbone
    micro_batch = run.micro_batch
    rows = max(1.0, micro_batch / devices) * run.train.context_length
    heads = backbone.num_heads * backbone.head_dim
    width = backbone.d_model + heads
    if run.execution.keep_products:
        width += heads + 2 * backbone.num_kv_heads * backbone.head_dim + backbone.d_model
        if run.train.context_length <= accounting.FFN_ROWS:
            width += 2 * backbone.d_ff
    kept = 2 * width * float(run.model.hierarchy.active_depth)
    working = 4 * (4 * backbone.d_model + 3 * heads + 3 * backbone.d_ff)
    state = STATE_BYTES * accounting.exact_parameters(run.model) / devices
    return state + rows * (kept + working)


def auto_scale(paper: Experiment, devices: Devices) -> tuple[str, str]:
    """``"paper"`` or ``"mini"``, and why.

    Args:
      paper: the experiment at paper scale.
      devices: what would compute it.
    """
    if devices.kind == "cpu":
        return "mini", "no accelerator is present"
    if devices.memory is None:
        return "mini", f"the {devices.kind} does not tell its memory; --scale=paper insists"
    needs = {run.name: bytes_per_device(run, devices.count) for run in paper.runs}
    largest = max(needs, key=lambda name: needs[name])
    have = f"{devices.count} x {devices.memory / 2**30:.0f} GiB of {devices.kind}"
    if needs[largest] > devices.memory:
        return "mini", f"{largest} needs about {needs[largest] / 2**30:.0f} GiB a device of {have}"
    try:
        sources.check(paper.runs[0].data)
    except UserError as error:
        return "mini", f"the paper's data is not prepared: {error}"
    return "paper", f"every run fits {have}"
