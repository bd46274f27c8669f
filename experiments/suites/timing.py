"""Contenders measured in turn: rounds after a warm-up, in a time that is told beforehand."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments import tables

Calls = Mapping[str, Callable[[], Any]]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How long to measure.

    Attributes:
      count: measurements of each contender.
      limit_s: seconds that the rounds of one comparison may take; there are fewer of them where a
        round takes too long, and never less than one.
    """

    count: int
    limit_s: float


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one contender.

    Attributes:
      wall: of the clock, a measurement each.
      cpu: of this process's threads together, likewise.
    """

    wall: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of the clock."""
        return statistics.median(self.wall)


def say(line: str) -> None:
    """A line of progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def interleave(calls: Calls, rounds: Rounds) -> dict[str, Times]:
    """Runs every call in turn, `rounds` times after one turn to warm up."""
    first = {name: _timed(call) for name, call in calls.items()}
    turn = sum(wall for wall, _ in first.values())
    count = max(1, min(rounds.count, int(rounds.limit_s / max(turn, 1e-9))))
    fewer = "" if count == rounds.count else f" (not {rounds.count}: the limit is time)"
    say(f"{count} rounds of {turn:.1f} s{fewer}, about {tables.duration(count * turn)}")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for done in range(1, count + 1):
        for name, call in calls.items():
            times[name].append(_timed(call))
        left = (time.perf_counter() - begin) / done * (count - done)
        if turn > 1:
            say(f"round {done} of {count}, {tables.duration(left)} left")
    return {name: Times(*zip(*pairs, strict=True)) for name, pairs in times.items()}


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    import jax

    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - cpu


def row(name: str, times: Mapping[str, Times], rival: str | None = None) -> Row:
    """Median and spread of a contender, and its speed relative to the rival's (the first's)."""
    own, first = times[name], times[rival or next(iter(times))]
    return {
        "model": name,
        "seconds": own.median,
        "fastest": min(own.wall),
        "slowest": max(own.wall),
        "cpu_seconds": statistics.median(own.cpu),
        "speed": first.median / own.median,
    }


def rows(times: Mapping[str, Times], flops: Mapping[str, float] | None = None) -> list[Row]:
    """A row for each contender; with their FLOPs also what these bound, and the share reached."""
    found = [row(name, times) for name in times]
    if flops is not None:
        for each in found:
            own, first = flops[each["model"]], flops[found[0]["model"]]
            each["GFLOP/s"] = own / each["seconds"] / 1e9
            each["bound"] = first / own
            each["share"] = each["speed"] / each["bound"]
    return found
