import json
import math

import numpy as np
import pytest

from tests.law.grid import TABLE8, parameters
from xmod_jax import storage
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.law import terms
from xmod_jax.law.terms import COEFFICIENTS, Law, LawFile


def _delta(family, name, length=32768):
    hierarchy = Hierarchy.from_name(name)
    totals = parameters(family, 28), parameters(family, hierarchy.depth)
    stride = float(hierarchy.anchor_stride)
    return float(Law.paper().delta(*totals, length, hierarchy.sparsity, stride))


def test_paper_law_holds_the_published_coefficients():
    for name in COEFFICIENTS:
        assert getattr(Law.paper(), name) == TABLE8[name]
    assert LawFile.paper().n_observations == TABLE8["n_observations"]
    assert LawFile.paper().r2_delta == TABLE8["r2_delta"]


def test_delta_equals_the_equations_written_out():
    c = TABLE8
    n_act, n_total, length, k, a = 5e8, 2.5e9, 4096, 8, 4
    reward = n_act ** -c["eta_N"] * (1 - (n_total / n_act) ** -c["rho_N"])
    penalty = length ** -c["eta_L"] * (k ** c["rho_L"] - 1)
    interaction = (k ** c["rho_K"] - 1) * ((2 * a / (a + 1)) ** c["rho_A"] - 1)
    want = c["e"] - c["u"] * reward + c["w"] * penalty - c["z"] * interaction
    assert Law.paper().delta(n_act, n_total, length, k, a) == pytest.approx(want, rel=1e-12)


def test_exposure_equals_the_equation_written_out():
    want = 3.0 * (2e10**-0.1 * ((3e10 / 8 / 2e10) ** -0.4 - 1))
    got = terms.Exposure(v=3.0, eta_D=0.1, rho_D=0.4).delta(8, 3e10, 2e10)
    assert got == pytest.approx(want, rel=1e-12)


def test_terms_vanish_where_nothing_is_sparse():
    assert terms.capacity_reward(5e8, 5e8, 0.1, 1.2) == 0
    assert terms.context_penalty(2048, 1, 0.9, 0.5) == 0
    assert np.all(terms.stride_interaction([2, 8, 20], 1.0, 0.8, 0.3) == 0)


def test_candidates_broadcast_over_observations():
    eta = np.array([[0.1], [0.2], [0.3]])
    assert terms.capacity_reward([5e8, 6e8], [1e9, 2e9], eta, 2 * eta).shape == (3, 2)


def test_raw_parameters_and_tokens_reproduce_the_published_optimum_and_gains():
    best = {}
    for length in (2048, 4096, 8192, 16384, 32768):
        deltas = {k: _delta("556M", f"A1K{k}", length) for k in range(2, 60)}
        best[length] = min(deltas, key=lambda k: deltas[k])
    assert list(best.values()) == [3, 6, 10, 16, 24]
    published = {
        ("556M", "A4K8"): 2.549 - 2.773,
        ("556M", "A3K16"): 2.503 - 2.773,
        ("936M", "A4K8"): 2.427 - 2.635,
        ("936M", "A3K16"): 2.402 - 2.635,
        ("1.65B", "A4K8"): 2.359 - 2.531,
        ("1.65B", "A3K16"): 2.322 - 2.531,
        ("936M", "A1K16"): -0.159,
    }
    for (family, name), delta in published.items():
        assert _delta(family, name) == pytest.approx(delta, abs=0.055)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"u": -1.0}, "u must be"), ({"eta_L": math.nan}, "eta_L"), ({"e": "x"}, "e is not a number")],
)
def test_impossible_coefficients_are_refused(change, word):
    coefficients = {name: TABLE8[name] for name in COEFFICIENTS}
    with pytest.raises(ValueError, match=word):
        Law(**(coefficients | change))


def test_law_file_round_trip_with_coefficients_at_top_level(tmp_path):
    file = LawFile(
        Law.paper(),
        0.9,
        0.01,
        0.008,
        101,
        {"L": (2048.0, 32768.0)},
        {"L": {"rmse": 0.02}},
        False,
        ("x",),
    )
    path = tmp_path / "new" / "law.json"
    file.save(path)
    assert LawFile.load(path) == file
    record = json.loads(path.read_text())
    assert {*COEFFICIENTS, "r2_delta", "rmse", "mae", "n_observations", "ranges"} <= set(record)
    assert [p.name for p in path.parent.iterdir()] == ["law.json"]


