"""Many calls of one command in one process, since most of a command's time is its imports.

    python -m tests.experiments.together COMMAND < CALLS

CALLS is a JSON list of lists of arguments; the answer a JSON list of [status, stdout, stderr].
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from tests.experiments.commands import ROOT


class Result(NamedTuple):
    """What a command ended with; status 1 for a fault of the program."""

    status: int
    out: str
    err: str


def run_together(
    command: str, calls: Sequence[Sequence[object]], timeout: float = 300
) -> list[Result]:
    """What ``python -m experiments.COMMAND ARGUMENT ...`` does, for each list of arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.experiments.together", command],
        input=json.dumps([list(map(str, call)) for call in calls]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return [Result(*result) for result in json.loads(done.stdout)]


def refused(command: str, arguments: Sequence[object], result: Result) -> str:
    """The one line of a mistake; fails where a command did anything else."""
    told = f"{command} {' '.join(map(str, arguments))!r}: {result}"
    assert result.status == 2 and not result.out, told
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, told
    return result.err


def _call(command: str, arguments: list[str]) -> list[object]:
    from experiments import cli

    main = importlib.import_module(f"experiments.{command}").main
    sys.argv = [command, *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            cli.run(main)
        except SystemExit as end:
            status = end.code
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            list(map(os.close, kept))
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="backslashreplace"))
        return [status, *texts]


if __name__ == "__main__":
    name = sys.argv[1]
    print(json.dumps([_call(name, arguments) for arguments in json.load(sys.stdin)]))
