"""Data sets: documents become two token arrays, one to train on and one held out.

Each kind of source is a function that builds a `Dataset`; `load` finds it by its name. Everything
downstream (pipeline.py) sees token arrays only, whatever they came from.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from xmod_jax.config import DataConfig
from xmod_jax.data import embedded
from xmod_jax.data.tokenizer import ByteTokenizer, Tokenizer
from xmod_jax.errors import UserError

HELDOUT_SHARE = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Tokenised text, documents joined by end-of-text tokens.

    Attributes:
      train: [N] ids to train on, an unsigned integer type, read-only.
      heldout: [M] ids of documents that are not in `train`, likewise.
      vocab_size: V, every id is below; a model needs at least this vocabulary.
      name: what ``--data`` calls it.
      hash: fingerprint of the ids and their meaning. The embedded text differs between Python
        versions: runs are comparable, and a checkpoint continues, only where this is equal.
    """

    train: np.ndarray
    heldout: np.ndarray
    vocab_size: int
    name: str
    hash: str


@functools.lru_cache(maxsize=4)
def load(config: DataConfig) -> Dataset:
    """The data set that `config` names; read once per process.

    Raises:
      UserError: the source is unknown.
    """
    check(config)
    return _SOURCES[config.source]()


def check(config: DataConfig) -> None:
    """Refuses a source that `load` does not know, without reading anything.

    Raises:
      UserError: the source is unknown.
    """
    if config.source not in _SOURCES:
        raise UserError(f"unknown data source {config.source!r}; known: {', '.join(_SOURCES)}")


def from_texts(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> Dataset:
    """Splits texts by `is_heldout` and packs each part; empty and repeated texts are left out.

    The order of `texts` is kept in training. Held-out documents stand in the order of their
    digests, so that any prefix is a fair sample of the sources.
    """
    unique = [text for text in dict.fromkeys(texts) if text]
    train = [text for text in unique if not is_heldout(text)]
    heldout = sorted((text for text in unique if is_heldout(text)), key=_digest)
    train_ids, heldout_ids = pack(train, tokenizer), pack(heldout, tokenizer)
    fingerprint = hashlib.blake2b(tokenizer.name.encode(), digest_size=8)
    for ids in (train_ids, heldout_ids):
        fingerprint.update(f" {ids.size} ".encode() + ids.astype("<u4").tobytes())
    return Dataset(train_ids, heldout_ids, tokenizer.vocab_size, name, fingerprint.hexdigest())


def is_heldout(text: str) -> bool:
    """Whether a document is held out: decided by its content alone, for a share of HELDOUT_SHARE.

    Neither other documents nor their order matter, so every model, context length and process
    count has the same held-out documents, also when the corpus grows.
    """
    return int.from_bytes(_digest(text)) < HELDOUT_SHARE * 2**64


def pack(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """Joins texts into one array of ids, an end-of-text token before the first and after each.

    The leading one lets a model learn to begin a document; no texts give no tokens.
    """
    end = np.array([tokenizer.end_of_text], np.min_scalar_type(tokenizer.vocab_size - 1))
    pieces = [part for text in texts for part in (tokenizer.encode(text), end)]
    packed = np.concatenate([end, *pieces]) if pieces else end[:0]
    packed.setflags(write=False)  # one array serves every run of the process
    return packed


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _embedded() -> Dataset:
    return from_texts("embedded", (text for _, text in embedded.documents()), ByteTokenizer())


_SOURCES: dict[str, Callable[[], Dataset]] = {"embedded": _embedded}
