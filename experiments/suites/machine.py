"""What a figure was measured on: machine, versions, devices, and the two rates that bound it."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import threading
from collections.abc import Callable
from typing import Any

from experiments import tables
from xmod_jax.data.preparation import default_workers

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "torch", "transformers")
_SETTINGS = re.compile(r"^(XLA_|JAX_|OMP_|MKL_|CUDA_VISIBLE|NVIDIA_TF32)")
_READ_BYTES = 1 << 28  # many times any cache
PRODUCT = 2048  # rows and columns of a large product


def report() -> dict[str, Any]:
    """The machine, its load, versions, devices with their memory, and settings in the environment.

    Plain JSON values; what a system does not tell is None.
    """
    import jax

    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "processor": _from_proc("/proc/cpuinfo", "model name") or platform.processor() or None,
        "cores": default_workers(),
        "memory_GB": _memory_gb(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": _versions(),
        "backend": jax.default_backend(),
        "devices": [_device(device) for device in jax.local_devices()],
        "processes": jax.process_count(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if _SETTINGS.match(k)},
    }


def lines(found: dict[str, Any]) -> list[str]:
    """A report in words, a line for each of its entries."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{name} {text(part)}" for name, part in value.items()) or "none"
        if isinstance(value, list):
            return "; ".join(map(text, value))
        return tables.number(value) if isinstance(value, float) else str(value)

    return [f"{name}: {text(value)}" for name, value in found.items()]


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _device(device: Any) -> dict[str, Any]:
    memory = device.memory_stats() or {}
    limit = memory.get("bytes_limit")
    return {
        "kind": device.device_kind,
        "memory_GB": None if limit is None else limit / 1e9,
    }


def _memory_gb() -> float | None:
    total = _from_proc("/proc/meminfo", "MemTotal")
    return None if total is None else int(total.split()[0]) * 1024 / 1e9


def _from_proc(path: str, name: str) -> str | None:
    try:
        text = pathlib.Path(path).read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else None


def reading() -> tuple[Callable[[], Any], float]:
    """A call that reads much memory as fast as may be, and the bytes that it reads.

    On CPU every core sums a part of an array, elsewhere the device does.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    count = _READ_BYTES // 4
    if jax.default_backend() != "cpu":
        array = jnp.ones(count, jnp.float32)
        total = jax.jit(jnp.sum).lower(array).compile()
        return lambda: total(array), _READ_BYTES
    parts = np.array_split(np.ones(count, np.float32), default_workers())

    def read() -> None:
        threads = [threading.Thread(target=np.sum, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return read, _READ_BYTES


def product(dtype: str = "float32", size: int = PRODUCT) -> tuple[Callable[[], Any], float]:
    """A call that multiplies two large matrices, and its FLOPs: the ceiling of every step.

    Compiled with XLA's own settings, whose second library is the faster one here.
    """
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(n), (size, size), jnp.dtype(dtype)) for n in range(2))
    multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    return lambda: multiply(a, b), 2.0 * size**3
