"""Shards and their manifest: slices, damage, verification."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import END
from xmod_jax.data import pipeline, shards, sources
from xmod_jax.data.shards import CHUNK, Manifest, Shard, ShardedTokens, ShardWriter
from xmod_jax.errors import UserError


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_slice_on_disk_is_the_slice_in_memory(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("shards")
    lengths = data.draw(st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=4))
    pieces, written = [np.array([END])], []
    for i, length in enumerate(lengths):
        ids = np.random.default_rng(length).integers(0, 256, length)
        writer = ShardWriter(folder / f"{i}", 257)
        for part in np.array_split(ids, 3):
            writer.add(part, 1)
        written.append(writer.close())
        pieces.append(ids)
    manifest = Manifest("bytes", 257, END, tuple(written), (), 0.1, (), "")
    whole = np.concatenate(pieces)
    tokens = ShardedTokens(folder, manifest, "train")
    assert len(tokens) == (len(whole) if sum(lengths) else 0)
    for _ in range(5):
        a, b = sorted(data.draw(st.integers(0, len(tokens))) for _ in range(2))
        np.testing.assert_array_equal(tokens[a:b], whole[a:b])


def damaged(directory: pathlib.Path, tmp_path: pathlib.Path, change) -> str:
    """The error that reading a damaged copy gives."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    shard = copy / "train-00000.arrayrecord"
    change(shard)
    with pytest.raises(UserError) as error:
        dataset = sources.open_prepared(copy, "data")
        batches = pipeline.train_iterator(dataset, 64, 4, 0)
        for _ in range(len(dataset.train) // 256 + 1):
            next(batches)
    message = str(error.value)
    assert str(shard) in message and "\n" not in message
    return message


def flip(shard: pathlib.Path) -> None:
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 4
    shard.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda shard: shard.write_bytes(b""), "0 bytes instead of"),
        (lambda shard: os.truncate(shard, shard.stat().st_size - 1), "cut or replaced"),
        (flip, "damaged"),
        (lambda shard: shard.unlink(), "missing"),
    ],
    ids=["zero bytes", "cut", "flipped", "missing"],
)
def test_a_damaged_shard_is_named(directory, tmp_path, change, reason):
    assert reason in damaged(directory, tmp_path, change)


def test_a_shard_that_disappears_after_opening_is_named(directory, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in directory.glob("*.*"):
        (copy / path.name).write_bytes(path.read_bytes())
    dataset = sources.open_prepared(copy, "data")
    (copy / "train-00000.arrayrecord").unlink()
    with pytest.raises(UserError, match=r"train-00000.arrayrecord: gone"):
        dataset.train[0:10]


def test_an_empty_shard_is_whole(directory, tmp_path):
    writer = ShardWriter(tmp_path / "empty", 257)
    empty = writer.close()
    assert (empty.tokens, empty.documents) == (0, 0)
    writer = ShardWriter(tmp_path / "full", 257)
    writer.add(np.arange(10), 1)
    manifest = Manifest("bytes", 257, END, (empty, writer.close(), empty), (), 0.1, (), "")
    shards.verify(tmp_path, manifest)
    tokens = ShardedTokens(tmp_path, manifest, "train")
    assert tokens[0:99].tolist() == [END, *range(10)]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"version": 9}',
        '{"version": 1, "train": 3}',
        '{"version": 1, "train": [{"file": "x"}], "heldout": []}',
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path, content):
    (tmp_path / shards.MANIFEST).write_text(content)
    with pytest.raises(UserError, match=r"manifest.json: not a manifest") as error:
        sources.open_prepared(tmp_path, "data")
    assert "\n" not in str(error.value)


def test_verification_finds_tokens_that_were_replaced(directory, tmp_path):
    manifest = Manifest.read(directory)
    shard = manifest.train[0]
    wrong = Shard(shard.file, shard.tokens, shard.documents, shard.size, "0" * 32)
    changed = Manifest(
        "bytes", 257, END, (wrong,), manifest.heldout, 0.2, manifest.sources, manifest.hash
    )
    with pytest.raises(UserError, match="are not those prepared"):
        shards.verify(directory, changed)
