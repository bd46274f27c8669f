"""Prints `machine.report` as a line of JSON, for a process that must not take the devices."""

from __future__ import annotations

import json

from experiments import cli
from experiments.suites import machine


def main() -> None:
    """Prints it."""
    print(json.dumps(machine.report()))


if __name__ == "__main__":
    cli.run(main)
