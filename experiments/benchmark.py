"""Measures speed, memory and compile time of Dense, MoD, MoE and X-MoD against each other.

    python -m experiments.benchmark --suite=training [--context=2048] [--batch=4] [--output=FILE]

Contenders run interleaved in one process after a warm-up; medians, spread and ratios to the first
contender are printed. Beside each ratio stands its bound, what the executed FLOPs allow, and the
share of it that was reached.

  training    gradient of the training loss, optimiser apart
  evaluation  threshold routing, thresholds set so that every layer routes about L/K tokens
  decoding    tokens one by one behind a context of that length, with such thresholds
  optimizer   one optimiser update
  memory      temporary bytes of the compiled training gradient
  compile     seconds to compile the training gradient
  moe         products of experts, forward and gradient: blocks, ragged_dot and one dense product
  data        preparing GPT-2 tokens against raw tiktoken, and reading training batches
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import platform
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments import cli, tables
from xmod_jax import accounting, records
from xmod_jax.config import BYTE_VOCABULARY, Backbone, ModelConfig, MoE, Routing
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy

SUITES = ("training", "evaluation", "decoding", "optimizer", "memory", "compile", "moe", "data")
_SUITE = flags.DEFINE_enum("suite", None, SUITES, "what to measure", required=True)
_MODELS = flags.DEFINE_list(
    "models", ["dense", "A4K8", "A3K16"], "hierarchies, mod or moe_8_64; the rival first"
)
_CONTEXT = flags.DEFINE_integer("context", 2048, "L, tokens", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 4, "sequences", lower_bound=1)
_WIDTH = flags.DEFINE_integer("width", 256, "D; heads of 64, d_ff = 3 D", lower_bound=128)
_DEPTH = flags.DEFINE_list("active_depth", ["28"], "active depth, one or one for each model")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "measurements of each contender", lower_bound=1)
_EXPERTS = flags.DEFINE_list("experts", ["64", "128"], "numbers of experts, for the suite moe")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the results")


_MAX_DEPTH = 10_000
_ACTIVE = 8  # experts of a token, in the suite moe
_HAIR = 1e-4  # of a router logit
_DECODED = 16  # tokens of a measurement


@dataclasses.dataclass(frozen=True)
class Contender:
    """A model under measurement: its configuration, parameters and batch."""

    name: str
    config: ModelConfig
    model: Any
    tokens: Any


def _config(name: str, depth: int) -> ModelConfig:
    width = _WIDTH.value
    if width % 128:
        raise UserError(f"--width={width} is not a multiple of 128 (two heads of 64 a KV head)")
    backbone = Backbone(width, 64, width // 64, width // 128, 3 * width, BYTE_VOCABULARY)
    routing = Routing.mod() if name.lower() == "mod" else Routing()
    try:
        if experts := re.fullmatch(r"moe_8_(\d+)", name.lower()):
            sparsity, rest = divmod(int(experts[1]), 8)
            if rest:
                raise ValueError(f"{name}: the experts must be a multiple of 8")
            moe = MoE.fine_grained(backbone, sparsity)
            return ModelConfig(backbone, Hierarchy.dense(depth), moe=moe)
        return ModelConfig(backbone, Hierarchy.from_name(name, depth), routing)
    except ValueError as error:
        raise UserError(f"--models: {error}") from error


def _depths() -> list[int]:
    try:
        depths = [int(depth) for depth in _DEPTH.value]
    except ValueError as error:
        raise UserError(f"--active_depth={','.join(_DEPTH.value)}: not integers") from error
    if len(depths) not in (1, len(_MODELS.value)):
        raise UserError("--active_depth takes one depth, or one for each of --models")
    if not all(0 < depth <= _MAX_DEPTH for depth in depths):
        raise UserError(f"--active_depth={','.join(_DEPTH.value)}: from 1 to {_MAX_DEPTH}")
    return depths * (len(_MODELS.value) // len(depths))


def _contenders(arrays: bool) -> list[Contender]:
    """The models to measure; shapes only unless `arrays`."""
    import jax
    from flax import nnx

    from xmod_jax.model import Decoder

    def contender(name: str, depth: int) -> Contender:
        config = _config(name, depth)
        make: Callable[[Any], Any] = lambda key: Decoder(config, rngs=nnx.Rngs(key))
        shape = (_BATCH.value, _CONTEXT.value + 1)
        draw = lambda key: jax.random.randint(key, shape, 0, BYTE_VOCABULARY)
        key = jax.random.key(0)
        evaluate = (lambda f: jax.jit(f)(key)) if arrays else (lambda f: jax.eval_shape(f, key))
        label = name if len(_DEPTH.value) == 1 else f"{name}@{depth}"
        return Contender(label, config, evaluate(make), evaluate(draw))

    return [contender(*pair) for pair in zip(_MODELS.value, _depths(), strict=True)]


def _gradient() -> Any:
    import jax

    from xmod_jax.training.compilation import jit
    from xmod_jax.training.step import training_loss

    return jit(jax.grad(lambda model, tokens: training_loss(model, tokens, 1e-4)[0]))


def _training(contenders: list[Contender]) -> list[dict[str, Any]]:
    calls: dict[str, Callable[[], Any]] = {}
    for each in contenders:
        compiled = _gradient().lower(each.model, each.tokens).compile()
        calls[each.name] = functools.partial(compiled, each.model, each.tokens)
    per_token = accounting.train_hardware_flops_per_token
    return _compare(
        calls, {e.name: _tokens() * per_token(e.config, _CONTEXT.value) for e in contenders}
    )


def _evaluation(contenders: list[Contender]) -> list[dict[str, Any]]:
    """Thresholds are the smallest selected logits of a top-k pass over one sequence.

    The batch repeats that sequence, so that a layer routes about L/K tokens of each, the trained
    load: a router at its start sends none of one sequence and all of another. Thresholds are raised
    by a hair, lest rounding routes one token more and a layer needs the next bucket.
    """
    from xmod_jax.training.compilation import jit
    from xmod_jax.training.evaluation import batch_statistics

    calls: dict[str, Callable[[], Any]] = {}
    flops = {}
    for each in contenders:
        route = _trained_load(each)
        tokens = each.tokens[:1].repeat(len(each.tokens), 0)
        compiled = jit(batch_statistics).lower(each.model, tokens, route).compile()
        routed = compiled(each.model, tokens, route).get("routed")
        share = "" if routed is None else f" (routes {float(routed):.3f} of the token-layers)"
        name = each.name + share
        calls[name] = functools.partial(compiled, each.model, tokens, route)
        per_token = accounting.forward_hardware_flops_per_token(each.config, _CONTEXT.value)
        flops[name] = _tokens() * per_token
    return _compare(calls, flops)


def _trained_load(each: Contender) -> Any:
    """Thresholds that route about L/K tokens of the batch's first sequence to every layer."""
    from xmod_jax.model import Threshold, TopK
    from xmod_jax.nn.routed_stage import StageOutput
    from xmod_jax.training.compilation import jit

    top_k = jit(lambda model, tokens: model(tokens[:, :-1], TopK()))
    _, outputs = top_k(each.model, each.tokens[:1])
    stages = [out for out in outputs if isinstance(out, StageOutput)]
    return Threshold(tuple(out.kth_S + _HAIR for out in stages))