def test_the_published_table_loads_as_a_law(tmp_path):
    path = tmp_path / "law.json"
    path.write_text(json.dumps(TABLE8))
    assert LawFile.load(path).law == Law.paper()


def test_large_whole_coefficients_are_numbers_like_others(tmp_path):
    path = tmp_path / "law.json"
    path.write_text(json.dumps(TABLE8 | {"w": 10**300, "z": 1}))
    law = LawFile.load(path).law
    assert law.w == 1e300 and isinstance(law.z, float)
    assert math.isfinite(law.delta(5e8, 2e9, 2048, 8, 2))


def test_a_file_of_an_earlier_version_has_no_range_of_compute(tmp_path):
    path = tmp_path / "law.json"
    old = {"L": [2048, 32768], "dense_tokens": [1e10, 2e10]}
    path.write_text(json.dumps(TABLE8 | {"ranges": old}))
    assert "flops" not in LawFile.load(path).ranges


def test_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "law.json"
    LawFile.paper().save(path)
    before = path.read_text()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        LawFile.paper().save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["law.json"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not a JSON object"),
        ("[1, 2]", "not a JSON object"),
        ('{"e": 1}', "missing u, eta_N"),
        (json.dumps(TABLE8 | {"w": -1}), "w must be"),
        (json.dumps(TABLE8 | {"w": None}), "w is not a number"),
        (json.dumps(TABLE8 | {"w": True}), "w is not a number"),
        (json.dumps(TABLE8 | {"w": math.inf}), "not a finite number"),
        (json.dumps(TABLE8 | {"w": 10**400}), "not a finite number"),
        (json.dumps(TABLE8 | {"rho_L": 0}), "rho_L must be above 0"),
        (json.dumps(TABLE8 | {"eta_N": -0.1}), "eta_N must be at least 0"),
        (json.dumps(TABLE8 | {"ranges": 3}), "not a law.json"),
        (json.dumps(TABLE8 | {"ranges": {"L": 3}}), "not a law.json"),
        (json.dumps(TABLE8 | {"ranges": {"L": ["a", "b"]}}), "not a law.json"),
        (json.dumps(TABLE8 | {"ranges": {"L": [9, 2]}}), "ends below its start"),
        (json.dumps(TABLE8 | {"ranges": {"flops": [0, 1e20]}}), "flops must be above 0"),
        (json.dumps(TABLE8 | {"ranges": {"flops": [-2, -1]}}), "flops must be above 0"),
        (json.dumps(TABLE8 | {"ranges": {"flops": [True, 2]}}), "not a law.json"),
        (json.dumps(TABLE8 | {"ranges": {"flops": [1, 2, 3]}}), "not a law.json"),
        (json.dumps(TABLE8 | {"ranges": {"flops": None}}), "not a law.json"),
        (json.dumps(TABLE8 | {"rmse": -0.1}), "rmse must be at least 0"),
        (json.dumps(TABLE8 | {"n_observations": -1}), "n_observations must be at least 0"),
        (json.dumps(TABLE8 | {"r2_delta": 98.5}), "r2_delta is at most 1"),
        (json.dumps(TABLE8 | {"rmse": "small"}), "rmse"),
        (json.dumps(TABLE8 | {"n_observations": 1.5}), "n_observations"),
        (json.dumps(TABLE8 | {"seeds_agree": "no"}), "seeds_agree"),
        (json.dumps(TABLE8 | {"warnings": "x"}), "warnings"),
        (json.dumps(TABLE8 | {"validated": 3}), "not a law.json"),
        (json.dumps(TABLE8 | {"bootstrap": 3}), "not a law.json"),
        (json.dumps(TABLE8 | {"bootstrap": {"draws": {}}}), "not a law.json"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_faulty_law_files_are_refused_in_one_line(tmp_path, text, word):
    path = tmp_path / "law.json"
    path.write_text(text)
    with pytest.raises(UserError, match=word) as caught:
        LawFile.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_missing_law_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        LawFile.load(tmp_path / "none.json")
