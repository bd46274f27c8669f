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
import shlex
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Protocol

import numpy as np

from xmod_jax import storage
from xmod_jax.config import DataConfig
from xmod_jax.data import embedded, shards, vocabulary
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
      vocabulary: folder that keeps the tokenizer's vocabulary files; None: it has none.
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
    vocabulary: pathlib.Path | None = None


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
    def vocabulary(self) -> pathlib.Path | None:
        """Folder that keeps the vocabulary files of some part."""
        return next((part.vocabulary for part in self.parts if part.vocabulary), None)

    @property
    def name(self) -> str:
        """What ``--data`` calls it."""
        return ",".join(f"{p.name}={w:g}" for p, w in zip(self.parts, self.weights, strict=True))

    @property
    def hash(self) -> str:
        """Fingerprint of the parts and their weights."""
        text = " ".join(f"{p.hash}={w!r}" for p, w in zip(self.parts, self.weights, strict=True))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load(config: DataConfig) -> Dataset | Mixture:
    """The data set that `config` names; opened once per process.

    Raises:
      UserError: the source is unknown, not prepared or damaged, parts have other tokenizers, or its
        content is not the one that `config` knows.
    """
    dataset = _open(config.source)
    if config.hash and dataset.hash != config.hash:
        raise UserError(
            f"--data={config.source} has other content by now ({dataset.hash}) than the run was "
            f"made for ({config.hash}): choose the data, or the Python version for embedded, that "
            "it was made with, or another work directory"
        )
    return dataset


def identified(config: DataConfig) -> DataConfig:
    """`config` with the fingerprint of its data, where they can be had without preparing any.

    Raises:
      UserError: what is there is damaged, or parts have other tokenizers.
    """
    try:
        check(config)
    except UserError:
        return config
    if all(_is_at_hand(name) for name, _ in _parts(config.source)):
        return dataclasses.replace(config, hash=_open(config.source).hash)
    return config


@functools.lru_cache(maxsize=4)
def _open(source: str) -> Dataset | Mixture:
    check(DataConfig(source))
    names, weights = zip(*_parts(source), strict=True)
    parts = tuple(_load_part(name) for name in names)
    if len(parts) == 1:
        return parts[0]
    if len({part.tokenizer for part in parts}) > 1:
        which = ", ".join(f"{part.name} has {part.tokenizer}" for part in parts)
        raise UserError(f"--data={source}: parts of different tokenizers: {which}")
    return Mixture(parts, tuple(float(weight / sum(weights)) for weight in weights))


def check(config: DataConfig) -> None:
    """Refuses a source that `load` would not find, without reading or preparing anything.

    Raises:
      UserError: a source is unknown or not prepared, or a weight is wrong.
    """
    for name, _ in _parts(config.source):
        if name == EMBEDDED or name.startswith(f"{TFDS}:"):
            continue
        folder = pathlib.Path(name)
        if _is_prepared(folder):
            continue
        make = "python -m experiments.prepare_data"
        if folder.is_file():
            raise UserError(
                f"--data={name}: a file, not a prepared directory: make one by: {make} "
                f"--input={shlex.quote(name)} --output=FOLDER"
            )
        why = "not (yet) prepared in full" if folder.is_dir() else "no such data"
        raise UserError(
            f"--data={name}: {why}; it is {EMBEDDED}, {TFDS}:NAME, or a directory made by: "
            f"{make} --input=FILES --output={shlex.quote(name)}"
        )


def _is_prepared(folder: pathlib.Path) -> bool:
    return folder.is_dir() and (folder / shards.MANIFEST).exists()


def _parts(source: str) -> list[tuple[str, Fraction]]:
    """Names and weights of ``NAME`` or ``NAME=WEIGHT,NAME=WEIGHT``.

    A prepared directory whose own name holds these signs is meant by itself. Weights are exact, so
    that ``0.35`` and ``0.7`` are the same shares as ``1`` and ``2``.
    """
    if ("=" not in source and "," not in source) or _is_prepared(pathlib.Path(source)):
        return [(source, Fraction(1))]
    parts = []
    for part in source.split(","):
        name, _, weight = part.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not (0 < value < math.inf):
            raise UserError(
                f"--data={source}: {part!r} is not NAME=WEIGHT with a positive weight, and no "
                "prepared directory has the whole for its name"
            )
        parts.append((name, Fraction(Decimal(weight))))
    return parts


def _is_at_hand(name: str) -> bool:
    return not name.startswith(f"{TFDS}:") or _is_prepared(_tfds_place(name)[1])


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
        vocabulary.folder_of(directory, manifest.tokenizer),
    )


def _tfds(name: str) -> Dataset:
    """A TFDS data set ``tfds:NAME[@TOKENIZER]``, prepared where it has not been."""
    from xmod_jax.data import preparation

    tokenizer, folder = _tfds_place(name)
    if not _is_prepared(folder):
        found = find([_tfds_name(name)], TFDS)
        settings = preparation.Settings(tokenizer, heldout_share=HELDOUT_SHARE)
        logging.warning("preparing %s in %s", name, folder)
        preparation.prepare(found, folder, settings, preparation.default_workers())
    return open_prepared(folder, name)


def _tfds_name(name: str) -> str:
    return name.removeprefix(f"{TFDS}:").partition("@")[0]


def _tfds_place(name: str) -> tuple[str, pathlib.Path]:
    """Tokenizer of a TFDS data set, and the folder that it is prepared in."""
    tokenizer = name.partition("@")[2] or ByteTokenizer.name
    given = storage.local_path(os.environ.get(PREPARED, ""), f"{PREPARED}=")
    cache = pathlib.Path(given or pathlib.Path.home() / ".cache" / "xmod_jax")
    plain = _tfds_name(name).replace("/", "-").replace(":", "-")
    return tokenizer, cache / f"{plain}-{tokenizer}"


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