def _decoding(contenders: list[Contender]) -> list[dict[str, Any]]:
    """Beside the time of a token stands how many sparse layers it ran, and the caches' size."""
    import jax.numpy as jnp

    from xmod_jax.inference.decode import decode_step
    from xmod_jax.inference.generate import Generator, Prompts
    from xmod_jax.training.compilation import jit

    calls: dict[str, Callable[[], Any]] = {}
    states: dict[str, list[Any]] = {}
    routed = lambda cache: sum(int(jnp.sum(group.count_NSB)) for group in cache.groups)
    tokens = _DECODED * (_ROUNDS.value + 1)
    for each in contenders:
        generator = Generator(each.model, _trained_load(each))
        batch = each.tokens[:1, :-1].repeat(_BATCH.value, 0)
        # Room for the steps, wherever they are routed: none is measured while buffers grow.
        cache, _ = generator.prefill(Prompts.ragged(list(batch)), tokens, reserve=tokens)
        state = states[each.name] = [cache, routed(cache)]
        step = jit(decode_step, donate_argnums=2)
        running_B = jnp.ones(_BATCH.value, bool)

        def decode(step=step, each=each, route=generator.route, state=state, running_B=running_B):
            for n in range(_DECODED):
                token_B = each.tokens[0, n % _CONTEXT.value].repeat(_BATCH.value)
                logits_BV, state[0] = step(each.model, route, state[0], token_B, running_B)
            return logits_BV

        calls[each.name] = decode
    rows = _compare(calls, None)
    for row in rows:
        cache, before = states[row["model"]]
        row["ms_per_token"] = 1e3 * row["seconds"] / _DECODED
        row["sparse_layers_run"] = (routed(cache) - before) / (tokens * _BATCH.value)
        row["cache_MB"] = cache.nbytes / 2**20
    return rows


