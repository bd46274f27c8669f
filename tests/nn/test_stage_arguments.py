"""What a stage cannot be run on is refused in a line that names the argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.nn.references import make_problem, toy_block
from xmod_jax import gated_residual, routed_stage, threshold_stage
from xmod_jax.nn.routed_stage import Dense, routed_stages
from xmod_jax.nn.threshold_stage import threshold_stages

B, L, D, S = 2, 12, 8, 3
DENSE = Dense(lambda params, x_BLD, _: (x_BLD, None), lambda *each: (each[0], each[-1]))
PROBLEM = make_problem(0, B, L, D, S, jnp.float32)
BLOCK, GATES = PROBLEM.params
FIRST_TWO = {name: leaf[:2] for name, leaf in BLOCK.items()}
GOOD = {
    "update": gated_residual(toy_block),
    "params": PROBLEM.params,
    "router_SD": PROBLEM.router_SD,
    "x_BLD": PROBLEM.x_BLD,
    "positions": PROBLEM.positions_BL,
    "sparsity": 4,
}


def train(**given: Any) -> Any:
    """Traced alone: nothing is compiled."""
    given = GOOD | given
    first = [given.pop(name) for name in ("update", "params", "router_SD", "x_BLD", "positions")]
    return jax.eval_shape(lambda: routed_stage(*first, **given))


def evaluate(threshold_S: Any = None, **given: Any) -> Any:
    given = GOOD | given
    first = [given.pop(name) for name in ("update", "params", "router_SD", "x_BLD", "positions")]
    threshold_S = jnp.zeros(S) if threshold_S is None else threshold_S
    return jax.eval_shape(lambda: threshold_stage(*first, threshold_S, **given))


def residual(make: Any) -> Any:
    return {"update": gated_residual(lambda params, rows, positions: make(rows))}


REFUSED = {
    "fewer routers than layers": ({"router_SD": PROBLEM.router_SD[:2]}, r"router_SD, \[2, 8\]"),
    "more routers than layers": ({"router_SD": jnp.ones((4, D))}, r"router_SD, \[4, 8\]"),
    "routers of another width": ({"router_SD": jnp.ones((S, 7))}, r"^router_SD .*D = 8"),
    "one router": ({"router_SD": jnp.ones(D)}, r"^router_SD must be \[S, D\]"),
    "no router": ({"router_SD": jnp.ones((0, D))}, "^router_SD"),
    "routers in bfloat16": ({"router_SD": jnp.ones((S, D), jnp.bfloat16)}, "^router_SD .*float32"),
    "routers of whole numbers": ({"router_SD": jnp.ones((S, D), int)}, "^router_SD .*float32"),
    "a leaf of fewer layers": (
        {"params": (BLOCK | {"mix": BLOCK["mix"][:2]}, GATES)},
        r"^params\[0\]\['mix'\] must be \[S, ...\] with \[S\] = \[3\], .* got \[2, 8, 8\]",
    ),
    "fewer layers": ({"params": (FIRST_TWO, GATES[:2])}, r"^params\[0\]"),
    "one gate for all": ({"params": (BLOCK, jnp.ones(()))}, r"^params\[1\]"),
    "a number for gates": ({"params": (BLOCK, 1.0)}, r"^params\[1\] must be an array, got float"),
    "gates of more numbers": ({"params": (BLOCK, jnp.ones((S, 3)))}, "^gate must be one number"),
    "parameters without gates": ({"params": BLOCK}, "^params must be the pair"),
    "no sequences": ({"x_BLD": PROBLEM.x_BLD[:0]}, "^x_BLD"),
    "no tokens": ({"x_BLD": PROBLEM.x_BLD[:, :0]}, r"^x_BLD .* got float32 \[2, 0, 8\]"),
    "one sequence without its axis": ({"x_BLD": PROBLEM.x_BLD[0]}, "^x_BLD"),
    "a stream of whole numbers": ({"x_BLD": jnp.ones((B, L, D), int)}, "^x_BLD must be floating"),
    "a complex stream": ({"x_BLD": PROBLEM.x_BLD + 0j}, "^x_BLD must be floating"),
    "a list for the stream": ({"x_BLD": [1.0]}, "^x_BLD must be an array, got list"),
    "a variable for the stream": ({"x_BLD": nnx.Param(PROBLEM.x_BLD)}, "^x_BLD must be an array"),
    "positions of one sequence": ({"positions": jnp.arange(L)}, r"^positions must be \[B, L"),
    "positions of fewer tokens": ({"positions": PROBLEM.positions_BL[:, 1:]}, "^positions"),
    "phases of one sequence": (
        {"positions": (PROBLEM.positions_BL, jnp.ones((1, L, 4)))},
        r"^positions\[1\]",
    ),
    "a mask of fewer tokens": ({"valid_BL": jnp.ones((B, L - 1), bool)}, "^valid_BL must be bool"),
    "a mask of numbers": ({"valid_BL": jnp.ones((B, L))}, "^valid_BL must be bool"),
    "a list for a mask": ({"valid_BL": [[True] * L] * B}, "^valid_BL must be an array"),
    "sparsity 0": ({"sparsity": 0}, "^sparsity must be a whole number of at least 1"),
    "sparsity -3": ({"sparsity": -3}, "^sparsity .* got -3"),
    "sparsity 2.5": ({"sparsity": 2.5}, "^sparsity .* got 2.5"),
    "sparsity True": ({"sparsity": True}, "^sparsity"),
    "bias scale NaN": ({"bias_scale": float("nan")}, "^bias_scale must be a finite number"),
    "bias scale -1": ({"bias_scale": -1.0}, "^bias_scale"),
    "bias scale text": ({"bias_scale": "1"}, "^bias_scale"),
    "no update": ({"update": None}, "^update must be a function"),
    "an update that returns nothing": (
        {"update": lambda params, rows, positions, score: None},
        "^update must return rows",
    ),
    "a residual of one channel": (residual(lambda rows: rows[..., :1]), "^block must return rows"),
    "a residual of whole numbers": (residual(lambda rows: rows.astype(int)), "^block"),
    "two residuals": (residual(lambda rows: (rows, rows)), "^block .* it returned tuple"),
}


@pytest.mark.parametrize("stage", [train, evaluate])
@pytest.mark.parametrize("case", list(REFUSED))
def test_what_no_stage_can_run_on_is_refused_by_its_name(stage, case):
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        stage(**given)


@pytest.mark.parametrize(
    "threshold_S", [jnp.zeros(S - 1), jnp.zeros((1, S)), jnp.zeros(S, bool), 0.0]
)
def test_thresholds_are_one_number_for_each_layer(threshold_S):
    with pytest.raises(ValueError, match=r"^threshold_S"):
        evaluate(threshold_S)


@pytest.mark.parametrize("name", ["sparsity", "bias_scale"])
@pytest.mark.parametrize("stage", [train, evaluate])
def test_what_a_program_is_compiled_for_is_known_while_tracing(stage, name):
    with pytest.raises(ValueError, match=f"^{name} .* known while tracing"):
        jax.jit(lambda value: stage(**{name: value}))(2)


def test_a_block_is_a_function():
    with pytest.raises(ValueError, match=r"^block must be a function, got int"):
        gated_residual(3)


def test_numbers_and_arrays_of_numpy_are_as_good_as_others():
    given = {name: jax.tree.map(np.asarray, GOOD[name]) for name in ("params", "x_BLD")}
    given |= {"router_SD": np.asarray(PROBLEM.router_SD), "sparsity": np.int64(4)}
    given |= {"bias_scale": np.float64(1.0), "positions": np.asarray(PROBLEM.positions_BL)}
    assert train(**given) == train()
    assert evaluate(np.zeros(S, np.float32), **given) == evaluate()


@pytest.mark.parametrize("run", [routed_stages, threshold_stages])
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"anchor_params": jnp.ones((1, D))}, "^anchor and anchor_params .*, anchor is missing"),
        ({"anchor": DENSE}, "^anchor and .*, anchor_params is missing"),
        (
            {"anchor": DENSE, "anchor_params": jnp.ones((2, D))},
            r"^anchor_params must be \[N, ...\] with \[N\] = \[1\]",
        ),
        ({"lead": DENSE, "lead_params": jnp.ones((1, 2))}, "^lead_params .* of 3"),
        ({"lead": DENSE, "lead_params": jnp.ones(1)}, "^lead_params"),
    ],
)
def test_anchors_and_leads_fit_the_stages(run, layers, message):
    params, router_NSD = jax.tree.map(lambda leaf: leaf[None], PROBLEM[:2])
    more = (jnp.zeros((1, S)),) if run is threshold_stages else ()
    given = (GOOD["update"], params, router_NSD, PROBLEM.x_BLD, PROBLEM.positions_BL, *more)
    with pytest.raises(ValueError, match=message):
        run(*given, sparsity=4, **layers)
