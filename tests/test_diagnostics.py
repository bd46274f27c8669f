"""Diagnostics of the routers: collapse, independence, and equality with masks in NumPy."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from tests.masked_reference import masked_logits
from tests.test_model import ARCHITECTURES, make
from xmod_jax.config import Backbone, ModelConfig, Routing
from xmod_jax.diagnostics import (
    Diagnostics,
    diagnose,
    independent_subsets,
    repeated_subset,
)
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.model import Decoder

K, T, L = 4, 6, 32


def _decoder(tau: float, width: int, vocab: int) -> Decoder:
    """No dense prefix: the routers of the first stage read the embedding itself."""
    backbone = Backbone(width, 4, 2, 1, 8, vocab_size=vocab)
    hierarchy = Hierarchy(0, (StageGroup(1, T),), K)
    config = ModelConfig(backbone, hierarchy, Routing(bias_scale=tau))
    return Decoder(config, rngs=nnx.Rngs(0))


def _collapsing(tau: float) -> Decoder:
    """Routers that read coordinate 0 alone: +0.5 for tokens below V/K, -0.5 for all others.

    The layers do change the stream, in every other coordinate.
    """
    model = _decoder(tau, width=8, vocab=40)
    preferred = jnp.arange(40) < 40 // K
    model.embedding[...] = model.embedding[...].at[:, 0].set(jnp.where(preferred, 0.5, -0.5))
    sparse = model.groups[0].sparse
    sparse.router[...] = jnp.zeros_like(sparse.router[...]).at[..., 0].set(1.0)
    block: Any = sparse.block
    for last in (block.attention.output, block.ffn.down):
        last[...] = last[...].at[..., 0].set(0.0)
    return model


def _sequences_with_a_quarter_preferred(B: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    low = rng.integers(0, 40 // K, (B, L // K))
    high = rng.integers(40 // K, 40, (B, L - L // K))
    mixed = rng.permuted(np.concatenate([low, high], axis=1), axis=1)
    return np.concatenate([mixed, np.zeros((B, 1), int)], axis=1).astype(np.int32)


def test_routers_that_prefer_the_same_tokens_show_collapse():
    model = _collapsing(tau=0.0)
    found = diagnose(model, model.thresholds(), [_sequences_with_a_quarter_preferred(3)])
    expected = repeated_subset(T, K)
    for intervals in (*found.calibrated, *found.threshold):
        assert intervals.coverage == pytest.approx(1 / K)
        assert intervals.jaccard == pytest.approx(1.0)
        np.testing.assert_allclose(intervals.shares, expected.updates)
    assert (expected.coverage, expected.jaccard) == (1 / K, 1.0)
    assert found.agreement == 1.0


def test_the_token_choice_bias_ends_that_collapse():
    model = _collapsing(tau=1.0)
    found = diagnose(model, model.thresholds(), [_sequences_with_a_quarter_preferred(3)])
    (intervals,) = found.threshold
    assert intervals.jaccard == 0.0  # 0.5 - tau is below the threshold from the second layer on
    assert np.flatnonzero(intervals.updates).tolist() == [0, 1]
    assert found.agreement < 1.0


def test_independent_selections_match_the_binomial_reference():
    """Random routers on random states that no layer changes, each at its 1 - 1/K quantile."""
    width, vocab, B, length = 256, 4096, 4, 512
    model = _decoder(tau=0.0, width=width, vocab=vocab)
    sparse = model.groups[0].sparse
    sparse.gate[...] = jnp.zeros_like(sparse.gate[...])
    router_SD, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(width, T)))
    sparse.router[...] = jnp.asarray(router_SD.T, jnp.float32)[None]
    quantile = stats.norm.ppf(1 - 1 / K) * float(jnp.std(model.embedding[...]))
    tokens = np.random.default_rng(2).integers(0, vocab, (B, length + 1)).astype(np.int32)
    found = diagnose(model, (jnp.full((1, T), quantile),), [tokens])
    (intervals,), expected = found.calibrated, independent_subsets(T, K)
    assert intervals.coverage == pytest.approx(expected.coverage, abs=0.04)
    assert intervals.jaccard == pytest.approx(expected.jaccard, abs=0.03)
    np.testing.assert_allclose(intervals.shares, expected.updates, atol=0.04)


def test_the_references_of_the_paper():
    """Coverage and overlap of independent selection in the paper's diagnostics table."""
    table = {(16, 16): (64.39, 3.226), (32, 8): (98.61, 6.667), (48, 16): (95.49, 3.226)}
    for (layers, sparsity), (coverage, jaccard) in table.items():
        reference = independent_subsets(layers, sparsity)
        assert 100 * reference.coverage == pytest.approx(coverage, abs=0.006)
        assert 100 * reference.jaccard == pytest.approx(jaccard, abs=0.0006)
        assert reference.updates.sum() == pytest.approx(1)
        assert reference.updates @ np.arange(layers + 1) == pytest.approx(layers / sparsity)
        assert 1 - reference.updates[0] == pytest.approx(reference.coverage)


