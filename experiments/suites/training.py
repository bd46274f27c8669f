"""Speed of training and of threshold evaluation; memory and compile time of the gradient."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from experiments.suites import machine, models, qwen3_torch, timing
from experiments.suites.models import Contender, Setting
from experiments.suites.timing import Row, Times
from xmod_jax import accounting
from xmod_jax.config import OptimizerConfig

PRODUCT = "large product"
_ALIGNMENT = 1e-4
_HAIR = 1e-4  # of a router logit


def training(setting: Setting) -> list[Row]:
    """Gradient of the training loss; with `whole_step` an AdamW update too.

    The last row is a large matrix product, measured in turn with the others: ``of_product`` is the
    share of its rate that a model's executed FLOPs reach.
    """
    labels = dict(zip(setting.labels(), setting.models, strict=True))
    calls: dict[str, Callable[[], Any]] = {}
    flops: dict[str, float] = {}
    ours = {each.name: each for each in models.contenders(setting, arrays=True)}
    for label, name in labels.items():
        if name == models.QWEN3_TORCH:
            made = qwen3_torch.training(setting, setting.depths[list(labels).index(label)])
            calls[label], flops[label] = made
            continue
        timing.say(f"compiling {label}")
        calls[label] = _step(ours[label], setting)
        per_token = accounting.train_hardware_flops_per_token(
            ours[label].config, setting.context, keep_products=ours[label].keep
        )
        flops[label] = setting.tokens * per_token
    calls[PRODUCT], flops[PRODUCT] = machine.product(setting.compute.value)
    times = timing.interleave(calls, setting.rounds)
    return _with_ceiling(times, flops)


def _with_ceiling(times: dict[str, Times], flops: dict[str, float]) -> list[Row]:
    rows = timing.rows(times, flops)
    ceiling = rows[-1]["GFLOP/s"]
    for row in rows:
        row["of_product"] = row["GFLOP/s"] / ceiling
    for name in ("speed", "bound", "share"):  # of another work
        rows[-1][name] = None
    return rows


def _step(each: Contender, setting: Setting) -> Callable[[], Any]:
    """What training measures of one of our models, compiled."""
    import optax

    from xmod_jax.training.compilation import jit
    from xmod_jax.training.optimizer import make_optimizer

    if not setting.whole_step:
        compiled = gradient(each.keep).lower(each.model, each.tokens).compile()
        return functools.partial(compiled, each.model, each.tokens)
    optimizer = make_optimizer(OptimizerConfig(matrices="adamw"), 100)

    def step(model: Any, state: Any, tokens: Any) -> Any:
        own = _gradient(model, tokens, each.keep)
        updates, state = optimizer.update(own, state, model)
        return optax.apply_updates(model, updates), state

    state = jit(optimizer.init)(each.model)
    # In place, as in training.
    compiled = jit(step, donate_argnums=(0, 1)).lower(each.model, state, each.tokens).compile()
    held = [each.model, state]

    def call() -> Any:
        held[:] = compiled(*held, each.tokens)
        return held

    return call


def _gradient(model: Any, tokens: Any, keep: bool) -> Any:
    import jax

    from xmod_jax.training.step import training_loss

    return jax.grad(lambda model: training_loss(model, tokens, _ALIGNMENT, keep=keep)[0])(model)


def gradient(keep: bool) -> Any:
    """The gradient of the training loss, ``(model, tokens) -> gradient``, to be compiled."""
    from xmod_jax.training.compilation import jit

    return jit(functools.partial(_gradient, keep=keep))


def evaluation(setting: Setting) -> list[Row]:
    """Threshold routing, at thresholds that route about L/K tokens to every layer.

    Thresholds are the smallest selected logits of a top-k pass over one sequence. The batch repeats
    that sequence, so that a layer routes about L/K tokens of each, the trained load: a router at
    its start sends none of one sequence and all of another. Thresholds are raised by a hair, lest
    rounding routes one token more and a layer needs the next bucket.
    """
    from xmod_jax.training.compilation import jit
    from xmod_jax.training.evaluation import batch_statistics

    calls: dict[str, Callable[[], Any]] = {}
    flops = {}
    for each in models.contenders(setting, arrays=True):
        timing.say(f"compiling {each.name}")
        route = _trained_load(each)
        tokens = each.tokens[:1].repeat(len(each.tokens), 0)
        compiled = jit(batch_statistics).lower(each.model, tokens, route).compile()
        routed = compiled(each.model, tokens, route).get("routed")
        share = "" if routed is None else f" (routes {float(routed):.3f} of the token-layers)"
        name = each.name + share
        calls[name] = functools.partial(compiled, each.model, tokens, route)
        per_token = accounting.forward_hardware_flops_per_token(each.config, setting.context)
        flops[name] = setting.tokens * per_token
    return timing.rows(timing.interleave(calls, setting.rounds), flops)


def _trained_load(each: Contender) -> Any:
    """Thresholds that route about L/K tokens of the batch's first sequence to every layer."""
    from xmod_jax.model import Threshold, TopK
    from xmod_jax.nn.routed_stage import StageOutput
    from xmod_jax.training.compilation import jit

    top_k = jit(lambda model, tokens: model(tokens[:, :-1], TopK()))
    _, outputs = top_k(each.model, each.tokens[:1])
    stages = [out for out in outputs if isinstance(out, StageOutput)]
    return Threshold(tuple(out.kth_S + _HAIR for out in stages))


def optimizer(setting: Setting) -> list[Row]:
    """One optimiser update, with the recipe's Muon."""
    from xmod_jax.training.compilation import jit
    from xmod_jax.training.optimizer import make_optimizer

    made = make_optimizer(OptimizerConfig(), 100)
    update = jit(made.update)
    calls: dict[str, Callable[[], Any]] = {}
    for each in models.contenders(setting, arrays=True):
        state = made.init(each.model)
        calls[each.name] = functools.partial(update, each.model, state, each.model)
    return timing.rows(timing.interleave(calls, setting.rounds))


def memory(setting: Setting) -> list[Row]:
    """Temporary bytes of the compiled gradient."""
    rows: list[Row] = []
    for each in models.contenders(setting, arrays=False):
        timing.say(f"compiling {each.name}")
        analysis = gradient(each.keep).lower(each.model, each.tokens).compile().memory_analysis()
        rows.append(
            {
                "model": each.name,
                "layers": each.config.hierarchy.depth,
                "temporary_MB": analysis.temp_size_in_bytes / 2**20,
            }
        )
    for row in rows:
        row["ratio"] = row["temporary_MB"] / rows[0]["temporary_MB"]
    return rows


def compile_time(setting: Setting) -> list[Row]:
    """Seconds to compile the gradient."""
    times: dict[str, list[tuple[float, float]]] = {}
    ours = models.contenders(setting, arrays=False)
    begin = time.perf_counter()
    for done in range(1, setting.rounds.count + 1):
        for each in ours:
            lowered = gradient(each.keep).lower(each.model, each.tokens)
            wall, cpu = time.perf_counter(), time.process_time()
            lowered.compile()
            pair = time.perf_counter() - wall, time.process_time() - cpu
            times.setdefault(each.name, []).append(pair)
        spent = time.perf_counter() - begin
        timing.say(f"round {done} of {setting.rounds.count}, {spent:.0f} s")
        if spent * (1 + 1 / done) > setting.rounds.limit_s:
            break
    rows = timing.rows({name: Times(*zip(*pairs, strict=True)) for name, pairs in times.items()})
    for row, each in zip(rows, ours, strict=True):
        row["layers"] = each.config.hierarchy.depth
    return rows
