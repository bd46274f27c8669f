"""Measures speed, memory and compile time of Dense, MoD, MoE and X-MoD against each other.

    python -m experiments.benchmark --suite=training [--context=2048] [--batch=4] [--output=FILE]

Contenders run interleaved in one process after a warm-up; medians, spread and ratios to the first
contender are printed. Beside each ratio stands its bound, what the executed FLOPs allow, and the
share of it that was reached. Progress and the time that is left go to stderr; rounds that would
take longer than --limit_s are left out.

  training    gradient of the training loss (--whole_step: and an AdamW update), beside the rate of
              a large matrix product on this machine; qwen3_torch among --models is Hugging Face's
              dense model in PyTorch, NAME_kept one trained with --keep_products
  evaluation  threshold routing, thresholds set so that every layer routes about L/K tokens
  decoding    tokens one by one behind random caches of contexts 1024, 4096 and 8192, every layer
              routed its L/K; A4K8_masked runs every sparse layer's block; PyTorch's model too where
              it is installed; bytes moved against the read bandwidth of this machine
  optimizer   one optimiser update
  memory      temporary bytes of the compiled training gradient
  compile     seconds to compile the training gradient
  profile     where the training gradient's time goes, by kind of operation
  moe         products of experts, forward and gradient: blocks, ragged_dot and one dense product
  data        preparing GPT-2 tokens against raw tiktoken, and reading training batches
  law         fitting 109 observations, group refits, bootstrap draws; closed form and lsq_linear

`python -m experiments.systems` measures paper-size runs on a mesh (table 11).
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments import cli, tables
from experiments.suites import (
    data,
    decoding,
    experts,
    law,
    machine,
    models,
    profile,
    qwen3_torch,
    training,
)
from experiments.suites.models import Setting
from experiments.suites.timing import Rounds, Row
from xmod_jax import storage
from xmod_jax.config import Compute
from xmod_jax.errors import UserError

Suite = Callable[[Setting], list[Row]]
SUITES: dict[str, Suite] = {
    "training": training.training,
    "evaluation": training.evaluation,
    "decoding": decoding.decoding,
    "optimizer": training.optimizer,
    "memory": training.memory,
    "compile": training.compile_time,
    "profile": profile.profile,
    "moe": experts.moe,
    "data": data.data,
    "law": law.law,
}
_TAKE_TORCH = ("training", "decoding")
_TAKE_KEPT = ("training", "memory", "compile", "profile")
# Flags that some suites do not take; they change nothing there, and are refused.
_UNUSED: dict[str, tuple[str, ...]] = {
    "moe": ("models", "active_depth"),
    "data": ("models", "active_depth", "width", "compute"),
    "law": ("models", "active_depth", "context", "batch", "width", "compute"),
}

_SUITE = flags.DEFINE_enum("suite", None, list(SUITES), "what to measure")
_MODELS = flags.DEFINE_list(
    "models",
    None,
    "hierarchies, mod, moe_8_64, qwen3_torch, NAME_kept, NAME_masked; the rival first (default: "
    "dense, A4K8, A3K16; decoding: also A4K8_masked and, where it is installed, qwen3_torch)",
)
_CONTEXT = flags.DEFINE_list(
    "context", None, "L, tokens; several one after the other (default: 2048; see decoding)"
)
_BATCH = flags.DEFINE_integer("batch", None, "sequences (default: 4; decoding: 1)", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 256, "D; heads of 64, d_ff = 3 D", lower_bound=128)
_DEPTH = flags.DEFINE_list("active_depth", ["28"], "active depth, one or one for each model")
_COMPUTE = flags.DEFINE_enum(
    "compute", "float32", [each.value for each in Compute], "precision of products"
)
_WHOLE_STEP = flags.DEFINE_bool("whole_step", False, "training: with an AdamW update")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each contender", lower_bound=1)
_LIMIT = flags.DEFINE_float(
    "limit_s",
    300,
    "seconds for the rounds of one comparison; at least one round",
    lower_bound=0,
    upper_bound=1e9,
)
_EXPERTS = flags.DEFINE_list("experts", ["64", "128"], "numbers of experts, for the suite moe")
_REPORT = flags.DEFINE_bool(
    "device_report", False, "prints machine, versions, devices and settings; alone or with a suite"
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results")

_MODELS_DEFAULT = ("dense", "A4K8", "A3K16")
_MAX_DEPTH = 10_000
_MAX_CONTEXT = 1 << 24


def _depths(count: int) -> tuple[int, ...]:
    depths = _integers("active_depth", _DEPTH.value, 1, _MAX_DEPTH)
    if len(depths) not in (1, count):
        raise UserError("--active_depth takes one depth, or one for each of --models")
    return depths * (count // len(depths))


def _integers(name: str, values: list[str], least: int, most: int) -> tuple[int, ...]:
    if not values or not all(tables.whole(v, least, most) for v in values):
        raise UserError(f"--{name}={','.join(values)}: whole numbers from {least} to {most}")
    return tuple(map(int, values))


def _models(suite: str) -> tuple[str, ...]:
    if _MODELS.value is None:
        return decoding.default_models() if suite == "decoding" else _MODELS_DEFAULT
    names = tuple(_MODELS.value)
    if not names:
        raise UserError("--models=: name at least one model")
    if len(set(names)) < len(names) and len(_DEPTH.value) == 1:
        raise UserError(f"--models={','.join(names)}: one name twice")
    if suite != "decoding" and (masked := [n for n in names if n.endswith(models.MASKED)]):
        raise UserError(f"--models={masked[0]}: only decoding can run layers and mask them")
    if suite not in _TAKE_KEPT and (kept := [n for n in names if n.endswith(models.KEPT)]):
        raise UserError(f"--models={kept[0]}: products are kept in {', '.join(_TAKE_KEPT)} only")
    return names


def _settings(suite: str) -> list[Setting]:
    """A setting for each context; finds a mistake before the measurement, not after it."""
    names = _models(suite)
    compute = Compute(_COMPUTE.value)
    experts_ = _integers("experts", _EXPERTS.value, 8, 1 << 16)
    first = Setting(
        models=names,
        depths=_depths(len(names)),
        context=0,
        batch=_BATCH.value or (1 if suite == "decoding" else 4),
        width=_WIDTH.value,
        compute=compute,
        rounds=Rounds(_ROUNDS.value, _LIMIT.value),
        experts=experts_,
        whole_step=_WHOLE_STEP.value,
    )
    layer = models.backbone(first.width)
    for name, depth in zip(names, first.depths, strict=True):
        models.config(name, depth, layer, compute)
    if models.QWEN3_TORCH in names:
        if suite not in _TAKE_TORCH:
            raise UserError(f"--models: {models.QWEN3_TORCH} is in {', '.join(_TAKE_TORCH)} only")
        qwen3_torch.require(first)
    contexts: tuple[int, ...] = decoding.CONTEXTS if suite == "decoding" else (2048,)
    if _CONTEXT.value is not None:
        contexts = _integers("context", _CONTEXT.value, 1, _MAX_CONTEXT)
    return [dataclasses.replace(first, context=context) for context in contexts]


def _refuse_unused(suite: str) -> None:
    unused = {*_UNUSED.get(suite, ())}
    unused |= {"experts"} if suite != "moe" else set()
    unused |= {"whole_step"} if suite != "training" else set()
    if given := sorted(name for name in unused if flags.FLAGS[name].present):
        raise UserError(f"--{given[0]} changes nothing in --suite={suite}: leave it out")


def _print(setting: Setting, rows: list[Row]) -> None:
    told = {
        "suite": _SUITE.value,
        "context": setting.context,
        "batch": setting.batch,
        "width": setting.width,
        "compute": setting.compute.value,
        "rounds": setting.rounds.count,
    }
    print(", ".join(f"{key} {value}" for key, value in told.items()))
    text = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    cells = [["-" if v is None else text(v) for v in row.values()] for row in rows]
    print(tables.text_table(list(rows[0]), cells), flush=True)


def main() -> None:
    """Measures one suite and prints it; with `device_report` what it was measured on."""
    suite = _SUITE.value
    if suite is None and not _REPORT.value:
        raise UserError(f"--suite is missing; known: {', '.join(SUITES)}")
    if suite is not None:
        _refuse_unused(suite)
    if _OUTPUT.value:
        cli.check_output_file(_OUTPUT.value)
    settings = _settings(suite) if suite else []
    report = machine.report()
    if _REPORT.value:
        print("\n".join(machine.lines(report)), flush=True)
    else:
        device = report["devices"][0]["kind"]
        print(f"{device} x{len(report['devices'])}, {report['processor']}, load {report['load']}")
    results: list[dict[str, Any]] = []
    for setting in settings:
        rows = SUITES[str(suite)](setting)
        _print(setting, rows)
        plain = dataclasses.asdict(setting) | {"compute": setting.compute.value}
        results.append({"suite": suite} | plain | {"results": rows})
        if _OUTPUT.value:  # after each context: what is measured is kept
            storage.write_json(
                pathlib.Path(_OUTPUT.value), {"device_report": report, "runs": results}
            )
    if _OUTPUT.value and not settings:
        storage.write_json(pathlib.Path(_OUTPUT.value), {"device_report": report, "runs": []})


if __name__ == "__main__":
    cli.run(main)
