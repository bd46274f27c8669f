"""Reads traced programs: which of their sums have fewer bits than float32.

What a compiler makes of a sum in bfloat16 differs (on CPU it has float32 inside, on an H100 not):
the program is judged by what it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

_SUMS = {"reduce_sum", "cumsum", "reduce_window_sum", "scatter-add", "scatter_add"}
_PRODUCTS = {
    "dot_general": "dimension_numbers",
    "ragged_dot_general": "ragged_dot_dimension_numbers",
}
# What a gradient goes through after its sum: it is still a number for each parameter.
_AFTER = {
    *("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy"),
    *("dynamic_update_slice", "dynamic_slice", "slice", "pad", "concatenate", "select_n"),
    *("add", "add_any", "mul", "div", "neg", "psum", "psum2", "reduce_scatter", "all_gather"),
}


def _inner(eqn: Any) -> list[Any]:
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, list | tuple) else [value]:
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                found.append(part)
    return found


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program, loops and branches included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from equations(inner)


def _is_narrow(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype in (jnp.bfloat16, jnp.float16)


def narrow_sums(jaxpr: Any, features: set[int]) -> list[str]:
    """Sums formed in less than float32.

    Products over the sizes of `features` are none: an activation is rounded once, from a sum that
    the device keeps in float32. Products over anything else, tokens that is, are sums.
    """
    found = []
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if name in _SUMS and _is_narrow(eqn.invars[0]):
            found.append(f"{name} {eqn.invars[0].aval}")
        elif name in _PRODUCTS and _is_narrow(eqn.outvars[0]):
            numbers = eqn.params[_PRODUCTS[name]]
            (axes, _), _ = getattr(numbers, "dot_dimension_numbers", numbers)
            sizes = {eqn.invars[0].aval.shape[axis] for axis in axes}
            if not sizes <= features:
                found.append(f"{name} over {sizes} to {eqn.outvars[0].aval}")
    return found


def rounded_on_the_way(jaxpr: Any, output: int) -> list[str]:
    """Values in less than float32 between the sum that forms an output and the output."""
    found: list[str] = []
    _walk(jaxpr, [jaxpr.outvars[output]], found)
    return found


def _walk(jaxpr: Any, todo: list[Any], found: list[str]) -> set[int]:
    """Inputs of a program that `todo` goes back to without a sum between."""
    made = {var: (eqn, i) for eqn in jaxpr.eqns for i, var in enumerate(eqn.outvars)}
    place = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}
    seen, reached, todo = set(), set(), list(todo)
    while todo:
        var = todo.pop()
        if hasattr(var, "val") or var in seen:
            continue
        seen.add(var)
        dtype = getattr(var.aval, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            continue
        if _is_narrow(var):
            found.append(str(made[var][0] if var in made else var.aval))
        elif var in place:
            reached.add(place[var] - len(jaxpr.constvars))
        elif _inner(made[var][0]):
            todo += _through(*made[var], found)
        elif made[var][0].primitive.name in _AFTER:
            todo += made[var][0].invars
    return reached


def _through(eqn: Any, output: int, found: list[str]) -> list[Any]:
    """What an output of a loop, a branch or a call goes back to among the equation's inputs."""
    name, (*_, body) = eqn.primitive.name, _inner(eqn)
    if name == "scan":
        skip, consts = 0, eqn.params["num_consts"]
        carries = range(eqn.params["num_carry"])
    elif name == "while":
        skip, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, carries = eqn.params["body_jaxpr"].jaxpr, range(len(eqn.outvars))
    elif name == "cond":
        branches = [_walk(inner, [inner.outvars[output]], found) for inner in _inner(eqn)]
        return [eqn.invars[1 + i] for i in set().union(*branches)]
    else:
        return [eqn.invars[i] for i in _walk(body, [body.outvars[output]], found)]
    outputs, reached = {output}, set()
    while True:
        reached = _walk(body, [body.outvars[i] for i in outputs], found)
        more = outputs | {i - consts for i in reached if i - consts in carries}
        if more == outputs:
            return [eqn.invars[skip + i] for i in reached]
        outputs = more
