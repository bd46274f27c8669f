import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from scipy import optimize

from xmod_jax import accounting
from xmod_jax.config import BACKBONES, Backbone, OptimizerConfig
from xmod_jax.errors import UserError
from xmod_jax.law import design as designing
from xmod_jax.law.design import design
from xmod_jax.law.feasible import Request
from xmod_jax.law.terms import Draws, Law, LawFile

PAPER = LawFile.paper()
REQUEST = Request(1e20, 32768, BACKBONES["556M"])
A1 = dataclasses.replace(REQUEST, stride=1.0)


def _draws(count=12, seed=0):
    """Laws around the published one, as a bootstrap would leave them."""
    rng = np.random.default_rng(seed)
    laws = [
        dataclasses.replace(Law.paper(), e=0.018 + 0.005 * a, w=105 * np.exp(0.3 * b))
        for a, b in rng.standard_normal((count, 2)).tolist()
    ]
    return Draws(tuple(laws), seed, 0.9, 0.008, 13)


DRAWS = _draws()
DRAWN = dataclasses.replace(PAPER, bootstrap=DRAWS)


def test_under_the_published_law_the_best_K_grows_with_the_context():
    found = [
        design(PAPER, dataclasses.replace(A1, context=1024 * length)).best.K
        for length in (2, 4, 8, 16, 32, 64)
    ]
    assert found == [3, 6, 10, 16, 24, 36]


def test_the_optimum_goes_as_the_closed_form_for_large_K():
    """The minimum over real K, N/N_act growing linearly with K as it does at A = 1."""
    law = Law.paper()

    def optimum(length, size):
        delta = lambda log_K: float(
            law.delta(size, size * (0.3 + 0.4 * np.exp(log_K)), length, np.exp(log_K), 1)
        )
        found = optimize.minimize_scalar(
            delta, bounds=(5, 30), method="bounded", options={"xatol": 1e-9}
        )
        return found.x

    total = law.rho_N + law.rho_L
    in_L = (optimum(1e13, 5e8) - optimum(1e12, 5e8)) / np.log(10)
    in_N = (optimum(1e12, 5e9) - optimum(1e12, 5e8)) / np.log(10)
    assert in_L == pytest.approx(law.eta_L / total, rel=1e-3)
    assert in_N == pytest.approx(-law.eta_N / total, rel=1e-3)


def test_the_rule_for_large_K_meets_the_search():
    request = dataclasses.replace(A1, context=10**6)
    rule = designing.asymptote(Law.paper(), request)
    assert rule is not None
    searched = design(PAPER, request).best.K
    assert abs(rule.K - searched) < 0.02 * searched
    assert rule.context == pytest.approx(0.5512, abs=1e-4)
    assert rule.size == pytest.approx(-0.0463, abs=1e-4)
    assert designing.asymptote(dataclasses.replace(Law.paper(), w=0.0), request) is None


def test_the_near_optimal_region_holds_all_within_five_thousandths():
    found = design(PAPER, A1)
    near = {choice.K: delta for choice, delta in found.near}
    sizes = accounting.n_act(found.dense)
    for K in range(2, 60):
        total = accounting.total_parameters(A1.model(f"A1K{K}"))
        delta = float(Law.paper().delta(sizes, total, 32768, K, 1))
        assert (K in near) == (delta <= found.delta + 0.005)
        assert delta >= found.delta
    assert found.near[0] == (found.best, found.delta)


def test_without_draws_there_is_no_interval_and_it_says_so():
    found = design(PAPER, REQUEST)
    assert found.interval is found.run_interval is found.K_interval is found.A_interval is None
    assert any("no interval" in text and "0.008758" in text for text in found.warnings)


def test_draws_give_intervals_of_the_gain_and_of_the_choice():
    found = design(DRAWN, A1)
    assert found.interval is not None and found.run_interval is not None
    assert found.interval[0] < found.delta < found.interval[1]
    assert found.run_interval[0] < found.interval[0] < found.interval[1] < found.run_interval[1]
    choices = [design(dataclasses.replace(PAPER, law=law), A1).best.K for law in DRAWS.laws]
    low, high = np.quantile(choices, [0.05, 0.95], method="inverted_cdf").tolist()
    assert found.K_interval == (low, high)
    assert low < found.best.K < high
    assert found.A_interval == (1.0, 1.0)
    assert not any("no interval" in text for text in found.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 65536}, "L = 6.554e+04 lies outside"),
        ({"backbone": BACKBONES["1.65B"]}, "n_act = 1.6"),
        ({"sparsity": 40}, "K = 40 lies outside"),
        ({"stride": 3.0, "sparsity": 20}, "K at A other than 1 = 20 lies outside"),
        ({"stride": 7.0, "sparsity": 8}, "A = 7 lies outside"),
        ({"stride": None}, "A = 5 is the largest that was searched"),
        ({"context": 512}, "no gain over the dense model"),
        ({"train_flops": 1e40}, "train_flops = 1e+40 lies outside the fitted range 3e+19 to 1.5e"),
        ({"train_flops": 1e16}, "train_flops = 1e+16 lies outside"),
    ],
)
def test_what_to_know_before_trusting_it_is_told(changes, words):
    inside = design(DRAWN, dataclasses.replace(A1, context=16384))
    assert inside.warnings == ()
    found = design(DRAWN, dataclasses.replace(A1, **changes))
    assert any(words in text for text in found.warnings)


