"""plan: what a compiled program says, how often its collectives run, and the command itself."""

from __future__ import annotations

import pytest

from experiments import hlo
from experiments.hlo import Collective
from experiments.planned import Plan
from tests.experiments.commands import run_command
from xmod_jax.sharding import MeshShape

_PROGRAM = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%inner (x: f32[4,8]) -> f32[4,8] {
  %scatter = f32[4,8]{1,0} reduce-scatter(%y), dimensions={0}, to_apply=%add
  ROOT %out = f32[4,8]{1,0} copy(%scatter)
}

%outer (x: f32[4,8]) -> f32[4,8] {
  %gather = bf16[32,8]{1,0} all-gather(%x), dimensions={0}
  %loop = f32[4,8]{1,0} while(%x), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %sums = (f32[], f32[2,3]{1,0}) all-reduce(%a, %b), to_apply=%add
  %start = (f32[4]{0}, f32[32]{0}) all-gather-start(%v), dimensions={0}
  %done = f32[32]{0} all-gather-done(%start)
  %loop = f32[4,8]{1,0} while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
}
"""  # noqa: E501


def test_collectives_are_read_with_the_times_that_their_loops_turn():
    found = set(hlo.collectives(_PROGRAM))
    assert found == {
        Collective("all-reduce", "f32", (), 1),
        Collective("all-reduce", "f32", (2, 3), 1),
        Collective("all-gather", "f32", (32,), 1),
        Collective("all-gather", "bf16", (32, 8), 5),
        Collective("reduce-scatter", "f32", (4, 8), 15),
    }
    assert Collective("all-gather", "bf16", (32, 8), 5).bytes == 5 * 2 * 32 * 8


def test_a_plan_adds_up_what_a_device_holds_and_sends():
    moved = [
        Collective("all-reduce", "f32", (10,), 1),
        Collective("reduce-scatter", "f32", (5,), 2),
    ]
    plan = Plan(MeshShape(fsdp=4), 100, 100, 50, 30, 400, moved)
    assert plan.total == 100 + 50 + 400
    assert plan.activations == 400 - 100 - 30
    assert plan.sent == 2 * 40 + 4 * 40


@pytest.mark.slow
def test_the_command_plans_a_run_on_devices_that_are_not_there():
    arguments = ["--experiment=k_sweep_32k", "--run=xmod_a1k2", "--scale=mini", "--mesh=fsdp:4"]
    done = run_command("plan", *arguments, "--memory_gb=1e-3", timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "xmod_a1k2 of k_sweep_32k at mini scale on data:1,fsdp:4,tensor:1" in done.stdout
    for word in ("parameters", "optimiser", "activations", "logits", "all-gather", "does NOT fit"):
        assert word in done.stdout
