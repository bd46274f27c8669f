"""Training on meshes of 8 devices: the loss curve of one device, and what the devices exchange."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from tests.devices import run_module
from tests.nn import jaxprs
from tests.training import mesh_curves, mesh_evaluation, small
from xmod_jax import sharding
from xmod_jax.config import Compute
from xmod_jax.errors import UserError
from xmod_jax.nn import routing
from xmod_jax.sharding import MeshShape
from xmod_jax.training.checkpoint import named_leaves
from xmod_jax.training.evaluation import make_evaluator
from xmod_jax.training.step import abstract_state, make_step

PRODUCT = "data:2+fsdp:2+tensor:2"
OTHERS = ("dense", "mod", "moe", "routed_ffn", "full_kv")


def curves(*parts):
    return json.loads(run_module("tests.training.mesh_curves", *parts).stdout)


@pytest.fixture(scope="module")
def xmod():
    return curves(f"xmod=one,fsdp:8,{PRODUCT}", f"xmod_kept=one,{PRODUCT}")


@pytest.fixture(scope="module")
def others():
    meshes = f"one,data:8,fsdp:8,{PRODUCT}"
    kept = (f"{name}_kept=one,{PRODUCT}" for name in ("moe", "routed_ffn"))
    return curves("xmod=one,data:8", *(f"{name}={meshes}" for name in OTHERS), *kept)


def deviating(found):
    """Runs and metrics that are not one device's, to float32 rounding."""
    wrong = []
    for name, run in found.items():
        want = found[f"{name.split()[0]} one"]["metrics"]
        for metric in ("loss", "alignment_loss", "balance_loss", "max_load"):
            got = run["metrics"][metric]
            assert len(got) == len(want[metric])
            if not np.allclose(got, want[metric], rtol=2e-5, atol=0, equal_nan=True):
                wrong.append((name, metric, got, want[metric]))
    return wrong


def foreign(found):
    """What moves on data and fsdp but parameters, their like in the optimiser, and metrics."""
    strangers = []
    for name, run in found.items():
        architecture, mesh = name.split()
        if mesh in ("one", PRODUCT):
            continue
        state = abstract_state(mesh_curves.run_config(architecture))
        shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
        matrices = {shape[-2:] for shape in shapes if len(shape) >= 2}
        parts = {(a // d, b // e) for a, b in matrices for d, e in ((8, 1), (1, 8))} | matrices
        L = mesh_curves.LENGTH
        assert not {L, routing.capacity(L, 4)} & {size for shape in shapes for size in shape}
        assert run["collectives"]
        for kind, shape in run["collectives"]:
            known = tuple(shape) in shapes or tuple(shape[-2:]) in parts or math.prod(shape) <= 4
            if not known or L in shape:
                strangers.append((name, kind, shape))
    return strangers


@pytest.mark.slow
def test_xmod_on_fsdp_and_on_all_axes_trains_as_on_one_device(xmod):
    assert len(xmod) == 5 and deviating(xmod) == []


@pytest.mark.slow
def test_xmod_on_fsdp_exchanges_parameters_gradients_and_metrics_alone(xmod):
    assert "xmod fsdp:8" in xmod and foreign(xmod) == []


@pytest.mark.slow
def test_a_layers_matrices_are_gathered_one_layer_at_a_time(xmod):
    gathers = [shape for kind, shape in xmod["xmod fsdp:8"]["collectives"] if kind == "all-gather"]
    assert gathers and all(len(shape) == 2 for shape in gathers)


@pytest.mark.slow
@pytest.mark.drill
def test_every_architecture_on_every_mesh_trains_as_on_one_device(others):
    assert len(others) == 2 + 5 * 4 + 2 * 2 and deviating(others) == []


@pytest.mark.slow
@pytest.mark.drill
def test_no_architecture_exchanges_activations_or_routing(others):
    assert {name.split()[0].removesuffix("_kept") for name in others} == {"xmod", *OTHERS}
    assert foreign(others) == []


@pytest.fixture(scope="module")
def evaluated():
    return json.loads(run_module("tests.training.mesh_evaluation", "xmod").stdout)


@pytest.mark.slow
@pytest.mark.drill
def test_a_model_is_evaluated_on_every_mesh_as_on_one_device(evaluated):
    want = evaluated["xmod one"]
    assert len({want[f"loss_{name}"] for name in ("topk", "threshold", "calibrated")}) == 3
    for mesh in (*mesh_evaluation.MESHES, "explicit"):
        got = evaluated[f"xmod {mesh}"]
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=2e-5), (mesh, name)


@pytest.mark.slow
def test_a_mesh_with_explicit_axes_trains_as_one_with_automatic_axes(evaluated):
    assert evaluated["xmod explicit step"] == pytest.approx(evaluated["xmod step"], rel=1e-6)


def test_a_mesh_with_other_axes_is_refused_in_one_line():
    mesh = jax.make_mesh((1,), ("batch",))
    for make in (functools.partial(make_step, small.run()), make_evaluator):
        with pytest.raises(UserError, match=r"axes batch: .* data, fsdp and tensor"):
            make(mesh)


def test_a_mesh_is_parsed_and_told_as_it_was_given():
    assert MeshShape.parse("fsdp:4, data:2") == MeshShape(2, 4, 1)
    assert str(MeshShape(2, 4)) == "data:2,fsdp:4,tensor:1"
    assert MeshShape.parse(str(MeshShape(1, 2, 3))) == MeshShape(1, 2, 3)


@pytest.mark.parametrize("text", ["", "data", "data:0", "data:-1", "model:2", "data:2,data:2", "8"])
def test_anything_else_is_refused_in_one_line(text):
    with pytest.raises(UserError, match="not a list of axis:devices"):
        MeshShape.parse(text)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(data=3), "sequences of a micro-batch, 4, cannot be cut into the 3 parts"),
        (MeshShape(data=2, fsdp=4), "sequences of a micro-batch, 4,"),
        (MeshShape(tensor=2), "key/value heads, 1, cannot be cut into the 2 parts of tensor"),
    ],
)
def test_a_mesh_that_does_not_divide_a_run_is_refused_naming_the_size(shape, message):
    with pytest.raises(UserError, match=message):
        shape.check(small.run())


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match="has 64 devices, there are 1"):
        MeshShape(data=64).make()


