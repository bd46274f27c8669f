"""`systems` measures every check by itself: one that fails costs no other."""

import dataclasses
import json

import pytest

from experiments.suites import isolated
from experiments.suites.checks import Check
from tests.experiments.commands import run_command

TINY = Check("attention", "dense", "165M", 2048, 1, scale="mini")


def test_a_check_that_fails_or_ends_its_process_costs_no_other():
    worker = isolated.Worker()
    try:
        good = worker.do(TINY, 200)
        assert good["ok"] and 0 < good["error_output"] < 0.02
        bad = worker.do(dataclasses.replace(TINY, model="A9"), 200)
        assert bad["failed"].startswith("UserError") and "A9" in bad["failed"]
        process = worker._process
        assert process is not None
        process.kill()
        process.wait()
        assert worker.do(TINY, 200)["failed"] == "exit status -9"
        assert worker.do(TINY, 200) == good
        late = worker.do(dataclasses.replace(TINY, context=4096), 0)
        assert late["failed"].startswith("no answer")
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--protocol=gpu_check", "--sizes=1M"], "--sizes=1M"),
        (["--protocol=gpu_check", "--models=A9"], "A9"),
        (["--protocol=gpu_check", "--contexts=x"], "--contexts=x"),
        (["--protocol=table11", "--mesh=rows:8"], "--mesh=rows:8"),
        (["--protocol=table11", "--output=/"], "--output=/"),
        (["--protocol=gpu_check", "--scale=mini", "--contexts=256"], "context_length"),
        (["--protocol=gpu_check", "--contexts=99999999999"], "context_length must be at most"),
        (["--protocol=gpu_check", "--batch=3000000000"], "batch_size must be at most"),
    ],
)
def test_mistakes_are_one_line_and_status_2(arguments, told):
    result = run_command("systems", *arguments)
    assert result.returncode == 2
    assert told in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_check_of_a_gpu_runs_at_mini_scale(tmp_path):
    output = tmp_path / "result.json"
    flags = ["--scale=mini", "--sizes=165M", "--contexts=2048", "--models=dense,A4K8", "--batch=2"]
    limits = ["--steps=1", "--limit_s=2000", "--check_limit_s=600", f"--output={output}"]
    result = run_command("systems", "--protocol=gpu_check", *flags, *limits, timeout=2100)
    rows = {row["check"]: row for row in json.loads(output.read_text())["results"]}
    assert len(rows) == 6 and not any("failed" in row for row in rows.values()), result.stderr
    steps = [row for name, row in rows.items() if name.startswith("step")]
    assert all(row["ok"] and row["tokens/s"] > 0 and row["planned_GB"] > 0 for row in steps)
    routing = next(row for name, row in rows.items() if name.startswith("routing"))
    assert routing["products"] > 0 and routing["routing"] > 0


@pytest.mark.slow
@pytest.mark.drill
def test_table_11_runs_on_forced_devices_at_mini_scale(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    output = tmp_path / "result.json"
    flags = ["--scale=mini", "--models=dense,A1K2", "--compute=float32", f"--output={output}"]
    limits = ["--mesh=data:1,fsdp:2", "--steps=1", "--check_limit_s=900"]
    result = run_command("systems", "--protocol=table11", *flags, *limits, timeout=2000)
    assert result.returncode == 0, result.stderr
    written = json.loads(output.read_text())
    assert len(written["device_report"]["devices"]) == 2
    dense, routed = written["results"]
    assert dense["speed"] == dense["forward_speed"] == 1
    assert routed["forward_tokens/s"] > 0 and 0 < routed["routed"] < 1