def test_a_law_of_unknown_range_or_unsettled_says_so():
    bare = dataclasses.replace(PAPER, ranges={}, rmse=None, seeds_agree=False)
    told = " ".join(design(bare, A1).warnings)
    assert "no fitted ranges" in told and "unknown" in told and "not settled" in told


def test_a_compute_outside_the_fitted_one_is_told():
    file = dataclasses.replace(DRAWN, ranges=dict(PAPER.ranges) | {"dense_tokens": (1e10, 3e10)})
    asked = dataclasses.replace(A1, context=16384)
    assert not any("dense_tokens" in text for text in design(file, asked).warnings)
    much = dataclasses.replace(asked, train_flops=1e22)
    assert any("dense_tokens" in text for text in design(file, much).warnings)


def test_a_law_that_names_no_range_of_compute_says_so_unless_it_names_tokens():
    asked = dataclasses.replace(A1, context=16384)
    older = {name: ends for name, ends in PAPER.ranges.items() if name != "flops"}
    told = design(dataclasses.replace(DRAWN, ranges=older), asked).warnings
    assert told == ("the law names no fitted ranges of train_flops: nothing tells where it holds",)
    older["dense_tokens"] = (1e9, 1e12)
    assert design(dataclasses.replace(DRAWN, ranges=older), asked).warnings == ()


def test_what_the_fit_warned_of_is_told_again():
    file = dataclasses.replace(DRAWN, warnings=("1 row stands out", "u is at its bound 0"))
    (told,) = design(file, dataclasses.replace(A1, context=16384)).warnings
    assert "2 warnings" in told and "1 row stands out; u is at its bound 0" in told


def test_limits_shape_the_choice_without_a_warning_about_them():
    limited = dataclasses.replace(A1, context=16384, max_params=1.5e9)
    found = design(DRAWN, limited)
    assert found.best.total_params <= 1.5e9 and found.best.K < 16
    assert found.warnings == ()


def test_memory_is_that_of_the_parameters_and_the_optimizer():
    from xmod_jax.model import Decoder
    from xmod_jax.training.optimizer import make_optimizer

    request = Request(1e15, 64, Backbone(32, 8, 4, 2, 64, 50), active_depth=6, prefix=2)
    model = request.model("A1K4")
    built = jax.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    state = jax.eval_shape(make_optimizer(OptimizerConfig(), 10).init, built)
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    memory = designing.memory(model)
    assert memory["parameters"] == size(nnx.state(built, nnx.Param))
    assert memory["optimizer"] == pytest.approx(size(state), rel=0.002)  # counters, thresholds


def test_the_record_is_plain_and_consistent():
    found = design(DRAWN, REQUEST)
    record = designing.record(found, DRAWN)
    wanted = ("K", "A", "delta", "interval", "total_params", "phi_ratio", "tokens")
    assert {*wanted, "near_optimal", "warnings"} <= set(record)
    model = found.best.model
    flops = record["tokens"] * accounting.flops_per_token(model, 32768)
    assert flops == pytest.approx(1e20)
    assert record["tokens"] * record["phi_ratio"] == pytest.approx(record["dense_tokens"])
    assert 0 < record["hardware_flops_ratio"] < 1
    assert record["near_optimal"][0]["K"] == record["K"]


def test_a_compute_that_buys_no_sequence_is_refused():
    least = accounting.training_flops(REQUEST.model("dense"), REQUEST.context, REQUEST.context)
    assert design(PAPER, dataclasses.replace(REQUEST, train_flops=1.01 * least)).best.K > 1
    with pytest.raises(UserError, match="one sequence of 32768 tokens"):
        design(PAPER, dataclasses.replace(REQUEST, train_flops=0.99 * least))


@pytest.mark.parametrize("change", [{"w": 1e300, "rho_L": 300.0}, {"eta_L": 1e300}, {"u": 1e308}])
def test_a_law_of_extreme_coefficients_is_answered_in_numbers_or_refused(change):
    file = dataclasses.replace(PAPER, law=dataclasses.replace(Law.paper(), **change))
    try:
        json.dumps(designing.record(design(file, A1), file), allow_nan=False)
    except UserError as error:
        assert "no finite difference" in str(error)


def test_draws_that_give_no_number_are_refused():
    wild = dataclasses.replace(Law.paper(), w=1e300, rho_L=300.0)
    draws = dataclasses.replace(DRAWS, laws=(*DRAWS.laws, wild))
    with pytest.raises(UserError, match="bootstrap draw"):
        design(dataclasses.replace(PAPER, bootstrap=draws), A1)
