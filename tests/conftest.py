"""Settings of the test process, before JAX starts."""

from __future__ import annotations

import os

# Tests compile hundreds of tiny programs and run each once: optimising them is the whole cost.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
