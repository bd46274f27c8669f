"""`benchmark` refuses mistakes before it measures, and prints what it measured."""

import json

import pytest

from tests.experiments.commands import run_command

TINY = ["--context=16", "--batch=1", "--width=128", "--active_depth=6", "--rounds=1"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--models="], "--models="),
        (["--models=dense,"], "none empty"),
        (["--models=A9"], "A9"),
        (["--models=moe_8_63"], "multiple of 8"),
        (["--active_depth=0"], "--active_depth=0"),
        (["--active_depth=999999999999"], "--active_depth=999999999999"),
        (["--active_depth=4,5"], "one for each"),
        (["--width=200"], "multiple of 128"),
        (["--output=/proc/nothing/x.json"], "--output=/proc/nothing/x.json"),
        (["--output=/"], "--output=/"),
        (["--experts=4"], "--experts=4"),
        (["--experts=8,x"], "--experts=8,x"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, told):
    result = run_command("benchmark", "--suite=memory", *arguments)
    assert result.returncode == 2
    assert told in result.stderr and result.stderr.count("\n") == 1


def test_every_model_is_measured_against_the_first(tmp_path):
    output = tmp_path / "result.json"
    result = run_command(
        "benchmark", "--suite=training", "--models=dense,moe_8_16,A1K2", f"--output={output}", *TINY
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(output.read_text())["results"]
    assert [row["model"] for row in rows] == ["dense", "moe_8_16", "A1K2"]
    assert rows[0]["speed"] == rows[0]["bound"] == 1
    for row in rows:
        assert row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["share"] == pytest.approx(row["speed"] / row["bound"])


def test_forms_of_the_experts_product_stand_beside_the_dense_one(tmp_path):
    output = tmp_path / "result.json"
    flags = ["--experts=8", "--width=128", "--context=16", "--batch=1", "--rounds=1"]
    result = run_command("benchmark", "--suite=moe", f"--output={output}", *flags)
    assert result.returncode == 0, result.stderr
    rows = json.loads(output.read_text())["results"]
    assert [row["model"] for row in rows] == [
        "one dense product, 8 experts",
        "blocks",
        "ragged_dot",
    ]
    assert all(row["bound"] == 1 and row["share"] == row["speed"] for row in rows)
