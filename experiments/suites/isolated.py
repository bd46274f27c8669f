"""Checks in a process of their own: one that fails, hangs or takes its process down is reported,
and the rest goes on.

A worker is ``python -m experiments.suites.isolated``. It reads a check as a line of JSON, does it,
and answers with a line of JSON on the descriptor that it was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from experiments.suites.checks import Check, perform
from experiments.suites.timing import Row

_START_S = 60  # for a worker to start, beside its first check


class Worker:
    """A process that does checks, one after the other; a new one where the last one is gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._answers = -1

    def do(self, check: Check, limit_s: float) -> Row:
        """The check's row; ``{"failed": reason}`` where it failed or took longer than the limit."""
        if self._process is None:
            self._start()
            limit_s += _START_S
        process = self._process
        assert process is not None and process.stdin is not None
        begin = time.perf_counter()
        try:
            process.stdin.write(json.dumps(dataclasses.asdict(check)) + "\n")
            process.stdin.flush()
            answer = self._read(limit_s)
        except BrokenPipeError:
            answer = None
        if answer is None:
            ended = process.poll()
            self.close()
            spent = time.perf_counter() - begin
            reason = f"no answer in {spent:.0f} s" if ended is None else f"exit status {ended}"
            return {"failed": reason}
        return json.loads(answer)

    def close(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # a check that was not read
                    self._process.stdin.close()
            os.close(self._answers)
            self._process = None

    def _start(self) -> None:
        self._answers, write = os.pipe()
        command = [sys.executable, "-m", "experiments.suites.isolated", str(write)]
        # What libraries print goes to stderr; answers have a descriptor of their own. An interrupt
        # from the terminal is for us, who end the worker.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=(write,),
            text=True,
            process_group=0,
        )
        os.close(write)

    def _read(self, limit_s: float) -> str | None:
        """A line of the worker; None when it ends, or in time."""
        line, end = b"", time.monotonic() + limit_s
        while not line.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                return None
            part = os.read(self._answers, 1 << 16)
            if not part:
                self._wait()
                return None
            line += part
        return line.decode()

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(10)  # its status tells why it ended
        except subprocess.TimeoutExpired:
            return


def _answer(line: str) -> dict[str, Any]:
    try:
        return perform(Check(**json.loads(line)))
    except Exception as error:
        words = " ".join(str(error).split())
        return {"failed": f"{type(error).__name__}: {words[:300]}"}


def main() -> None:
    """Answers checks until there are no more."""
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            answers.write(json.dumps(_answer(line)) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
