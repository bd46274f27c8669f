"""How programs of training and evaluation are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`, with settings for the backend that is in use.

    On CPU, LLVM's costlier passes took a third of a mini run's time and made no step faster: the
    work is in the library's matrix products.
    """
    quick = {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=quick, **options)
