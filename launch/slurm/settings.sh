# Settings of a process on nodes of A100s, each with its reason. Sourced on the node.

# Compiled programs, so that a requeued run starts in seconds: one folder for all jobs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/.compiled}

# A layer's matrices are gathered while the layer before computes; without this each waits.
export XLA_FLAGS="${XLA_FLAGS:-} --xla_gpu_enable_latency_hiding_scheduler=true"

# Parameters, optimiser and saved rows fill most of a device: leave little to others.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

# What NCCL has to say of a link that fails; by itself it says nothing.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
