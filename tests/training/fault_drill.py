"""Kills or stops a run of two processes at random moments, and looks at what it leaves.

    python -m tests.training.fault_drill DIRECTORY [ROUNDS [SEED]]      (50 rounds, seed 0)

A round starts the small run, sends SIGKILL or SIGTERM to one of its processes or to both at a
random moment, sometimes damages the newest checkpoint, and starts the run again until it is done.
It is right when the records are those of the uninterrupted run, none missing, none twice. Rounds
that DIRECTORY has from before are not repeated. The last line sums up; status 1 when a round was
wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from tests.devices import ROOT, coordinator, environment
from tests.training import small
from xmod_jax import records, storage

_GRACE_S = 15  # for whoever is left of a killed run; then it is killed as well
_LIMIT_S = 900  # for a whole run, on however busy a machine
_ATTEMPTS = 3  # a run that was stopped before it began may want another start
_ENDED = (0, 75)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What a round does.

    Attributes:
      number: the signal.
      targets: the processes that get it.
      records: lines of the curve that are there before the signal; 0: it may come at any moment.
      delay: share of an uninterrupted run's seconds after which it comes; after the lines, if any.
      damages: whether the newest of two or more checkpoints is damaged afterwards.
    """

    number: int
    targets: tuple[int, ...]
    records: int
    delay: float
    damages: bool

    @classmethod
    def draw(cls, seed: int, number: int) -> Fault:
        """That of a round."""
        dice = random.Random(f"{seed} {number}")
        lines = dice.choice([0, *range(1, 9)])
        return cls(
            dice.choice([signal.SIGKILL, signal.SIGTERM]),
            dice.choice([(0,), (1,), (0, 1)]),
            lines,
            dice.uniform(0, 1) if lines == 0 else dice.uniform(0, 0.02),
            dice.random() < 0.4,
        )


