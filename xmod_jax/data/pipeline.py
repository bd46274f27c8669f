"""From token arrays to batches: windows, shuffling, sharding over processes, exact resumption.

Legend: B sequences of a batch, L context length.
"""

from __future__ import annotations

from collections.abc import Iterator

import grain
import numpy as np

from xmod_jax.data.sources import Dataset
from xmod_jax.errors import UserError


class Windows:
    """Windows of L + 1 tokens at stride L over a token array, for Grain (RandomAccessDataSource).

    A window's inputs are ``[:-1]`` and its targets ``[1:]``. Neighbours share one token, so every
    token but the very first is predicted exactly once; the up to L - 1 tokens left at the end,
    too few for a window, are not used. The array is sliced, never copied as a whole.
    """

    def __init__(self, tokens: np.ndarray, context_length: int, label: str) -> None:
        """Raises UserError where `tokens` (called `label` there) do not hold one window."""
        if context_length < 1:
            raise UserError(f"context length must be at least 1, got {context_length}")
        if len(tokens) < context_length + 1:
            raise UserError(
                f"context length {context_length} is longer than the data: {label} has "
                f"{len(tokens)} tokens, needs {context_length + 1}"
            )
        self._tokens = tokens
        self._context_length = context_length
        self._label = label

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int32 [L + 1]."""
        start = index * self._context_length
        return self._tokens[start : start + self._context_length + 1].astype(np.int32)

    def __repr__(self) -> str:
        return f"Windows({self._label}, context_length={self._context_length})"


def train_iterator(
    dataset: Dataset,
    context_length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[np.ndarray]:
    """Endless training batches of one process, int32 [B / process_count, L + 1].

    Each epoch is a permutation of all windows, another one per epoch and seed. Batches run on
    across the end of an epoch, so nothing is dropped. `batch_size` counts the sequences of all
    processes: process p holds the p-th run of rows of the batch that a single process would
    yield. The order therefore does not depend on `process_count`, and the iterator's state (Grain's
    ``get_state()``: a small dictionary, fit for JSON) resumes exactly at any count.

    Raises:
      UserError: L does not fit the data, or `batch_size` does not divide among the processes.
    """
    if batch_size < 1 or process_count < 1 or batch_size % process_count:
        raise UserError(
            f"batch size {batch_size} is not a positive multiple of the {process_count} processes"
        )
    if not 0 <= process_index < process_count:
        raise UserError(f"process index {process_index} is not below {process_count} processes")
    windows = Windows(dataset.train, context_length, f"{dataset.name} training data")
    # `seed` hashes the seed: with `shuffle(seed)` alone, epoch 1 of seed 0 is epoch 0 of seed 1.
    shuffled = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    # Every process_count-th batch of B / process_count rows: together one global batch in order.
    # The stream has no end and so no remainder, but Grain rounds its nominal length up, past what
    # an int holds, unless told to drop it.
    batches = shuffled.batch(batch_size // process_count, drop_remainder=True)
    mine = batches[process_index::process_count]
    # In memory there is nothing to wait for: threads would only contend for the interpreter.
    return iter(mine.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def eval_batches(
    dataset: Dataset, context_length: int, batch_size: int, sequences: int
) -> Iterator[np.ndarray]:
    """The first `sequences` held-out windows, or all where there are fewer, in fixed order.

    Nothing but L and `sequences` decides which tokens are evaluated; context lengths with equal
    ``sequences * L`` share them where L divides it. Batches are int32 [B, L + 1]; the last is
    smaller where B does not divide the number of windows, so weigh a mean by its rows.

    Raises:
      UserError: L does not fit the held-out data, or a size is not positive.
    """
    if batch_size < 1 or sequences < 1:
        raise UserError(
            f"batch size and evaluation sequences must be positive, got {batch_size}, {sequences}"
        )
    windows = Windows(dataset.heldout, context_length, f"{dataset.name} held-out data")
    chosen = grain.MapDataset.source(windows)[: min(sequences, len(windows))]
    return iter(chosen.batch(batch_size))
