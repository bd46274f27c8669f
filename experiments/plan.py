"""Compiles a run's step for a described mesh and says what each device would hold and exchange.

    python -m experiments.plan --experiment=main_936m --run=xmod_a3k16 --mesh=data:1,fsdp:8

Nothing is allocated or trained: shapes alone are compiled, for as many CPU devices as the mesh has,
so a laptop plans a cluster. Bytes are those of the CPU program. It computes in float32 where a GPU
computes in bfloat16, so that work space and the matrices that are gathered count up to twice; what
is kept between layers counts as what it is. Times are lower bounds from the stated peaks.
"""

from __future__ import annotations

import os

from absl import flags

from experiments import cli, environment, planned, selection
from xmod_jax.errors import UserError

_RUN = flags.DEFINE_string("run", None, "name of the run within the experiment")
_MESH = flags.DEFINE_string("mesh", "data:8", "devices along data, fsdp and tensor: data:2,fsdp:4")
_MOST = 1e9  # what no device comes near
_MEMORY = flags.DEFINE_float("memory_gb", 80.0, "memory of a device, in 1e9 bytes", 0, _MOST)
_PEAK = flags.DEFINE_float(
    "peak_tflops", 312.0, "peak of a device in the run's precision (A100: 312)", 1e-3, _MOST
)
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth_gb",
    300.0,
    "bytes that a device sends in a second, in 1e9 (A100 NVLink: 300)",
    1e-3,
    _MOST,
)
flags.adopt_module_key_flags(selection)

# Nothing compiled here runs, so it need not be quick. On CPU a whole stack of saved rows would be
# widened to float32 ahead of the loop that reads it, since that takes a row's widening for work
# that every turn repeats; no GPU does that, nor needs the memory.
_XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_disable_hlo_passes=while-loop-invariant-code-motion"
)


def main() -> int:
    """Prints the plan."""
    experiment = selection.selected(default_scale="paper", looks=False)
    if not _RUN.value:
        raise UserError(f"--run is missing; known: {', '.join(r.name for r in experiment.runs)}")
    run = experiment.run(_RUN.value)
    # Before JAX looks for devices, and before anything is compiled that will never run.
    from xmod_jax.sharding import MeshShape

    shape = MeshShape.parse(_MESH.value)
    shape.check(run)
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}"
    environment.use_cpu(shape.size)
    plan = planned.compile_step(run, shape)
    print(planned.text(run, plan, _MEMORY.value * 1e9, _PEAK.value * 1e12, _BANDWIDTH.value * 1e9))
    return 0


if __name__ == "__main__":
    cli.run(main)
