"""What a compiled program says of itself: its collectives, how often each runs, its memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# "%name = TYPE all-gather(" or a tuple of types; asynchronous ones count where they start.
_COLLECTIVE = re.compile(rf"= (?P<type>\S+|\(.*?\)) (?P<kind>{_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_CALLED = re.compile(
    r"(?:body|to_apply|calls|condition|true_computation|false_computation)=%?([\w.-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program, as one device takes part in it.

    Attributes:
      kind: ``"all-gather"`` and the like.
      dtype: of its result, as XLA writes it.
      shape: of one array of its result.
      runs: times that it runs in one call of the program; loops of unknown length count once.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    runs: int

    @property
    def bytes(self) -> int:
        """Bytes of the result, over all runs."""
        bits = int(re.sub(r"\D", "", self.dtype) or 8)
        elements = 1
        for size in self.shape:
            elements *= size
        return self.runs * elements * bits // 8


def collectives(text: str) -> list[Collective]:
    """Every array that a collective of the compiled program gives (``compiled.as_text()``)."""
    by_name = computations(text)
    found = []
    for name, times in _times(by_name).items():
        for line in by_name[name]:
            if match := _COLLECTIVE.search(line):
                arrays = list(_ARRAY.finditer(match["type"]))
                if "-start(" in line and len(arrays) > 1:
                    arrays = arrays[len(arrays) // 2 :]  # operands stand before results
                for array in arrays:
                    shape = tuple(int(size) for size in array["shape"].split(",") if size)
                    found.append(Collective(match["kind"], array["type"], shape, times))
    return found


def computations(text: str) -> dict[str, list[str]]:
    """The lines of every computation of a compiled program by its name; ``""`` is the entry."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = found[header["name"]] = []
            if line.startswith("ENTRY"):
                found[""] = lines
        else:
            lines.append(line)
    return found


def _times(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs, the entry (called ``""``) once."""
    times: dict[str, int] = {}

    def visit(name: str, runs: int) -> None:
        times[name] = times.get(name, 0) + runs
        for line in computations[name]:
            trips = _TRIPS.search(line)
            for called in _callees(line):
                if called in computations:
                    visit(called, runs * (int(trips[1]) if trips else 1))

    visit("", 1)
    return times


def _callees(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for branches in _BRANCHES.findall(line):
        yield from re.findall(r"[\w.-]+", branches)
