"""`benchmark` refuses mistakes before it measures, and prints what it measured."""

import json
import re

import pytest

from experiments.suites import profile, timing
from tests.experiments.commands import run_command

TINY = ["--context=16", "--batch=1", "--width=128", "--active_depth=6", "--rounds=1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models="], "--models="),
        (["--models=dense,"], "has an empty part"),
        (["--models=A9"], "A9"),
        (["--models=moe_8_63"], "multiple of 8"),
        (["--models=dense,dense"], "one name twice"),
        (["--models=A4K8_masked"], "only decoding"),
        (["--suite=evaluation", "--models=dense_kept"], "training, memory, compile, profile only"),
        (["--models=qwen3_torch"], "training, decoding only"),
        (["--context=0"], "--context=0"),
        (["--context=8,x"], "--context=8,x"),
        (["--active_depth=0"], "--active_depth=0"),
        (["--active_depth=999999999999"], "--active_depth=999999999999"),
        (["--active_depth=4,5"], "one for each"),
        (["--width=200"], "multiple of 128"),
        (["--output=/proc/nothing/x.json"], "--output=/proc/nothing/x.json"),
        (["--output=/"], "--output=/"),
        (["--experts=8"], "--experts changes nothing in --suite=memory"),
        (["--suite=moe", "--experts=4"], "--experts=4"),
        (["--suite=moe", "--experts=8,x"], "--experts=8,x"),
        (["--suite=moe", "--active_depth=6"], "--active_depth changes nothing"),
        (["--suite=law", "--compute=bfloat16"], "--compute changes nothing"),
        (["--suite=decoding", "--whole_step"], "--whole_step changes nothing"),
        (["--limit_s=inf"], "limit_s"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, told):
    result = run_command("benchmark", "--suite=memory", *arguments)
    assert result.returncode == 2
    assert told in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_model_is_measured_against_the_first(tmp_path):
    output = tmp_path / "result.json"
    result = run_command(
        "benchmark", "--suite=training", "--models=dense,moe_8_16,A1K2", f"--output={output}", *TINY
    )
    assert result.returncode == 0, result.stderr
    written = json.loads(output.read_text())
    rows = written["runs"][0]["results"]
    product = rows.pop()
    assert [row["model"] for row in rows] == ["dense", "moe_8_16", "A1K2"]
    assert rows[0]["speed"] == rows[0]["bound"] == 1
    assert product["of_product"] == 1 and product["speed"] is None
    assert written["device_report"]["versions"]["jax"] and written["device_report"]["devices"]
    for row in rows:
        assert row["of_product"] == pytest.approx(row["GFLOP/s"] / product["GFLOP/s"])
        assert row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["share"] == pytest.approx(row["speed"] / row["bound"])


@pytest.mark.slow
def test_a_whole_step_takes_the_optimizer_too():
    result = run_command("benchmark", "--suite=training", "--models=dense", "--whole_step", *TINY)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^dense +\d", result.stdout, re.MULTILINE)


def test_a_kept_model_takes_more_memory_and_fewer_products():
    flags = ["--models=dense,dense_kept,A1K2_kept", "--context=64", "--batch=2", "--width=128"]
    result = run_command("benchmark", "--suite=memory", "--active_depth=6", *flags)
    assert result.returncode == 0, result.stderr
    ratio = re.search(r"^dense_kept .* ([\d.]+)$", result.stdout, re.MULTILINE)
    assert ratio is not None and 1.5 < float(ratio[1]) < 6


def test_forms_of_the_experts_product_stand_beside_the_dense_one(tmp_path):
    output = tmp_path / "result.json"
    flags = ["--experts=8", "--width=128", "--context=16", "--batch=1", "--rounds=1"]
    result = run_command("benchmark", "--suite=moe", f"--output={output}", *flags)
    assert result.returncode == 0, result.stderr
    rows = json.loads(output.read_text())["runs"][0]["results"]
    assert [row["model"] for row in rows] == [
        "one dense product, 8 experts",
        "blocks",
        "ragged_dot",
    ]
    assert all(row["bound"] == 1 and row["share"] == row["speed"] for row in rows)


@pytest.mark.slow
def test_decoding_runs_the_routed_layers_at_every_context_and_masks_the_others(tmp_path):
    output = tmp_path / "result.json"
    flags = ["--models=dense,A1K2,A1K2_masked", "--context=24,40", *TINY[1:], f"--output={output}"]
    result = run_command("benchmark", "--suite=decoding", *flags)
    assert result.returncode == 0, result.stderr
    runs = json.loads(output.read_text())["runs"]
    assert [run["context"] for run in runs] == [24, 40]
    for run in runs:
        dense, routed, masked = run["results"]
        assert [row["sparse_layers"] for row in run["results"]] == [0, 1, 2]
        assert dense["cache_ratio"] == dense["time_ratio"] == 1
        assert routed["cache_MB"] == masked["cache_MB"]
        assert masked["moved_MB"] > routed["moved_MB"] > 0
    assert runs[1]["results"][0]["moved_MB"] > runs[0]["results"][0]["moved_MB"]


def test_a_device_report_needs_no_suite():
    result = run_command("benchmark", "--device_report")
    assert result.returncode == 0, result.stderr
    for name in ("processor", "cores", "memory_GB", "versions", "devices", "settings"):
        assert f"\n{name}: " in result.stdout
    assert run_command("benchmark").returncode == 2


def test_a_comparison_has_fewer_rounds_where_they_take_too_long():
    calls = {"a": lambda: sum(range(100_000)), "b": lambda: None}
    assert len(timing.interleave(calls, timing.Rounds(3, 60))["a"].wall) == 3
    assert len(timing.interleave(calls, timing.Rounds(3, 0))["b"].wall) == 1


def test_operations_are_told_by_kind():
    text = """
HloModule m
%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %g.1 = f32[8]{0} gather(%p, %i), offset_dims={}
}
ENTRY %main (p: f32[8]) -> f32[8] {
  %fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%inner
  %call.3 = f32[8]{0} custom-call(%p), custom_call_target="__cublas$gemm"
  %call.4 = (f32[8], u8[0]) custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax"
  %while.5 = (f32[8]) while(%p), condition=%c, body=%inner
  %topk.7 = f32[8]{0} custom-call(%p), custom_call_target="TopK"
  ROOT %dot_like_add.6 = f32[8]{0} add(%fusion.2, %p)
}
"""
    found = profile.kinds(text)
    assert found["fusion.2"] == found["topk.7"] == "routing"
    assert (found["call.3"], found["call.4"]) == ("products", "attention")
    assert found["dot_like_add.6"] == "elementwise" and "while.5" not in found
