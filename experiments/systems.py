"""Measures paper-size models on the devices of one node, every check by itself.

    python -m experiments.systems --protocol=gpu_check [--output=FILE]
    python -m experiments.systems --protocol=table11 --mesh=fsdp:8 [--output=FILE]

gpu_check, on one device, in under 8 minutes: step time, MFU and memory of Dense, MoD, MoE 8:64 and
A4K8 at the 165M and 556M widths, L = 8k and 32k, in bfloat16; attention and gradients in bfloat16
against float32; the share of routing in a traced gradient. What the time does not hold is left out,
and said.

table11: training throughput, memory of a device and throughput of validation's forward pass for
Dense, MoD, MoE and X-MoD at 936M, L = 32768, every model in a process of its own.

A check that fails (out of memory, a missing kernel) is a line of the result; the others go on.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

from absl import flags

from experiments import cli, tables
from experiments.scales import SCALES
from experiments.suites import timing
from experiments.suites.checks import Check
from experiments.suites.isolated import Worker
from experiments.suites.timing import Row
from xmod_jax import storage
from xmod_jax.config import BACKBONES, Compute
from xmod_jax.errors import UserError

PROTOCOLS = ("gpu_check", "table11")
_MODELS = {
    "gpu_check": ("dense", "A4K8", "mod", "moe_8_64"),
    "table11": ("dense", "mod", "moe_8_64", "A4K8", "moe_8_128", "A3K16"),
}
_PROTOCOL = flags.DEFINE_enum("protocol", None, PROTOCOLS, "what to measure", required=True)
_ONLY = flags.DEFINE_list("models", None, "models in place of the protocol's")
_SIZES = flags.DEFINE_list("sizes", None, "backbones of table 4 in place of the protocol's")
_CONTEXTS = flags.DEFINE_list("contexts", None, "L, tokens, in place of the protocol's")
_SCALE = flags.DEFINE_enum(
    "scale", "paper", list(SCALES), "mini: the same checks of tiny models, to try the command"
)
_COMPUTE = flags.DEFINE_enum(
    "compute", "bfloat16", [each.value for each in Compute], "precision of products"
)
_MESH = flags.DEFINE_string("mesh", None, "table11: devices (default: all, on fsdp)")
_BATCH = flags.DEFINE_integer(
    "batch",
    None,
    "sequences of a step (default: gpu_check 32768 tokens, table11 one sequence a device)",
    lower_bound=1,
)
_STEPS = flags.DEFINE_integer("steps", 3, "measured steps of a model", lower_bound=1)
_LIMIT = flags.DEFINE_float(
    "limit_s", None, "seconds for everything (default: gpu_check 400, table11 7200)", lower_bound=1
)
_CHECK_LIMIT = flags.DEFINE_float(
    "check_limit_s", None, "seconds for one check (default: 120; table11 1200)", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results")

_LIMITS = {"gpu_check": 400.0, "table11": 7200.0}
_CHECK_LIMITS = {"gpu_check": 120.0, "table11": 1200.0}
_FIRST_ESTIMATE_S = 30.0  # of a check whose like was not done yet
_STEP_TOKENS = 32768


def _checks(mesh: str, devices: int) -> list[Check]:
    """What is measured, the most telling first: what comes last is left out first."""
    protocol = _PROTOCOL.value
    models = _ONLY.value or _MODELS[protocol]
    sizes = _SIZES.value or (["936M"] if protocol == "table11" else ["165M", "556M"])
    contexts = _whole_contexts(["32768"] if protocol == "table11" else ["8192", "32768"])
    fixed: dict[str, Any] = {
        "scale": _SCALE.value,
        "compute": _COMPUTE.value,
        "mesh": mesh,
        "steps": _STEPS.value,
        "forward": protocol == "table11",
    }

    def check(kind: str, model: str, size: str, context: int) -> Check:
        whole = devices if protocol == "table11" else max(1, _STEP_TOKENS // context)
        return Check(kind, model, size, context, _BATCH.value or whole, **fixed)

    steps = [check("step", m, s, L) for L in contexts for s in sizes for m in models]
    if protocol == "table11":
        return steps
    routed = next((m for m in models if m not in ("dense", "moe_8_64")), models[0])
    small = sizes[0], contexts[0]
    short = dataclasses.replace(check("precision", "dense", *small), batch=1)
    few = len(models)
    return [
        dataclasses.replace(check("attention", "dense", *small), batch=1),
        *steps[:2],
        short,
        check("routing", routed, *small),
        *steps[2:few],
        dataclasses.replace(short, model=routed),
        *steps[few:],
    ]


def _whole_contexts(default: list[str]) -> list[int]:
    contexts = _CONTEXTS.value or default
    if not all(tables.whole(each, 1, 10**15) for each in contexts):
        raise UserError(f"--contexts={','.join(contexts)}: whole numbers of tokens")
    return [int(each) for each in contexts]


def _refuse_mistakes(checks: list[Check]) -> None:
    """Names that stand for nothing, before a worker starts."""
    from xmod_jax.sharding import MeshShape

    for check in checks:
        if check.size not in BACKBONES:
            raise UserError(f"--sizes={check.size}: known: {', '.join(BACKBONES)}")
        try:
            check.model_config()
            if check.kind == "step":
                MeshShape.parse(check.mesh).check(check.run_config())
        except ValueError as error:
            raise UserError(f"{check.name}: {error}") from error
    if _OUTPUT.value:
        cli.check_output_file(_OUTPUT.value)


def _devices() -> dict[str, Any]:
    """What a process of its own says of the devices: this one must not hold their memory."""
    import json
    import subprocess
    import sys

    command = [sys.executable, "-m", "experiments.suites.devices"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UserError(said[-1].removeprefix("error: "))
    return json.loads(done.stdout.splitlines()[-1])


def _run(checks: list[Check], fresh: bool, limit_s: float, keep: Any) -> list[Row]:
    """Does the checks in turn, as long as there is time; `fresh`: each in a new process."""
    worker, rows, took = Worker(), [], dict[str, float]()
    end = time.monotonic() + limit_s
    try:
        for done, check in enumerate(checks):
            left = end - time.monotonic()
            estimate = took.get(check.kind, _FIRST_ESTIMATE_S)
            row: Row = {"check": check.name}
            if left < estimate:
                row["failed"] = f"left out: {left:.0f} s are left, it takes about {estimate:.0f} s"
            else:
                timing.say(f"{done + 1} of {len(checks)}: {check.name}, {left:.0f} s left")
                begin = time.monotonic()
                most = _CHECK_LIMIT.value or _CHECK_LIMITS[_PROTOCOL.value]
                row |= worker.do(check, min(left, most))
                took[check.kind] = max(took.get(check.kind, 0.0), time.monotonic() - begin)
            if "failed" in row:
                timing.say(f"{check.name}: {row['failed']}")
            rows.append(row)
            keep(rows)
            if fresh:
                worker.close()
    finally:
        worker.close()
    return rows


def _print(rows: list[Row]) -> None:
    """A table for each kind of check, then what failed."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if "failed" not in row:
            kinds.setdefault(row["check"].split()[0], []).append(row)
    for found in kinds.values():
        columns = list(found[0])
        cells = [[_cell(row.get(name)) for name in columns] for row in found]
        print(tables.text_table(columns, cells))
    for row in rows:
        if "failed" in row:
            print(f"{row['check']}: {row['failed']}")


