"""Scores of continuations: every token once, whatever the batch, against the model's own logits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from tests.inference import confident
from tests.test_model import TINY, run
from xmod_jax.config import ModelConfig, Routing
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.inference.batches import padded_length
from xmod_jax.inference.scoring import Scorer, windows
from xmod_jax.model import Decoder, Threshold

CONFIG = ModelConfig(
    TINY, Hierarchy(1, (StageGroup(2, 2),), sparsity=2), Routing(router_init_std=0.5)
)
LENGTH = 20
RNG = np.random.default_rng(0)
# (context, continuation) by length: short, none, too long together, too long by themselves.
PAIRS = [
    (RNG.integers(0, 29, context).tolist(), RNG.integers(0, 29, continuation).tolist())
    for context, continuation in [
        (3, 4),
        (1, 1),
        (5, 0),
        (40, 3),
        (2, 20),
        (1, 47),
        (9, 11),
        (7, 2),
    ]
]


@functools.cache
def model() -> Decoder:
    return confident.decoder(CONFIG, head=20)


def _route() -> Threshold:
    return Threshold(model().thresholds())


@functools.cache
def _direct(tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [L, V] behind each token of a sequence that runs alone."""
    logits_1LV, _ = run(model(), np.array([tokens], np.int32), _route())
    return np.asarray(jax.nn.log_softmax(logits_1LV[0]), np.float64)


def _expected(context, continuation):
    """Written for one pair: windows that hold as much context as they can."""
    total, greedy = 0.0, True
    whole = [*context, *continuation]
    if len(continuation) > LENGTH:
        whole = [context[-1], *continuation]
    scored_from = len(whole) - len(continuation)
    at = scored_from
    while at < len(whole):
        stop = min(len(whole), at + LENGTH)
        first = max(0, stop - 1 - LENGTH)
        log_p = _direct(tuple(whole[first : stop - 1]))
        for t in range(at, stop):
            row = log_p[t - 1 - first]
            total += row[whole[t]]
            greedy &= int(row.argmax()) == whole[t]
        at = stop
    return total, greedy


@pytest.mark.parametrize(
    "batch_size",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 8],
)
def test_scores_are_those_of_the_model_in_any_batch_and_order(batch_size):
    order = np.random.default_rng(batch_size).permutation(len(PAIRS))
    scores = Scorer(model(), _route(), LENGTH, batch_size).score([PAIRS[i] for i in order])
    for index, score in zip(order, scores, strict=True):
        total, greedy = _expected(*PAIRS[index])
        assert score.greedy == greedy
        np.testing.assert_allclose(score.log_likelihood, total, rtol=1e-4, atol=1e-4)


def test_a_greedy_continuation_is_told():
    context = [3, 1, 4]
    best = int(_direct(tuple(context))[-1].argmax())
    other = (best + 1) % TINY.vocab_size
    scores = Scorer(model(), _route(), LENGTH, 2).score([(context, [best]), (context, [other])])
    assert [score.greedy for score in scores] == [True, False]


def test_windows_score_each_token_once_with_all_the_context_they_hold():
    for context, continuation in PAIRS:
        parts = windows(context, continuation, LENGTH)
        scored = [token for part in parts for token in part.tokens[-part.scored :]]
        assert scored == list(continuation)
        assert all(len(part.tokens) <= LENGTH + 1 for part in parts)
        assert all(len(part.tokens) == LENGTH + 1 for part in parts[1:])
    (cut,) = windows(*PAIRS[3], LENGTH)
    assert list(cut.tokens) == [*PAIRS[3][0], *PAIRS[3][1]][-21:]


def test_lengths_are_padded_to_few():
    sizes = {padded_length(n, 1000) for n in range(1, 1001)}
    assert sizes == {16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000}
    assert all(n <= padded_length(n, 1000) <= max(16, 1.5 * n) for n in range(1, 1001))


@pytest.mark.slow
def test_few_programs_are_compiled():
    scorer = Scorer(model(), _route(), LENGTH, 4)
    before = scorer._run._cache_size()  # of all scorers' programs
    scorer.score(PAIRS)
    scorer.score(
        [(context[-1:], continuation[:n]) for context, continuation in PAIRS for n in (1, 2)]
    )
    assert scorer._run._cache_size() - before <= 2 * 3  # lengths 16 and 20; 1, 2 and 4 rows


def test_progress_is_told_after_every_batch_to_the_end():
    told: list[tuple[int, int]] = []
    Scorer(model(), _route(), LENGTH, 8).score(PAIRS, lambda *now: told.append(now))
    whole = sum(len(windows(*pair, LENGTH)) for pair in PAIRS)
    done = [now for now, _ in told]
    assert {total for _, total in told} == {whole} and done[-1] == whole
    assert done == sorted(set(done)) and len(done) > 1


def test_scores_that_are_not_finite_are_refused_in_one_line():
    broken = confident.decoder(CONFIG, head=20)
    broken.head[...] = broken.head[...].at[0, 0].set(np.inf)
    with pytest.raises(UserError, match="logits are not finite"):
        Scorer(broken, _route(), LENGTH, 8).score(PAIRS)
