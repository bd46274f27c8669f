"""From token arrays to batches: windows, shuffling, sharding over processes, exact resumption.

Legend: B sequences of a batch, L context length.
"""

from __future__ import annotations

from collections.abc import Iterator

import grain
import numpy as np

from xmod_jax.data.sources import Dataset, Mixture, Tokens
from xmod_jax.errors import UserError

_READ_THREADS, _READ_AHEAD = 4, 16  # of data on disk: batches read at once, and held ready


class Windows:
    """Windows of L + 1 tokens at stride L over a token array, for Grain (RandomAccessDataSource).

    A window's inputs are ``[:-1]`` and its targets ``[1:]``. Neighbours share one token, so every
    token but the very first is predicted exactly once. Up to L - 1 tokens are left at the end, too
    few for a window: they fill up with `filler`, or are not used where there is none. The array is
    sliced, never copied as a whole.
    """

    def __init__(
        self, tokens: Tokens, context_length: int, label: str, filler: int | None = None
    ) -> None:
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
        self._filler = filler

    def __len__(self) -> int:
        targets = len(self._tokens) - 1
        whole, rest = divmod(targets, self._context_length)
        return whole + (rest > 0 and self._filler is not None)

    def __getitem__(self, index: int) -> np.ndarray:
        """Window `index`, int32 [L + 1]."""
        start = index * self._context_length
        window = self._tokens[start : start + self._context_length + 1].astype(np.int32)
        if len(window) > self._context_length or self._filler is None:
            return window
        missing = self._context_length + 1 - len(window)
        return np.pad(window, (0, missing), constant_values=self._filler)

    def __repr__(self) -> str:
        return f"Windows({self._label}, context_length={self._context_length})"


def train_iterator(
    dataset: Dataset | Mixture,
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
    parts, weights = _parts(dataset)
    # `seed` hashes the seed: with `shuffle(seed)` alone, epoch 1 of seed 0 is epoch 0 of seed 1.
    streams = [
        grain.MapDataset.source(
            Windows(part.train, context_length, f"{part.name} training data", part.filler)
        )
        .seed(seed)
        .shuffle()
        .repeat()
        for part in parts
    ]
    shuffled = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, weights)
    # Every process_count-th batch of B / process_count rows: together one global batch in order.
    # The stream has no end and so no remainder, but Grain rounds its nominal length up, past what
    # an int holds, unless told to drop it.
    batches = shuffled.batch(batch_size // process_count, drop_remainder=True)
    mine = batches[process_index::process_count]
    # In memory there is nothing to wait for: threads would only contend for the interpreter.
    on_disk = not all(isinstance(part.train, np.ndarray) for part in parts)
    threads, ahead = (_READ_THREADS, _READ_AHEAD) if on_disk else (0, 0)
    return iter(mine.to_iter_dataset(grain.ReadOptions(threads, ahead)))


def _parts(dataset: Dataset | Mixture) -> tuple[tuple[Dataset, ...], tuple[float, ...]]:
    return (dataset.parts, dataset.weights) if isinstance(dataset, Mixture) else ((dataset,), (1,))


def eval_batches(
    dataset: Dataset | Mixture, context_length: int, batch_size: int, sequences: int
) -> Iterator[np.ndarray]:
    """The first `sequences` held-out windows, or all where there are fewer, in fixed order.

    Nothing but L and `sequences` decides which tokens are evaluated; context lengths with equal
    ``sequences * L`` share them where L divides it. Parts of a mixture take turns by weight until
    one has no more. Batches are int32 [B, L + 1]; the last is
    smaller where B does not divide the number of windows, so weigh a mean by its rows.

    Raises:
      UserError: L does not fit the held-out data, or a size is not positive.
    """
    if batch_size < 1 or sequences < 1:
        raise UserError(
            f"batch size and evaluation sequences must be positive, got {batch_size}, {sequences}"
        )
    parts, weights = _parts(dataset)
    streams = [
        grain.MapDataset.source(Windows(part.heldout, context_length, f"{part.name} held-out data"))
        for part in parts
    ]
    windows = streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, weights)
    chosen = windows[: min(sequences, len(windows))]
    return iter(chosen.batch(batch_size))