def _optimizer(contenders: list[Contender]) -> list[dict[str, Any]]:
    from xmod_jax.config import OptimizerConfig
    from xmod_jax.training.compilation import jit
    from xmod_jax.training.optimizer import make_optimizer

    optimizer = make_optimizer(OptimizerConfig(), 100)
    update = jit(optimizer.update)
    calls: dict[str, Callable[[], Any]] = {}
    for each in contenders:
        state = optimizer.init(each.model)
        calls[each.name] = functools.partial(update, each.model, state, each.model)
    return _compare(calls, None)


def _memory(contenders: list[Contender]) -> list[dict[str, Any]]:
    rows = []
    for each in contenders:
        analysis = _gradient().lower(each.model, each.tokens).compile().memory_analysis()
        temporary = analysis.temp_size_in_bytes
        rows.append(
            {
                "model": each.name,
                "layers": each.config.hierarchy.depth,
                "temporary_MB": temporary / 2**20,
            }
        )
    for row in rows:
        row["ratio"] = row["temporary_MB"] / rows[0]["temporary_MB"]
    return rows


def _compile(contenders: list[Contender]) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for _ in range(_ROUNDS.value):
        for each in contenders:
            lowered = _gradient().lower(each.model, each.tokens)
            start = time.perf_counter()
            lowered.compile()
            times[each.name].append(time.perf_counter() - start)
    return _rows(times, None, {e.name: e.config.hierarchy.depth for e in contenders})


def _moe() -> list[dict[str, Any]]:
    """A row for each form of the product and number of experts; 8 experts are active."""
    import jax
    import jax.numpy as jnp

    from xmod_jax.nn import grouped
    from xmod_jax.training.compilation import jit

    rows = []
    for experts in map(int, _EXPERTS.value):
        width, count = _WIDTH.value, _tokens()
        d_expert = 3 * width // _ACTIVE
        keys = jax.random.split(jax.random.key(experts), 3)
        choice = jax.random.randint(keys[0], (count, _ACTIVE), 0, experts)
        x_TD = jax.random.normal(keys[1], (count, width))
        weight_XIO = jax.random.normal(keys[2], (experts, width, d_expert))

        def product(block: int, x_TD: Any, weight_XIO: Any, choice: Any = choice) -> Any:
            groups = grouped.sort_by_group(choice, len(weight_XIO), block)
            rows_MD = grouped.spread(x_TD, groups)
            return jnp.sum(grouped.grouped_matmul(rows_MD, weight_XIO, groups.size_X, block) ** 2)

        def dense(x_TD: Any, weight_XIO: Any) -> Any:
            return jnp.sum((x_TD @ jnp.concatenate(list(weight_XIO[:_ACTIVE]), axis=1)) ** 2)

        forms: dict[str, Callable[..., Any]] = {
            f"one dense product, {experts} experts": dense,
            "blocks": functools.partial(product, grouped.block_rows(count * _ACTIVE, experts)),
            "ragged_dot": functools.partial(product, grouped.RAGGED),
        }
        calls: dict[str, Callable[[], Any]] = {}
        for name, form in forms.items():
            compiled = jit(jax.grad(form, argnums=(0, 1))).lower(x_TD, weight_XIO).compile()
            calls[name] = functools.partial(compiled, x_TD, weight_XIO)
        flops = 3 * 2.0 * count * _ACTIVE * width * d_expert
        rows += _compare(calls, dict.fromkeys(calls, flops))
    return rows


