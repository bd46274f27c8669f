"""Tokens on disk: ArrayRecord shards, and the manifest that says what they must hold.

A shard is a run of documents, an end-of-text token after each, cut into records of `CHUNK` tokens
(little-endian, the last record shorter), so that any token is found by arithmetic. ArrayRecord
hashes every record and tells of flipped bits; a missing, empty or cut file it reads as one without
records, so every reader here compares with the manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from array_record.python import array_record_module

from xmod_jax import storage
from xmod_jax.data import workers
from xmod_jax.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from xmod_jax.errors import UserError

MANIFEST = "manifest.json"
CHUNK = 4096  # tokens of a record
_VERSION = 1
_OPEN_SHARDS = 128  # files that a process keeps open
_WRITING = "group_size:1,uncompressed"  # a record is read by itself; tokens hardly compress
_READING = "readahead_buffer_size:0,max_parallelism:0"  # windows come in random order


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of tokens.

    Attributes:
      file: its name in the prepared directory.
      tokens: how many it holds, end-of-text tokens among them.
      documents: how many it holds.
      size: bytes of the file.
      hash: of the ids, independent of how they are stored.
    """

    file: str
    tokens: int
    documents: int
    size: int
    hash: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a prepared directory holds.

    Attributes:
      tokenizer: name of the tokenizer.
      vocab_size: V, every id is below.
      end_of_text: id after every document.
      train: shards to train on.
      heldout: shards of held-out documents, in the order of their digests.
      heldout_share: share of documents that the stable hash holds out.
      sources: path, size and counts of every input, in order.
      hash: fingerprint of the ids and their meaning.
    """

    tokenizer: str
    vocab_size: int
    end_of_text: int
    train: tuple[Shard, ...]
    heldout: tuple[Shard, ...]
    heldout_share: float
    sources: tuple[dict[str, Any], ...]
    hash: str

    def tokens(self, split: str) -> int:
        """Tokens of ``"train"`` or ``"heldout"``."""
        return sum(shard.tokens for shard in getattr(self, split))

    def write(self, directory: pathlib.Path) -> None:
        """Writes manifest.json: from now on the directory is prepared."""
        storage.write_json(directory / MANIFEST, {"version": _VERSION} | dataclasses.asdict(self))

    @classmethod
    def read(cls, directory: pathlib.Path) -> Manifest:
        """Reads manifest.json.

        Raises:
          UserError: there is none, or it is not a manifest of this version.
        """
        path = directory / MANIFEST
        content = storage.read_json(path)
        try:
            if content.pop("version") != _VERSION:
                raise ValueError(f"not of version {_VERSION}")
            shards = {
                split: tuple(Shard(**shard) for shard in content.pop(split))
                for split in ("train", "heldout")
            }
            manifest = cls(**content | shards | {"sources": tuple(content["sources"])})
            _check_numbers(manifest)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: not a manifest of prepared data: {error}") from error
        return manifest


def _check_numbers(manifest: Manifest) -> None:
    if not all(type(n) is int for n in (manifest.vocab_size, manifest.end_of_text)):
        raise ValueError("its vocabulary is not a whole number")
    if not all(type(t) is str for t in (manifest.tokenizer, manifest.hash)):
        raise ValueError("its tokenizer or hash is no text")
    if not 0 <= manifest.end_of_text < manifest.vocab_size <= 1 << 32:
        raise ValueError("the end of text is not in the vocabulary")
    if not all(isinstance(source, dict) for source in manifest.sources):
        raise ValueError("a source is not an object")
    for shard in (*manifest.train, *manifest.heldout):
        if type(shard.file) is not str or type(shard.hash) is not str:
            raise ValueError("a shard has no file name or no hash")
        if not all(type(n) is int and n >= 0 for n in (shard.tokens, shard.documents, shard.size)):
            raise ValueError(f"{shard.file}: counts are not whole numbers")


def fingerprint(tokenizer: str, vocab_size: int, shards: Iterator[Shard]) -> str:
    """Hash of ids and their meaning: equal where training sees equal tokens in equal order."""
    digest = hashlib.blake2b(f"{tokenizer} {vocab_size}".encode(), digest_size=8)
    for shard in shards:
        digest.update(f" {shard.tokens} {shard.hash}".encode())
    return digest.hexdigest()


def token_type(vocab_size: int) -> np.dtype[Any]:
    """The type of ids on disk."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ShardWriter:
    """Writes one shard to a temporary name; `close` makes it whole, verified and final."""

    def __init__(self, path: pathlib.Path, vocab_size: int) -> None:
        # Of this process alone: a worker whose parent was killed may still be writing its own.
        self._path, self._temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._type = token_type(vocab_size)
        self._hash = hashlib.blake2b(digest_size=16)
        self._rest = np.zeros(0, self._type)
        self._tokens = self._documents = self._records = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(self._path):
            self._writer = array_record_module.ArrayRecordWriter(str(self._temporary), _WRITING)

    def add(self, ids: np.ndarray, documents: int) -> None:
        """Appends the tokens of `documents` whole documents.

        Raises:
          OSError: the disk.
        """
        ids = np.concatenate([self._rest, ids.astype(self._type, copy=False)])
        self._tokens += len(ids) - len(self._rest)
        self._documents += documents
        whole = len(ids) // CHUNK * CHUNK
        self._write(ids[:whole].reshape(-1, CHUNK))
        self._rest = ids[whole:]

    def close(self) -> Shard:
        """Ends the shard and gives what the manifest says of it.

        Raises:
          OSError: the disk; nothing has the shard's name then.
        """
        if len(self._rest):
            self._write(self._rest[None])
        with writing(self._path):
            self._writer.close()
        reader = array_record_module.ArrayRecordReader(str(self._temporary), _READING)
        if reader.num_records() != self._records:
            raise OSError(f"{self._path}: the disk kept {reader.num_records()} of the records")
        reader.close()
        storage.sync(self._temporary)
        size = self._temporary.stat().st_size
        workers.leave_if_orphaned()
        self._temporary.rename(self._path)
        storage.sync(self._path.parent)  # before any note says that it is there
        digest = self._hash.hexdigest()
        return Shard(self._path.name, self._tokens, self._documents, size, digest)

    def abandon(self) -> None:
        """Gives the shard up after an error."""
        self._temporary.unlink(missing_ok=True)

    def _write(self, rows: np.ndarray) -> None:
        with writing(self._path):
            for row in rows:
                content = row.tobytes()
                self._hash.update(content)
                self._writer.write(content)
        self._records += len(rows)


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turns ArrayRecord's errors of writing into an OSError that names the file."""
    try:
        yield
    except RuntimeError as error:
        raise OSError(f"{path}: {error}") from error


