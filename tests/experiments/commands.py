"""Runs a command as a user does, in a process of its own."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[2]


def run_command(
    command: str,
    *arguments: object,
    timeout: float = 300,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """``python -m experiments.COMMAND ARGUMENT ...`` from the checkout's root.

    Variables of `environment` stand beside those of this process.
    """
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{command}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def refusal(command: str, *arguments: object) -> str:
    """What a command says to a mistake: one line, and status 2."""
    refused = run_command(command, *arguments)
    assert refused.returncode == 2, refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr
    return refused.stderr