class Pair:
    """The small run's two processes."""

    def __init__(self, directory: pathlib.Path, cache: pathlib.Path) -> None:
        place = coordinator()
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.directory = directory
        self.children = []
        directory.parent.mkdir(parents=True, exist_ok=True)
        for index in range(2):
            arguments = map(str, (directory, "data:2", 2, index, place))
            with (directory.parent / f"process_{index}.log").open("ab") as log:
                self.children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.training.together", *arguments],
                        cwd=ROOT,
                        env=environment(1) | variables,
                        stdout=log,
                        stderr=log,
                    )
                )

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [child for child in self.children if child.poll() is None]

    def lines(self) -> int:
        path = self.directory / records.TRAIN
        return len(records.read_lines(path)) if path.exists() else 0

    def wait(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Until both have ended or `enough`; False when that took too long."""
        end = time.monotonic() + seconds
        while self.running() and not enough():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def end(self, seconds: float) -> list[int]:
        """Statuses of both, which get `seconds` to end by themselves."""
        self.wait(seconds)
        for child in self.running():
            child.kill()
        return [child.wait() for child in self.children]


def _strike(fault: Fault, pair: Pair, duration: float) -> list[int]:
    """Carries the fault out; the statuses of both processes."""
    if fault.records:
        pair.wait(_LIMIT_S, lambda: pair.lines() >= fault.records)
    pair.wait(fault.delay * duration)
    for target in fault.targets:
        if pair.children[target].poll() is None:
            pair.children[target].send_signal(fault.number)
    return pair.end(_LIMIT_S if fault.number == signal.SIGTERM else _GRACE_S)


def _damage(directory: pathlib.Path, dice: random.Random) -> str | None:
    """Cuts or fills with noise a file of the newest checkpoint where there is one before it."""
    steps = sorted(
        int(path.name)
        for path in directory.glob(f"{records.CHECKPOINTS}/*")
        if path.name.isdigit()  # others belong to a save that was cut
    )
    if len(steps) < 2:
        return None
    newest = directory / records.CHECKPOINTS / str(steps[-1])
    data = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size]
    path = dice.choice(sorted(data))
    content = path.read_bytes()
    noise = dice.random() < 0.5
    path.write_bytes(dice.randbytes(len(content)) if noise else content[: len(content) // 3])
    return f"{path.relative_to(newest)} {'overwritten' if noise else 'cut'}"


def _curves(directory: pathlib.Path) -> dict[str, list[dict[str, object]]]:
    return {name: small.curve(directory, name) for name in (records.TRAIN, records.EVAL)}


def _uninterrupted(folder: pathlib.Path, cache: pathlib.Path) -> tuple[pathlib.Path, float]:
    """The run that nothing happens to, and its seconds with all programs compiled."""
    whole, seconds = folder / "whole" / "run", folder / "seconds.json"
    if not seconds.exists():
        for _ in range(2):
            shutil.rmtree(whole.parent, ignore_errors=True)
            began = time.monotonic()
            statuses = Pair(whole, cache).end(_LIMIT_S)
            if statuses != [0, 0]:
                raise SystemExit(f"the uninterrupted run ended with {statuses}: {whole.parent}")
        storage.write_json(seconds, {"seconds": time.monotonic() - began})
    return whole, json.loads(seconds.read_text())["seconds"]


def _round(
    number: int, seed: int, folder: pathlib.Path, cache: pathlib.Path, want: object, duration: float
) -> dict[str, object]:
    """One round; what came of it, ``wrong`` being None where all is right."""
    fault = Fault.draw(seed, number)
    place = folder / f"round_{number}"
    shutil.rmtree(place, ignore_errors=True)
    directory = place / "run"
    pair = Pair(directory, cache)
    struck = _strike(fault, pair, duration)
    left = pair.lines()
    damaged = None
    if fault.damages and not (directory / records.DONE).exists():
        damaged = _damage(directory, random.Random(f"{seed} {number} damage"))
    wrong = None
    if fault.number == signal.SIGTERM and not all(s in (*_ENDED, -signal.SIGTERM) for s in struck):
        wrong = f"SIGTERM ended the processes with {struck}"
    statuses: list[int] = []
    for _ in range(_ATTEMPTS):
        statuses = Pair(directory, cache).end(_LIMIT_S)
        if statuses != [75, 75]:
            break
    if statuses != [0, 0]:
        wrong = f"started again it ended with {statuses}"
    elif _curves(directory) != want:
        wrong = "its records are not those of the uninterrupted run"
    if wrong is None:
        shutil.rmtree(place)
    name = signal.Signals(fault.number).name
    told = {"round": number, "signal": name, "to": fault.targets, "statuses": struck}
    return told | {"records": left, "damaged": damaged, "wrong": wrong}


def main(arguments: list[str]) -> int:
    folder = pathlib.Path(arguments[0]).absolute()
    rounds, seed = map(int, (*arguments[1:], *("50", "0")[len(arguments) - 1 :]))
    folder.mkdir(parents=True, exist_ok=True)
    path, cache = folder / f"rounds_{seed}.jsonl", folder / "compiled"
    whole, duration = _uninterrupted(folder, cache)
    want = _curves(whole)
    lines = path.read_text().splitlines() if path.exists() else []
    done = {result["round"]: result for result in map(json.loads, lines)}
    for number in range(rounds):
        if number not in done:
            done[number] = _round(number, seed, folder, cache, want, duration)
            with path.open("a") as file:
                print(json.dumps(done[number]), file=file)
            print(json.dumps(done[number]), flush=True)
    results = [done[number] for number in range(rounds)]
    right = sum(result["wrong"] is None for result in results)
    kinds = collections.Counter(result["signal"] for result in results)
    damaged = sum(result["damaged"] is not None for result in results)
    print(
        f"fault drill, seed {seed}: {right} of {rounds} rounds end with the uninterrupted run's "
        f"records ({', '.join(f'{count} {name}' for name, count in sorted(kinds.items()))}; "
        f"{damaged} with a damaged checkpoint)"
    )
    return 0 if right == rounds else 1


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(sys.argv[1:]))