def _data() -> list[dict[str, Any]]:
    """Preparing and reading the Python sources of this environment's packages, tokens a second."""
    import tempfile

    import scipy

    from xmod_jax.data import documents, pipeline, preparation, sources
    from xmod_jax.data.tokenizer import Gpt2Tokenizer

    folder = pathlib.Path(str(scipy.__file__)).parent
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    cores = preparation.default_workers()
    encode = Gpt2Tokenizer()._encoding.encode_ordinary_batch
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        (place / "texts.jsonl").write_text("".join(f"{json.dumps({'text': t})}\n" for t in texts))
        found = documents.find([str(place / "texts.jsonl")], None)
        folders = (place / f"prepared{i}" for i in range(_ROUNDS.value + 1))
        settings = preparation.Settings("gpt2")
        calls: dict[str, Callable[[], Any]] = {
            "raw tiktoken": lambda: encode(texts, num_threads=cores),
            "prepare_data": lambda: preparation.prepare(found, next(folders), settings, cores),
        }
        rows = _compare(calls, None)
        dataset = sources.open_prepared(place / "prepared0", "data")
        batches = pipeline.train_iterator(dataset, _CONTEXT.value, _BATCH.value, 0)
        steps = max(1, 1_000_000 // _tokens())
        rows += _compare({"reading batches": lambda: [next(batches) for _ in range(steps)]}, None)
        amounts = [len(dataset.train)] * 2 + [steps * _tokens()]
    for row, amount in zip(rows, amounts, strict=True):
        row["tokens/s"] = round(amount / row["seconds"])
    return rows


def _tokens() -> int:
    return _BATCH.value * _CONTEXT.value


def _compare(
    calls: dict[str, Callable[[], Any]], flops: dict[str, float] | None
) -> list[dict[str, Any]]:
    """Times calls in turn, several rounds after one to warm up."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(_ROUNDS.value + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if round_:
                times[name].append(time.perf_counter() - start)
    return _rows(times, flops, {})


def _rows(
    times: dict[str, list[float]], flops: dict[str, float] | None, layers: dict[str, int]
) -> list[dict[str, Any]]:
    first = next(iter(times))
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        row: dict[str, Any] = {"model": name}
        if layers:
            row["layers"] = layers[name]
        row |= {"seconds": median, "fastest": min(seconds), "slowest": max(seconds)}
        row["speed"] = statistics.median(times[first]) / median
        if flops:
            row["GFLOP/s"] = flops[name] / median / 1e9
            row["bound"] = flops[first] / flops[name]
            row["share"] = row["speed"] / row["bound"]
        rows.append(row)
    return rows


def _check_flags() -> None:
    """Finds a mistake before the measurement, not after it."""
    if not all(number.isdecimal() and int(number) >= 8 for number in _EXPERTS.value):
        raise UserError(f"--experts={','.join(_EXPERTS.value)}: whole numbers from 8 on")
    if not _MODELS.value or not all(_MODELS.value):
        raise UserError(f"--models={','.join(_MODELS.value)}: name at least one model, none empty")
    if _OUTPUT.value:
        path = pathlib.Path(_OUTPUT.value)
        if path.is_dir() or not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
            raise UserError(f"--output={path}: not a file in a folder that can be written to")


_OF_MODELS = {
    "training": _training,
    "evaluation": _evaluation,
    "decoding": _decoding,
    "optimizer": _optimizer,
    "memory": _memory,
    "compile": _compile,
}


def main() -> None:
    """Measures one suite and prints it."""
    suite = _SUITE.value
    _check_flags()
    if suite in _OF_MODELS:
        rows = _OF_MODELS[suite](_contenders(arrays=suite not in ("memory", "compile")))
    else:
        rows = {"moe": _moe, "data": _data}[suite]()
    import jax

    setting = {
        "suite": suite,
        "context": _CONTEXT.value,
        "batch": _BATCH.value,
        "width": _WIDTH.value,
        "rounds": _ROUNDS.value,
        "device": f"{jax.devices()[0].device_kind} x{jax.device_count()}, {platform.machine()}",
        "jax": jax.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    text = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    print(tables.text_table(list(rows[0]), [[text(v) for v in row.values()] for row in rows]))
    if _OUTPUT.value:
        records.write_json(_OUTPUT.value, json.loads(json.dumps(setting | {"results": rows})))


if __name__ == "__main__":
    cli.run(main)
