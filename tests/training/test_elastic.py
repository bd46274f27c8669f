"""A checkpoint continues on any mesh: 8 devices, 4, 1, 8 again, other axes."""

from __future__ import annotations

import pytest

from tests.devices import run_module


def test_a_checkpoint_restores_on_any_mesh_with_the_same_values(tmp_path):
    assert run_module("tests.training.elastic", tmp_path / "run").stdout.strip() == "8"


@pytest.mark.slow
def test_a_run_starts_with_the_same_numbers_on_any_mesh():
    assert run_module("tests.training.elastic", "fresh").stdout.strip() == "8"
