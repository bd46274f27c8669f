from __future__ import annotations

import itertools
import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmod_jax.data import pipeline
from xmod_jax.data.sources import Dataset
from xmod_jax.errors import UserError


def counting(train: int, heldout: int = 0) -> Dataset:
    """Tokens that are their own positions, so that a window tells where it came from."""
    ids = np.arange(max(train, heldout), dtype=np.uint16)
    return Dataset(ids[:train], ids[:heldout], 2**16, "counting", "hash")


def take(iterator, count: int) -> np.ndarray:
    return np.stack(list(itertools.islice(iterator, count)))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 60))
def test_windows_predict_every_token_once(context_length, extra):
    tokens = np.arange(context_length + 1 + extra, dtype=np.uint16)
    windows = pipeline.Windows(tokens, context_length, "tokens")
    rows = np.stack([windows[i] for i in range(len(windows))])
    assert rows.dtype == np.int32
    targets = rows[:, 1:].ravel()
    np.testing.assert_array_equal(targets, 1 + np.arange(len(targets)))
    assert len(tokens) - 1 - len(targets) < context_length
    np.testing.assert_array_equal(rows[:, :-1], rows[:, 1:] - 1)


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_an_epoch_over_all_processes_holds_each_window_once(process_count):
    dataset = counting(8 * 24 + 1)
    shards = [
        take(pipeline.train_iterator(dataset, 8, 4, 7, process, process_count), 6)
        for process in range(process_count)
    ]
    starts = np.concatenate([shard[..., 0].ravel() for shard in shards])
    assert sorted(starts) == list(range(0, 8 * 24, 8))


@settings(deadline=None, max_examples=8)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 2000), st.integers(0, 2**40))
def test_processes_together_yield_the_batches_of_one(process_count, windows, seed):
    dataset = counting(3 * windows + 1)
    whole = take(pipeline.train_iterator(dataset, 3, 12, seed), 4)
    shards = [
        take(pipeline.train_iterator(dataset, 3, 12, seed, process, process_count), 4)
        for process in range(process_count)
    ]
    assert whole.shape == (4, 12, 4) and whole.dtype == np.int32
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), whole)


def epochs(seed: int, count: int, windows: int = 30) -> list[list[int]]:
    """Starts of the windows, cut into epochs; the batch of 4 does not divide an epoch of 30."""
    iterator = pipeline.train_iterator(counting(5 * windows + 1), 5, 4, seed)
    starts = take(iterator, -(-count * windows // 4))[..., 0].ravel() // 5
    return [starts[i * windows : (i + 1) * windows].tolist() for i in range(count)]


def test_each_epoch_is_another_permutation():
    orders = epochs(seed=0, count=4)
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(30)) not in orders


def test_seeds_share_no_epoch():
    orders = [tuple(order) for seed in range(4) for order in epochs(seed, count=4)]
    assert len(set(orders)) == len(orders)


def test_the_same_seed_gives_the_same_order():
    assert epochs(seed=3, count=2) == epochs(seed=3, count=2)


@settings(deadline=None, max_examples=12)
@given(st.integers(4, 3000), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_resuming_at_random_points_equals_the_uninterrupted_run(tokens, stretches, data):
    context_length = data.draw(st.integers(1, 3))
    dataset = counting(tokens)
    counts = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=3, max_size=3))
    whole = take(pipeline.train_iterator(dataset, context_length, 4, 1), sum(stretches))
    state, resumed = "", []
    for stretch, count in zip(stretches, counts, strict=False):
        shards = []
        for process in range(count):
            iterator = pipeline.train_iterator(dataset, context_length, 4, 1, process, count)
            if state:
                iterator.set_state(json.loads(state))
            shards.append(take(iterator, stretch))
        state = json.dumps(iterator.get_state())
        resumed.append(np.concatenate(shards, axis=1))
    assert len(state) < 100
    np.testing.assert_array_equal(np.concatenate(resumed), whole)


def test_state_goes_through_an_orbax_checkpoint(tmp_path):
    dataset = counting(100)
    iterator = pipeline.train_iterator(dataset, 4, 3, 0)
    take(iterator, 7)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(7, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
        manager.wait_until_finished()
        restored = pipeline.train_iterator(dataset, 4, 3, 0)
        manager.restore(
            7, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(restored))
        )
    np.testing.assert_array_equal(take(restored, 9), take(iterator, 9))


def heldout(dataset: Dataset, context_length: int, batch_size: int, sequences: int) -> np.ndarray:
    batches = list(pipeline.eval_batches(dataset, context_length, batch_size, sequences))
    assert all(batch.dtype == np.int32 for batch in batches)
    assert all(len(batch) == batch_size for batch in batches[:-1])
    return np.concatenate(batches)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 30))
def test_held_out_windows_do_not_depend_on_the_batch_size(batch_size, sequences):
    dataset = counting(10, heldout=5 * 17 + 3)
    rows = heldout(dataset, 5, batch_size, sequences)
    assert len(rows) == min(sequences, 17)
    np.testing.assert_array_equal(rows, 5 * np.arange(len(rows))[:, None] + np.arange(6))


@pytest.mark.parametrize("context_length", [1, 2, 4, 8, 16])
def test_held_out_tokens_are_the_same_at_every_context_length(context_length):
    rows = heldout(counting(10, heldout=100), context_length, 4, 64 // context_length)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), 1 + np.arange(64))


def test_evaluation_order_is_fixed():
    dataset = counting(10, heldout=50)
    np.testing.assert_array_equal(heldout(dataset, 4, 3, 9), heldout(dataset, 4, 3, 9))


def test_one_window_is_enough():
    assert take(pipeline.train_iterator(counting(6), 5, 2, 0), 3).shape == (3, 2, 6)
    assert heldout(counting(6, heldout=6), 5, 2, 8).shape == (1, 6)


REFUSED = {
    "counting training data has 5 tokens, needs 6": lambda data: pipeline.train_iterator(
        data, 5, 1, 0
    ),
    "counting held-out data has 3 tokens, needs 4": lambda data: pipeline.eval_batches(
        data, 3, 1, 1
    ),
    "context length must be at least 1, got 0": lambda data: pipeline.train_iterator(data, 0, 1, 0),
    "batch size 0 ": lambda data: pipeline.train_iterator(data, 1, 0, 0),
    "batch size 6 is not a positive multiple of the 4 processes": lambda data: (
        pipeline.train_iterator(data, 1, 6, 0, 0, 4)
    ),
    "process index 2 is not below 2": lambda data: pipeline.train_iterator(data, 1, 2, 0, 2, 2),
    "must be positive, got 1, -1": lambda data: pipeline.eval_batches(data, 1, 1, -1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(message):
    with pytest.raises(UserError, match=message) as error:
        REFUSED[message](counting(5, heldout=3))
    assert "\n" not in str(error.value)
