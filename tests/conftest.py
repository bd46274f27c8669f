"""Settings of the test process and its children, before JAX starts.

Tests compile hundreds of tiny programs and run each a few times: compilation is the whole cost, so
it is not optimised and left to XLA's older emitters, which take half as long as the newer ones;
equal programs of different tests and child processes compile once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# How long an example takes tells of the machine's neighbours, not of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Workers of a parallel run inherit all this from the process that starts them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        + " --xla_cpu_use_fusion_emitters=false"
    )
    _CACHE = tempfile.mkdtemp(prefix="xmod_jax_tests_")
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