class ShardedTokens:
    """The tokens of a split as one array: an end-of-text token, then every shard.

    Slicing reads the records it needs, nothing else; safe from several threads.
    """

    def __init__(self, directory: pathlib.Path, manifest: Manifest, split: str) -> None:
        """Checks that every shard is there in full.

        Raises:
          UserError: a shard is missing or has another size; names it.
        """
        self._shards: list[Shard] = [s for s in getattr(manifest, split) if s.tokens]
        self._directory = directory
        self._vocab_size = manifest.vocab_size
        self._type = token_type(manifest.vocab_size)
        self._first = np.array([manifest.end_of_text], self._type)
        for shard in self._shards:
            check_size(directory / shard.file, shard)
        # Position of each shard's first token, and of the end.
        self._starts = [1, *itertools.accumulate((s.tokens for s in self._shards), initial=1)][1:]

    def __len__(self) -> int:
        return self._starts[-1] if self._shards else 0

    def __getitem__(self, part: slice) -> np.ndarray:
        """Ids ``[start:stop]``, uint16 or uint32; step 1 only.

        Raises:
          UserError: a shard is damaged or gone; names it.
        """
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError("tokens on disk are read in order")
        pieces = [self._first[start:stop]]
        which = max(int(np.searchsorted(self._starts, start, "right")) - 1, 0)
        for shard, first in zip(self._shards[which:], self._starts[which:], strict=False):
            if max(start, first) >= stop:
                break
            pieces.append(self._read(shard, max(start - first, 0), min(stop - first, shard.tokens)))
        return np.concatenate(pieces)

    def _read(self, shard: Shard, start: int, stop: int) -> np.ndarray:
        path = self._directory / shard.file
        chunks = range(start // CHUNK, -(-stop // CHUNK))
        try:
            contents = _reader(str(path), shard.tokens).read(list(chunks))
        except (RuntimeError, IndexError) as error:
            raise UserError(
                f"{path}: damaged: {error}; delete the folder and prepare again"
            ) from error
        ids = np.frombuffer(b"".join(contents), self._type)
        if ids.max() >= self._vocab_size:
            raise UserError(
                f"{path}: token {ids.max()} in a vocabulary of {self._vocab_size}: made by another "
                "tokenizer than the manifest says; delete the folder and prepare again"
            )
        return ids[start - chunks[0] * CHUNK : stop - chunks[0] * CHUNK]


def verify(directory: pathlib.Path, manifest: Manifest) -> None:
    """Reads every shard and compares it with its hash and the manifest.

    Raises:
      UserError: a shard is missing, cut or changed, or holds ids outside the vocabulary or other
        numbers of documents; names it. Or the manifest does not hold together.
    """
    _verify_manifest(directory, manifest)
    for split in ("train", "heldout"):
        tokens = ShardedTokens(directory, manifest, split)
        position = 1
        for shard in getattr(manifest, split):
            digest = hashlib.blake2b(digest_size=16)
            ends = 0
            for start in range(position, position + shard.tokens, 256 * CHUNK):
                stop = min(start + 256 * CHUNK, position + shard.tokens)
                ids = tokens[start:stop]
                digest.update(ids.tobytes())
                ends += int(np.count_nonzero(ids == manifest.end_of_text))
            position += shard.tokens
            if digest.hexdigest() != shard.hash:
                raise UserError(f"{directory / shard.file}: its tokens are not those prepared")
            if ends != shard.documents:
                raise UserError(
                    f"{directory / shard.file}: {ends} ends of text for {shard.documents} "
                    "documents: made by another tokenizer; delete the folder and prepare again"
                )


def _verify_manifest(directory: pathlib.Path, manifest: Manifest) -> None:
    """Refuses a manifest of another vocabulary than its tokenizer's, or of other shards."""
    for known in (ByteTokenizer, Gpt2Tokenizer):
        ours, theirs = ((t.vocab_size, t.end_of_text) for t in (known, manifest))
        if manifest.tokenizer == known.name and ours != theirs:
            raise UserError(
                f"{directory / MANIFEST}: vocabulary and end of text are {theirs}, where "
                f"{known.name} has {ours}: changed"
            )
    shards = iter((*manifest.train, *manifest.heldout))
    if fingerprint(manifest.tokenizer, manifest.vocab_size, shards) != manifest.hash:
        raise UserError(f"{directory / MANIFEST}: its hash is not that of its shards: changed")


def check_size(path: pathlib.Path, shard: Shard) -> None:
    """Raises UserError unless a shard's file is there, as long as it was written."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise UserError(f"{path}: missing; delete the folder and prepare again") from None
    if size != shard.size:
        raise UserError(
            f"{path}: {size} bytes instead of {shard.size}: cut or replaced; delete the folder and "
            "prepare again"
        )


@functools.lru_cache(maxsize=_OPEN_SHARDS)
def _reader(path: str, tokens: int) -> Any:
    reader = array_record_module.ArrayRecordReader(path, _READING)
    if reader.num_records() != -(-tokens // CHUNK):
        there = "damaged" if os.path.exists(path) else "gone"
        raise UserError(f"{path}: {there}; delete the folder and prepare again")
    return reader
