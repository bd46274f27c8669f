"""A command with many command lines in one process, so that JAX starts once."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[2]

_CHILD = """
import contextlib, importlib, io, json, os, sys, traceback
from absl import flags
from experiments import cli

module = importlib.import_module(sys.argv[1])
for line in json.load(sys.stdin):
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    flags.FLAGS.unparse_flags()
    sys.argv = ["command", *(os.fsdecode(argument.encode("latin-1")) for argument in line)]
    status = None
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.run(module.main)
        except SystemExit as leaving:
            status = leaving.code
        except BaseException:
            status = 1
            traceback.print_exc()
    said = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in (out, err)]
    print(json.dumps([status, *said]), flush=True)
"""


class Said(NamedTuple):
    """What a command line led to."""

    status: int
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        """The last line of stderr."""
        return (self.stderr.strip().splitlines() or [""])[-1]


def run_many(command: str, lines: Sequence[Sequence[str]]) -> list[Said]:
    """What ``python -m experiments.COMMAND`` says to every list of arguments.

    An argument may hold bytes that are no text, as surrogates (`os.fsdecode`).
    """
    as_bytes = [[os.fsencode(argument).decode("latin-1") for argument in line] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, f"experiments.{command}"],
        cwd=ROOT,
        input=json.dumps(as_bytes),
        capture_output=True,
        text=True,
        timeout=600,
    )
    said = [Said(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(said) == len(lines), done.stderr
    return said
