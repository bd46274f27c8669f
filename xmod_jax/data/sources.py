"""Data sets: documents become tokens, some to train on and some held out.

``--data`` names them: ``embedded``; a prepared directory (preparation.py); ``tfds:NAME``, prepared
at first use; or several, each with its weight: ``DIR=0.7,DIR=0.3``. Everything downstream
(pipeline.py) sees token arrays only, whatever they came from.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import pathlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np

from xmod_jax import storage
from xmod_jax.config import DataConfig
from xmod_jax.data import embedded, shards
from xmod_jax.data.documents import TFDS, digest, find, is_heldout
from xmod_jax.data.tokenizer import ByteTokenizer, Tokenizer
from xmod_jax.errors import UserError

HELDOUT_SHARE = 0.05
EMBEDDED = "embedded"
PREPARED = "XMOD_JAX_DATA"  # environment: folder of TFDS data sets prepared at first use


class Tokens(Protocol):
    """A token array in memory or on disk; a slice is an array of unsigned integers."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Tokenised text, documents joined by end-of-text tokens.

    Attributes:
      train: N ids to train on.
      heldout: M ids of documents that are not in `train`.
      vocab_size: V, every id is below; a model needs at least this vocabulary.
      name: what ``--data`` calls it.
      hash: fingerprint of the ids and their meaning. The embedded text differs between Python
        versions: runs are comparable, and a checkpoint continues, only where this is equal.
      tokenizer: name of the tokenizer that made the ids (`tokenizer.get_tokenizer`).
      filler: id that fills the last window of an epoch; None: a rest too short for a window is
        not used.
    """

    train: Tokens
    heldout: Tokens
    vocab_size: int
    name: str
    hash: str
    tokenizer: str = ByteTokenizer.name
    filler: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Data sets that are drawn from by weight.

    Attributes:
      parts: the data sets, of one tokenizer.
      weights: their shares of the windows, positive, of sum 1.
    """

    parts: tuple[Dataset, ...]
    weights: tuple[float, ...]

    @property
    def vocab_size(self) -> int:
        """V of all parts."""
        return self.parts[0].vocab_size

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer of all parts."""
        return self.parts[0].tokenizer

    @property
    def name(self) -> str:
        """What ``--data`` calls it."""
        return ",".join(f"{p.name}={w:g}" for p, w in zip(self.parts, self.weights, strict=True))

    @property
    def hash(self) -> str:
        """Fingerprint of the parts and their weights."""
        text = " ".join(f"{p.hash}={w!r}" for p, w in zip(self.parts, self.weights, strict=True))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@functools.lru_cache(maxsize=4)
def load(config: DataConfig) -> Dataset | Mixture:
    """The data set that `config` names; opened once per process.

    Raises:
      UserError: the source is unknown, not prepared or damaged, or parts have other tokenizers.
    """
    check(config)
    names, weights = zip(*_parts(config.source), strict=True)
    parts = tuple(_load_part(name) for name in names)
    if len(parts) == 1:
        return parts[0]
    if len({part.tokenizer for part in parts}) > 1:
        which = ", ".join(f"{part.name} has {part.tokenizer}" for part in parts)
        raise UserError(f"--data={config.source}: parts of different tokenizers: {which}")
    return Mixture(parts, tuple(weight / math.fsum(weights) for weight in weights))


def check(config: DataConfig) -> None:
    """Refuses a source that `load` would not find, without reading or preparing anything.

    Raises:
      UserError: a source is unknown or not prepared, or a weight is wrong.
    """
    for name, _ in _parts(config.source):
        if name == EMBEDDED or name.startswith(f"{TFDS}:"):
            continue
        folder = pathlib.Path(name)
        if folder.is_dir() and (folder / shards.MANIFEST).exists():
            continue
        why = "not (yet) prepared in full" if folder.is_dir() else "no such data"
        raise UserError(
            f"--data={name}: {why}; it is {EMBEDDED}, {TFDS}:NAME, or a directory made by: "
            f"python -m experiments.prepare_data --input=FILES --output={name}"
        )


def _parts(source: str) -> list[tuple[str, float]]:
    """Names and weights of ``NAME`` or ``NAME=WEIGHT,NAME=WEIGHT``."""
    if "=" not in source and "," not in source:
        return [(source, 1.0)]
    parts = []
    for part in source.split(","):
        name, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not (0 < value < math.inf):
            raise UserError(f"--data={source}: {part!r} is not NAME=WEIGHT with a positive weight")
        parts.append((name, value))
    return parts


def _load_part(name: str) -> Dataset:
    if name == EMBEDDED:
        return _embedded()
    if name.startswith(f"{TFDS}:"):
        return _tfds(name)
    return open_prepared(pathlib.Path(name), name)


def open_prepared(directory: pathlib.Path, name: str) -> Dataset:
    """The data set in a prepared directory; nothing of it is read into memory.

    Raises:
      UserError: not prepared, or a shard is missing or cut; names it.
    """
    manifest = shards.Manifest.read(directory)
    train, heldout = (
        shards.ShardedTokens(directory, manifest, split) for split in ("train", "heldout")
    )
    return Dataset(
        train,
        heldout,
        manifest.vocab_size,
        name,
        manifest.hash,
        manifest.tokenizer,
        manifest.end_of_text,
    )


def _tfds(name: str) -> Dataset:
    """A TFDS data set ``tfds:NAME[@TOKENIZER]``, prepared where it has not been."""
    from xmod_jax.data import preparation

    rest, _, tokenizer = name.removeprefix(f"{TFDS}:").partition("@")
    given = storage.local_path(os.environ.get(PREPARED, ""), f"{PREPARED}=")
    cache = pathlib.Path(given or pathlib.Path.home() / ".cache" / "xmod_jax")
    settings = preparation.Settings(tokenizer or ByteTokenizer.name, heldout_share=HELDOUT_SHARE)
    folder = cache / f"{rest.replace('/', '-').replace(':', '-')}-{settings.tokenizer}"
    if not (folder / shards.MANIFEST).exists():
        found = find([rest], TFDS)
        logging.warning("preparing %s in %s", name, folder)
        preparation.prepare(found, folder, settings, preparation.default_workers())
    return open_prepared(folder, name)


def from_texts(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> Dataset:
    """Splits texts by a stable hash and packs each part; leaves out empty and repeated texts.

    The order of `texts` is kept in training. Held-out documents stand in the order of their
    digests, so that any prefix is a fair sample of the sources.
    """
    unique = [text for text in dict.fromkeys(texts) if text]
    held = {text for text in unique if is_heldout(digest(text), HELDOUT_SHARE)}
    train = [text for text in unique if text not in held]
    heldout = sorted(held, key=digest)
    train_ids, heldout_ids = pack(train, tokenizer), pack(heldout, tokenizer)
    fingerprint = hashlib.blake2b(tokenizer.name.encode(), digest_size=8)
    for ids in (train_ids, heldout_ids):
        fingerprint.update(f" {ids.size} ".encode() + ids.astype("<u4").tobytes())
    fields = tokenizer.vocab_size, name, fingerprint.hexdigest(), tokenizer.name
    return Dataset(train_ids, heldout_ids, *fields)


def pack(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Joins texts into one array of ids, an end-of-text token before the first and after each.

    The leading one lets a model learn to begin a document; no texts give no tokens.
    """
    end = np.array([tokenizer.end_of_text], np.min_scalar_type(tokenizer.vocab_size - 1))
    pieces = [part for text in texts for part in (tokenizer.encode(text), end)]
    packed = np.concatenate([end, *pieces]) if pieces else end[:0]
    packed.setflags(write=False)  # one array serves every run of the process
    return packed


def _embedded() -> Dataset:
    return from_texts(EMBEDDED, (text for _, text in embedded.documents()), ByteTokenizer())
