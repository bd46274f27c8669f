"""How many sequences run together, and in what shapes."""

from __future__ import annotations

import dataclasses

import pytest

from tests.test_model import TINY
from xmod_jax.config import ModelConfig, Routing
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.inference import batches
from xmod_jax.inference import cache as caches

CONFIG = ModelConfig(TINY, Hierarchy(1, (StageGroup(2, 2),), sparsity=2), Routing())


def test_the_bytes_of_a_sequence_are_those_of_its_caches_and_logits():
    tokens = 200
    routed = caches.routed_rows(tokens, CONFIG.hierarchy.sparsity)
    kept = caches.empty(CONFIG, 1, tokens, routed).nbytes
    assert batches.sequence_bytes(CONFIG, tokens) == kept + 24 * TINY.vocab_size


@pytest.mark.parametrize("tokens", [1, 1_000, 100_000, 1 << 20, 1 << 27])
def test_as_many_sequences_run_together_as_memory_is_set_aside_for(tokens):
    rows = batches.rows_that_fit(CONFIG, tokens)
    one = batches.sequence_bytes(CONFIG, tokens)
    assert 1 <= rows <= 64 and rows & (rows - 1) == 0
    assert rows == 1 or rows * one <= batches.CACHE_BYTES
    assert rows == 64 or 2 * rows * one > batches.CACHE_BYTES


def test_a_batch_is_filled_up_to_a_power_of_two_but_not_beyond_what_may_run_together():
    padded = [batches.padded_rows(rows, 12) for rows in range(1, 13)]
    assert padded == [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]


def test_a_larger_vocabulary_leaves_room_for_fewer():
    wide = dataclasses.replace(TINY, vocab_size=50_000_000)
    assert batches.rows_that_fit(dataclasses.replace(CONFIG, backbone=wide), 10) < 64