def _cell(value: Any) -> str:
    return tables.number(value) if value is None or isinstance(value, float) else str(value)


def main() -> int:
    """Runs the protocol; 1 where a check failed, those left out for time aside."""
    mesh = _MESH.value or "data:1"
    from xmod_jax.sharding import MeshShape

    # Before a process looks for devices.
    _refuse_mistakes(_checks(mesh, MeshShape.parse(mesh).batch_parts))
    report = _devices()
    devices, fresh = len(report["devices"]), _PROTOCOL.value == "table11"
    mesh = _MESH.value or (f"fsdp:{devices}" if fresh else "data:1")
    checks = _checks(mesh, MeshShape.parse(mesh).batch_parts)
    _refuse_mistakes(checks)
    if report["backend"] == "cpu":
        timing.say("there is no accelerator here: these figures are of the CPU")

    def keep(rows: list[Row]) -> None:
        if _OUTPUT.value:
            value = {"protocol": _PROTOCOL.value, "device_report": report, "results": rows}
            storage.write_json(pathlib.Path(_OUTPUT.value), value)

    rows = _run(checks, fresh, _LIMIT.value or _LIMITS[_PROTOCOL.value], keep)
    _add_ratios(rows)
    keep(rows)
    _print(rows)
    bad = [row for row in rows if not row.get("failed", "").startswith("left out")]
    return int(any("failed" in row or row.get("ok") is False for row in bad))


def _add_ratios(rows: list[Row]) -> None:
    """Speed of every step relative to the first model of its size and length that was measured."""
    first: dict[str, Row] = {}
    for row in rows:
        if "tokens/s" not in row:
            continue
        rival = first.setdefault(" ".join(row["check"].split()[2:]), row)
        for name in ("tokens/s", "forward_tokens/s"):
            if name in row and name in rival:
                row[name.replace("tokens/s", "speed")] = row[name] / rival[name]


if __name__ == "__main__":
    cli.run(main)
