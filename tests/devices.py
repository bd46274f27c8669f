"""Runs Python in a process of its own with several devices, which tests' own process has not."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def environment(devices: int) -> dict[str, str]:
    """This process's, with `devices` CPU devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    forced = f"{flags} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": forced, "JAX_PLATFORMS": "cpu"}


def coordinator() -> str:
    """``localhost:port`` where processes can meet; the port is free now."""
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def run_module(
    module: str, *arguments: object, devices: int = 8, timeout: float = 1200
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENT ...`` from the checkout's root; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done
