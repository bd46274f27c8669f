"""xmod_jax: X-MoD sparse-depth routing for JAX and Flax.

Names below load on first use, so that importing the package, or asking a command for its help, does
not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Backbone": "config",
    "ModelConfig": "config",
    "Routing": "config",
    "RunConfig": "config",
    "TrainConfig": "config",
    "Update": "config",
    "Hierarchy": "hierarchy",
    "StageGroup": "hierarchy",
    "Decoder": "model",
    "Threshold": "model",
    "TopK": "model",
    "RowUpdate": "nn.routed_stage",
    "StageOutput": "nn.routed_stage",
    "gated_residual": "nn.routed_stage",
    "routed_stage": "nn.routed_stage",
    "ThresholdOutput": "nn.threshold_stage",
    "threshold_stage": "nn.threshold_stage",
    "UserError": "errors",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]