def test_by_default_all_devices_that_share_a_micro_batch_are_used():
    config = small.run(batch_size=12, accumulation=2)
    assert MeshShape.for_devices(4, config) == MeshShape(data=2)
    assert MeshShape.for_devices(3, config) == MeshShape(data=3)


def test_the_optimiser_lies_like_its_parameters_and_small_leaves_lie_whole():
    state = abstract_state(small.run())
    specs = named_leaves(sharding.specs(state))
    assert specs["model.embedding.value"] == P(None, "fsdp")
    assert specs["model.head.value"] == P("fsdp", None)
    sparse = "groups[0].sparse.block"
    assert specs[f"model.{sparse}.attention.query.value"] == P(None, None, "fsdp", "tensor")
    assert specs[f"model.{sparse}.ffn.down.value"] == P(None, None, "tensor", "fsdp")
    whole = {name for name, spec in specs.items() if spec == P()}
    assert {"model.groups[0].sparse.gate.value", "model.groups[0].sparse.router.value"} <= whole
    for name, spec in specs.items():
        if name.startswith("optimizer") and name.endswith(".value"):
            assert spec == specs["model." + re.split(r"\.(?:mean|mu|nu)\.", name)[-1]], name


@pytest.mark.parametrize(
    ("spans", "rows", "part"),
    [
        ([(0, 1), (1, 2)], 4, (0, 2)),
        ([(2, 3), (3, 4)], 4, (1, 2)),
        ([(0, 4)], 4, (0, 1)),
        ([(1, 2), (1, 2), (2, 3)], 6, None),  # 3 devices of 6 x 2: the middle of a tensor group
        ([(4, 6)], 6, (2, 3)),
    ],
)
def test_a_process_feeds_whole_parts_of_a_batch(monkeypatch, spans, rows, part):
    class Placed:
        def __init__(self, *_):
            pass

        def addressable_devices_indices_map(self, shape):
            return {n: (slice(*span),) for n, span in enumerate(spans)}

    monkeypatch.setattr(sharding, "NamedSharding", Placed)
    mesh = MeshShape().make()
    if part is None:
        with pytest.raises(UserError, match="whole parts of a batch"):
            sharding.rows_of_process(mesh, rows)
    else:
        assert sharding.rows_of_process(mesh, rows) == part


@pytest.mark.parametrize("name", list(mesh_curves.MODELS))
def test_devices_sum_gradients_in_float32_where_activations_are_bfloat16(name):
    """Along `tensor` a block's activations are summed as they are: a term for each device."""
    config = mesh_curves.run_config(name)
    model = dataclasses.replace(config.model, compute=Compute.BFLOAT16)
    config = dataclasses.replace(config, model=model)
    mesh: Any = AbstractMesh((2, 2, 2), sharding.AXES)
    batch = jax.ShapeDtypeStruct((mesh_curves.BATCH, mesh_curves.LENGTH + 1), np.int32)
    traced = jax.make_jaxpr(make_step(config, mesh))(abstract_state(config), batch)
    sums = [
        (equation.params.get("axes", equation.params.get("axis_name")), var.aval)
        for equation in jaxprs.equations(traced.jaxpr)
        if equation.primitive.name in ("psum", "psum2", "reduce_scatter", "psum_scatter")
        for var in equation.invars
    ]
    assert any("fsdp" in axes for axes, _ in sums) and any("tensor" in axes for axes, _ in sums)
    for axes, aval in sums:
        narrow = aval.dtype == jnp.bfloat16
        assert not narrow or (axes == ("tensor",) and aval.ndim >= 2), (axes, aval)
