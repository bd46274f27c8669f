"""Products of experts, forward and gradient: blocks, `ragged_dot` and one dense product."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from experiments.suites import timing
from experiments.suites.models import Setting
from experiments.suites.timing import Row

_ACTIVE = 8  # experts of a token


def moe(setting: Setting) -> list[Row]:
    """A row for each form of the product and number of experts; 8 experts are active."""
    import jax
    import jax.numpy as jnp

    from xmod_jax.nn import grouped
    from xmod_jax.training.compilation import jit

    rows = []
    for experts in setting.experts:
        width, count = setting.width, setting.tokens
        d_expert = 3 * width // _ACTIVE
        keys = jax.random.split(jax.random.key(experts), 3)
        choice = jax.random.randint(keys[0], (count, _ACTIVE), 0, experts)
        dtype = setting.compute.value
        x_TD = jax.random.normal(keys[1], (count, width), dtype)
        weight_XIO = jax.random.normal(keys[2], (experts, width, d_expert), dtype)

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
        rows += timing.rows(timing.interleave(calls, setting.rounds), dict.fromkeys(calls, flops))
    return rows
