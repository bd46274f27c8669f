"""The automatic scale is paper only where the runs can really be trained."""

import pytest

from experiments import registry
from experiments.auto_scale import Devices, auto_scale, bytes_per_device
from xmod_jax import accounting
from xmod_jax.data.shards import MANIFEST

GIB = 2**30


@pytest.fixture
def paper(tmp_path):
    (tmp_path / MANIFEST).touch()  # prepared
    return registry.get("main_556m", "paper").override(data=str(tmp_path))


@pytest.mark.parametrize(
    ("devices", "scale", "why"),
    [
        (Devices("cpu", 1, None), "mini", "no accelerator"),
        (Devices("gpu", 1, None), "mini", "does not tell its memory"),
        (Devices("gpu", 1, 16 * GIB), "mini", "xmod_a3k16 needs about"),
        (Devices("gpu", 8, 80 * GIB), "paper", "every run fits 8 x 80 GiB of gpu"),
    ],
)
def test_the_scale_follows_the_devices_and_says_why(paper, devices, scale, why):
    chosen, reason = auto_scale(paper, devices)
    assert chosen == scale and why in reason


def test_missing_data_means_mini(paper, tmp_path):
    missing = paper.override(data=str(tmp_path / "missing"))
    scale, reason = auto_scale(missing, Devices("gpu", 8, 80 * GIB))
    assert scale == "mini" and str(tmp_path / "missing") in reason


def test_more_devices_never_need_more_memory_each(paper):
    for run in paper.runs:
        needs = [bytes_per_device(run, devices) for devices in (1, 2, 8, 64)]
        assert needs == sorted(needs, reverse=True)
        # Parameters and their optimiser state alone are a lower bound.
        total = accounting.total_parameters(run.model)
        assert needs[0] > 12 * total


@pytest.mark.parametrize(("name", "least"), [("main_556m", 1.2), ("k_sweep_2k", 2.0)])
def test_kept_products_count(name, least):
    """In FFNs too where a sequence goes through them in one part."""
    plain = registry.get(name, "paper")
    kept = plain.override(keep_products=True)
    for run, more in zip(plain.runs, kept.runs, strict=True):
        # On so many devices there are no parameters to speak of.
        assert bytes_per_device(more, 10**9) > least * bytes_per_device(run, 10**9)
