"""Where a compiled program's time goes, by kind of operation, from a trace of one call."""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from experiments import hlo
from experiments.suites import models, timing
from experiments.suites.models import Setting
from experiments.suites.timing import Row
from xmod_jax.errors import UserError

# From the most telling kind to the least: an operation has the first that anything in it shows.
KINDS = ("attention", "products", "routing", "slices", "copies", "reductions", "elementwise")
_ROUTING = r"gather|scatter|top-k|topk|sort"
_OPCODES = {
    "attention": r"fmha|flash|cudnn",  # the fused kernel
    "products": r"dot|ragged-dot|convolution|gemm|cublas|matmul",
    "routing": _ROUTING,
    "slices": r"dynamic-slice|dynamic-update-slice|slice|concatenate|pad",
    "copies": r"copy|transpose|copy-start|copy-done",
    "reductions": r"reduce|reduce-window",
}
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?:\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)\("
)
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OUTER = ("while", "conditional", "call", "tuple", "get-tuple-element", "parameter", "constant")


def kinds(text: str) -> dict[str, str]:
    """The kind of every operation of a compiled program (``compiled.as_text()``) by its name.

    Loops and branches, whose time is that of what they hold, are left out.
    """
    computations = hlo.computations(text)

    def shown(lines: list[str]) -> Iterator[str]:
        for line in lines:
            if match := _INSTRUCTION.match(line):
                yield match["opcode"]
                yield from _TARGET.findall(line)

    found = {}
    for lines in computations.values():
        for line in lines:
            match = _INSTRUCTION.match(line)
            if match is None or match["opcode"] in _OUTER:
                continue
            inside = [line]
            for called in _CALLS.findall(line):
                inside += computations.get(called, [])
            found[match["name"]] = _kind(set(shown(inside)))
    return found


def _kind(opcodes: set[str]) -> str:
    for kind, pattern in _OPCODES.items():
        whole = kind not in ("attention", "products")  # those stand within names of targets
        match = re.fullmatch if whole else re.search
        if any(match(pattern, opcode, re.IGNORECASE) for opcode in opcodes):
            return kind
    return "elementwise"


def seconds_by_operation(text: str, call: Callable[[], Any]) -> dict[str, float]:
    """Seconds of each operation in one call of a compiled program, over all threads or streams.

    Args:
      text: the program, ``compiled.as_text()``.
      call: runs it; ran before, so that nothing is set up meanwhile.

    Raises:
      UserError: the trace holds no operation of the program.
    """
    import jax

    named = kinds(text)
    total: dict[str, float] = collections.defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for name, nanoseconds in _events(str(path)):
                if name in named:
                    total[name] += nanoseconds / 1e9
    if not total:
        raise UserError("the profiler's trace holds no operation of the program")
    return total


def of_gradient(model: Any, tokens: Any, keep: bool) -> tuple[str, dict[str, float]]:
    """The compiled training gradient of a batch, and the seconds of its operations in one call."""
    import jax

    from experiments.suites import training

    compiled = training.gradient(keep).lower(model, tokens).compile()
    call = functools.partial(compiled, model, tokens)
    jax.block_until_ready(call())
    text = compiled.as_text() or ""
    return text, seconds_by_operation(text, call)


def by_kind(text: str, seconds: dict[str, float]) -> dict[str, float]:
    """Share of each kind in the seconds of a program's operations."""
    named, whole = kinds(text), sum(seconds.values())
    shares = dict.fromkeys(KINDS, 0.0)
    for name, own in seconds.items():
        shares[named[name]] += own / whole
    return shares


def largest(text: str, seconds: dict[str, float], count: int = 3) -> list[str]:
    """The costliest operations that are no products, a line each: share, kind, place."""
    named, whole = kinds(text), sum(seconds.values())
    order = sorted(seconds, key=lambda name: -seconds[name])
    found = [name for name in order if named[name] not in ("products", "attention")][:count]
    lines = []
    for name in found:
        place = re.search(rf'%?{re.escape(name)} = .*op_name="([^"]*)"', text)
        where = "/".join(place[1].split("/")[-4:]) if place else "no place"
        lines.append(f"{seconds[name] / whole:6.1%}  {named[name]}: {name} ({where})")
    return lines


def _events(path: str) -> Iterator[tuple[str, float]]:
    """Operation and nanoseconds of every event that devices, or the host's threads, ran."""
    import jax

    planes = list(jax.profiler.ProfileData.from_file(path).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in devices or planes:
        for line in plane.lines:
            # A device's other lines tell the same once more, by module or by step.
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                operation = dict(event.stats).get("hlo_op", event.name)
                yield str(operation), event.duration_ns


def profile(setting: Setting) -> list[Row]:
    """Share of the training gradient's time that each kind takes.

    Two operations that run at once, each at half its rate, count with their whole times.
    """
    rows = []
    for each in models.contenders(setting, arrays=True):
        timing.say(f"compiling {each.name}")
        text, seconds = of_gradient(each.model, each.tokens, each.keep)
        row: Row = {"model": each.name, "traced_seconds": sum(seconds.values())}
        rows.append(row | by_kind(text, seconds))
        print(f"{each.name}: the largest costs that are no products")
        print("\n".join(largest(text, seconds)))
    return rows
