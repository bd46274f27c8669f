"""How programs of training and evaluation are compiled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

# LLVM's costlier passes took a third of a mini run's time and made no step faster: the work is in
# the library's matrix products.
_QUICK = {"xla_backend_optimization_level": 1}
# XLA hands products and sums, with what surrounds them, to a second library by default: gradients
# then take up to a fifth longer (docs/performance.md). It is left the convolutions: we have none.
_OTHER_LIBRARY = "xla_cpu_experimental_ynn_fusion_type"
_LEAST = {_OTHER_LIBRARY: "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"}


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`, with settings for the backend that is in use."""
    settings = _cpu_settings() if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=settings, **options)


@functools.cache
def _cpu_settings() -> dict[str, Any]:
    """Those that this version of XLA knows: the second is an experimental one.

    What XLA_FLAGS names is the user's: a setting given here would overrule it.
    """
    theirs = os.environ.get("XLA_FLAGS", "")
    quick, least = (
        {name: value for name, value in settings.items() if f"--{name}=" not in theirs}
        for settings in (_QUICK, _LEAST)
    )
    try:
        jax.jit(lambda: 0, compiler_options=quick | least).lower().compile()
    except jax.errors.JaxRuntimeError:
        return quick
    return quick | least