def _numpy_statistics(mask_TBL: np.ndarray) -> tuple[list[float], list[float], np.ndarray]:
    """Coverage and overlap of every sequence of one interval, and its counts of updates."""
    coverages, overlaps = [], []
    for mask_TL in mask_TBL.swapaxes(0, 1):
        coverages.append(mask_TL.any(0).mean())
        pairs = [
            (a & b).sum() / (a | b).sum() for a, b in itertools.pairwise(mask_TL) if (a | b).any()
        ]
        overlaps += [np.mean(pairs)] if pairs else []
    counts = np.bincount(mask_TBL.sum(0).ravel(), minlength=len(mask_TBL) + 1)
    return coverages, overlaps, counts


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param("mod", (3,), marks=pytest.mark.slow),
        ("xmod with a short first stage", (3, 2)),
        pytest.param("routed ffn", (3,), marks=pytest.mark.slow),
    ],
)
def test_statistics_equal_numpy_on_the_masks(name, sizes):
    """Also over batches of different size; intervals of different length apart."""
    model, level = make(name), 0.1
    rng = np.random.default_rng(3)
    batches = [rng.integers(0, 29, (B, 16)).astype(np.int32) for B in sizes]
    thresholds = tuple(jnp.full_like(values, level) for values in model.thresholds())
    found = diagnose(model, thresholds, batches)
    tokens_BL = jnp.asarray(np.concatenate(batches)[:, :-1])
    for measured, threshold in ((found.calibrated, level), (found.threshold, 0.0)):
        masks = np.asarray(jax.jit(masked_logits)(model, tokens_BL, threshold)[1])
        expected: dict[int, list] = {}
        for group in ARCHITECTURES[name].hierarchy.groups:
            layers = group.sparse_layers // max(1, group.attentions)
            for _ in range(group.count * max(1, group.attentions)):
                expected.setdefault(layers, []).append(_numpy_statistics(masks[:layers]))
                masks = masks[layers:]
        assert [intervals.layers for intervals in measured] == sorted(expected, reverse=True)
        for intervals in measured:
            coverages, overlaps, counts = zip(*expected[intervals.layers], strict=True)
            assert intervals.count == len(coverages)
            assert intervals.coverage == pytest.approx(np.mean(coverages), abs=1e-6)
            assert list(intervals.updates) == sum(counts).tolist()
            pooled = [value for values in overlaps for value in values]
            if pooled:
                assert intervals.jaccard == pytest.approx(np.mean(pooled), abs=1e-6)
            else:
                assert intervals.jaccard is None


def test_the_record_reads_back():
    model = _collapsing(tau=0.0)
    found = diagnose(model, model.thresholds(), [_sequences_with_a_quarter_preferred(2)])
    assert Diagnostics.from_record(found.record()) == found
    placed = {"hash": "x", "step": 3} | json.loads(json.dumps(found.record()))
    assert Diagnostics.from_record(placed) == found
    one = placed["calibrated"][0]
    changes: tuple[dict[str, Any], ...] = (
        {"agreement": None},
        {"sparsity": 0},
        {"sparsity": "4"},
        {"calibrated": {}},
        {"calibrated": [3]},
        {"calibrated": [one | {"coverage": "all"}]},
        {"calibrated": [one | {"updates": one["updates"][1:]}]},
        {"calibrated": [one | {"updates": [0] * len(one["updates"])}]},
        {"calibrated": [one | {"layers": 0, "updates": [5]}]},
    )
    for change in changes:
        with pytest.raises(ValueError):
            Diagnostics.from_record(placed | change)
    with pytest.raises(ValueError):
        Diagnostics.from_record({"sparsity": 4})


def test_nothing_to_diagnose_is_refused():
    with pytest.raises(ValueError, match="without sparse layers"):
        diagnose(make("dense"), (), [])
    model = _collapsing(tau=0.0)
    with pytest.raises(ValueError, match="no held-out batch"):
        diagnose(model, model.thresholds(), [])


def test_progress_is_told_of_what_is_computed_not_of_what_is_queued():
    model = _collapsing(tau=0.0)
    events: list[object] = []

    def batches():
        for rows in (2, 3, 1):
            events.append("asked")
            yield _sequences_with_a_quarter_preferred(rows)

    found = diagnose(model, model.thresholds(), batches(), progress=events.append)
    # Each batch is told before the next one is asked for.
    assert events == ["asked", 2, "asked", 5, "asked", 6] and found.sequences == 6


def test_a_model_whose_states_are_not_finite_is_not_diagnosed():
    model = _collapsing(tau=0.0)
    model.embedding[...] = model.embedding[...].at[0, 1].set(jnp.nan)
    tokens = np.zeros((1, L + 1), np.int32)
    with pytest.raises(UserError, match="not finite"):
        diagnose(model, model.thresholds(), [tokens])
