"""What Slurm's variables say: lists of nodes, ports, shares of a node's devices; odd values."""

from __future__ import annotations

import itertools

import pytest

from xmod_jax import slurm
from xmod_jax.errors import UserError

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("gpu03", "gpu03"),
        ("login-1.site.org", "login-1.site.org"),
        ("gpu[03-05,9],other", "gpu03 gpu04 gpu05 gpu9 other"),
        ("node[001-002]-ib", "node001-ib node002-ib"),
        ("rack[0-1]n[0-1]", "rack0n0 rack0n1 rack1n0 rack1n1"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("a[1-2,5],b03", "a1 a2 a5 b03"),
        ("b03,a[1-2,5]", "b03 a1 a2 a5"),
        ("[1-2]x", "1x 2x"),
        ("127.0.0.1,127.0.0.2", "127.0.0.1 127.0.0.2"),
    ],
)
def test_a_list_of_nodes_names_each_in_slurms_order(nodes, names):
    assert list(slurm.hostnames(nodes)) == names.split()
    step = slurm.step(STEP | {"SLURM_STEP_NODELIST": nodes})
    assert step is not None and step.host == names.split()[0]


@pytest.mark.parametrize(
    "nodes",
    ["a[1", "a]1", "a[]", "a[x]", "a[2-1]", "a[1-]", "a,,b", ",a", "a b", "a[[1]]"],
)
def test_what_is_no_list_of_nodes_is_refused_in_one_line(nodes):
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST") as refusal:
        slurm.step(STEP | {"SLURM_STEP_NODELIST": nodes})
    assert "\n" not in str(refusal.value)


def test_a_range_of_more_nodes_than_there_can_be_is_refused_without_listing_it():
    with pytest.raises(UserError, match="not a list of numbers"):
        next(slurm.hostnames("a[1-999999999999]"))


def scontrol(folder, script):
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": str(folder)}


def test_slurms_own_program_is_asked_for_the_first_node(tmp_path):
    says = scontrol(tmp_path, '[ "$*" = "show hostnames gpu[03-04]" ] && echo one && echo two')
    step = slurm.step(STEP | says)
    assert step is not None and step.host == "one"


@pytest.mark.parametrize("script", ["exit 1", ":", "echo; echo '  '"])
def test_a_program_of_slurms_that_does_not_answer_is_done_without(tmp_path, script):
    step = slurm.step(STEP | scontrol(tmp_path, script))
    assert step is not None and step.host == "gpu03"


def test_steps_meet_below_the_ports_of_outgoing_connections_each_at_its_own():
    ports = [
        step.ports
        for job, number in itertools.product(range(1234, 1264), range(8))
        if (step := slurm.step(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(number)}))
    ]
    # Linux gives 32768 to 60999 to whoever connects.
    assert all(1024 <= port < 32_768 for own in ports for port in own)
    assert len({own[0] for own in ports}) == 240
    assert all(len(set(own)) == len(own) > 1 for own in ports)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS: 'many' is not a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "-2"}, "SLURM_STEP_NUM_TASKS"),
        ({"SLURM_STEP_NUM_TASKS": "0"}, "not below SLURM_STEP_NUM_TASKS=0"),
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_PROCID": "1_0"}, "SLURM_PROCID"),
        ({"SLURM_PROCID": "\u0663"}, "SLURM_PROCID"),
        ({"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 is not below the 2 tasks"),
        ({"SLURM_JOB_ID": "12.3"}, "SLURM_JOB_ID"),
        ({"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID"),
        ({"SLURM_STEP_NODELIST": ""}, "without SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_NODEID": "first"}, "SLURM_NODEID"),
        ({"SLURM_GPUS_ON_NODE": "all"}, "SLURM_GPUS_ON_NODE"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, "2 tasks on a node cannot share its 3 devices"),
        (
            {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "1"},
            "2 tasks on a node cannot share its 1 devices",
        ),
    ],
    ids=lambda value: " ".join(map("=".join, value.items())) if isinstance(value, dict) else "",
)
def test_what_slurm_would_not_set_is_refused_in_one_line(variables, told):
    with pytest.raises(UserError, match=told) as refusal:
        slurm.step(STEP | variables)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", [name for name in STEP if name != "SLURM_STEP_TASKS_PER_NODE"])
def test_a_variable_that_is_missing_is_named(name):
    rest = {key: value for key, value in STEP.items() if key != name}
    if name == "SLURM_STEP_NUM_TASKS":
        assert slurm.step(rest) is None
        return
    with pytest.raises(UserError, match=name):
        slurm.step(rest)


def test_a_task_that_is_bound_to_devices_of_its_own_takes_all_that_it_sees():
    seen = STEP | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    shared, bound = (slurm.step(seen | {"SLURM_GPUS_ON_NODE": n}) for n in ("4", "8"))
    assert shared is not None and shared.local_devices == (2, 3)
    assert bound is not None and bound.local_devices is None


@pytest.mark.parametrize("none", ["", "-1", "NoDevFiles"])
def test_tasks_of_a_step_without_devices_share_none(none):
    step = slurm.step(STEP | {"CUDA_VISIBLE_DEVICES": none, "SLURM_GPUS_ON_NODE": "0"})
    assert step is not None and step.local_devices is None
