import dataclasses

import pytest

from xmod_jax import accounting
from xmod_jax.config import BACKBONES, ModelConfig
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.law import feasible
from xmod_jax.law.feasible import (
    Request,
    backbone_of_size,
    backbone_of_sizes,
    candidates,
    count,
    within_limits,
)
from xmod_jax.law.terms import LawFile

RANGES = LawFile.paper().ranges
REQUEST = Request(1e20, 32768, BACKBONES["556M"])


def _found(request=REQUEST, ranges=RANGES):
    return {(choice.K, choice.A): choice for choice in candidates(request, ranges)}


def test_every_candidate_meets_the_active_depth_with_whole_stages():
    found = _found()
    assert {stride for _, stride in found} == {0.5, 1, 2, 3, 4, 5}
    for choice in found.values():
        hierarchy = choice.model.hierarchy
        assert hierarchy.active_depth == 28 and float(hierarchy.anchor_stride) == choice.A
        assert choice.depth == hierarchy.depth
        assert choice.total_params == accounting.total_parameters(choice.model)
    assert all((choice.K * choice.A).is_integer() for choice in found.values())


def test_the_search_ends_with_the_data_unless_asked():
    found = _found()
    assert max(K for K, A in found if A == 1) == feasible.LARGEST_K
    assert max(K for K, A in found if A > 1) == 16
    assert max(A for _, A in found) == 5
    short = dataclasses.replace(REQUEST, context=64)
    wide = _found(dataclasses.replace(short, extrapolate=True))
    assert max(K for K, A in wide if A > 5) == 32
    assert max(A for _, A in wide) == 23
    assert set(_found(short, ranges={})) == set(wide)


def test_a_sparse_layer_keeps_two_tokens():
    assert max(K for K, _ in _found(dataclasses.replace(REQUEST, context=20))) == 10
    with pytest.raises(UserError, match="too short"):
        _found(dataclasses.replace(REQUEST, context=3))


def test_given_values_are_not_searched():
    found = _found(dataclasses.replace(REQUEST, stride=3.0, sparsity=64))
    assert set(found) == {(64, 3.0)}
    assert {A for _, A in _found(dataclasses.replace(REQUEST, stride=1.0))} == {1}


def test_limits_hold_and_impossible_ones_name_the_smallest_hierarchy():
    found = list(_found().values())
    limited = within_limits(found, dataclasses.replace(REQUEST, max_params=2e9, max_depth=100))
    assert 0 < len(limited) < len(found)
    for choice in limited:
        assert choice.total_params <= 2e9 and choice.depth <= 100
    with pytest.raises(UserError, match=r"smallest, A0\.5K2, has"):
        within_limits(found, dataclasses.replace(REQUEST, max_params=1e6))


def test_impossible_requests_say_why():
    with pytest.raises(UserError, match=r"A\*K must be a positive integer"):
        _found(dataclasses.replace(REQUEST, stride=0.3, sparsity=2))
    with pytest.raises(UserError, match="active depth 5"):
        _found(dataclasses.replace(REQUEST, active_depth=5, prefix=4))
    with pytest.raises(UserError, match="train_flops"):
        dataclasses.replace(REQUEST, train_flops=float("nan"))
    with pytest.raises(UserError, match="context"):
        dataclasses.replace(REQUEST, context=0)
    with pytest.raises(UserError, match="context must be from 1 to"):
        dataclasses.replace(REQUEST, context=10**400)
    for sparsity in (1, 16385, 10**400):
        with pytest.raises(UserError, match="K must be from 2 to L/2 = 16384"):
            dataclasses.replace(REQUEST, sparsity=sparsity)
    with pytest.raises(UserError, match="active_depth must be from 1 to"):
        dataclasses.replace(REQUEST, active_depth=10**12)
    with pytest.raises(UserError, match="max_params"):
        dataclasses.replace(REQUEST, max_params=-1.0)


def test_counts_of_parameters():
    assert count("10B") == 1e10 and count("556M") == 5.56e8 and count(" 7e8") == 7e8
    for wrong in ("", "B", "1e", "-3", "0", "1.2.3M", "5G", "inf"):
        with pytest.raises(UserError, match="not a number of parameters"):
            count(wrong)


@pytest.mark.parametrize("text", ["30M", "250M", "700M", "3B", "2e10"])
def test_a_number_scales_the_nearest_backbone(text):
    backbone = backbone_of_size(text, 28)
    size = accounting.n_act(ModelConfig(backbone, Hierarchy.dense(28)))
    assert size == pytest.approx(count(text), rel=0.1)
    assert backbone.d_model % 64 == 0 and backbone.d_ff % 64 == 0


def test_names_and_sizes_of_backbones():
    assert backbone_of_size("1.65B", 28) is BACKBONES["1.65B"]
    mini = backbone_of_sizes(["64", "16", "4", "2", "192", "257"])
    assert (mini.d_model, mini.d_ff, mini.vocab_size) == (64, 192, 257)
    huge = f"1{'0' * 400},16,4,2,192"
    for sizes in ("64,16", "64,16,4,3,192", "a,16,4,2,192", "0,16,4,2,192", huge):
        with pytest.raises(UserError, match="backbone"):
            backbone_of_sizes(sizes.split(","))
    with pytest.raises(UserError, match="--backbone"):
        backbone_of_size("1k", 28)
