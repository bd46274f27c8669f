"""Tokenises documents into a prepared directory, in parallel and restartable.

Work goes by unit, a run of sources (`documents.Source`): a large file, or many small ones. A
finished unit leaves its training shard, its held-out documents and a note in ``units/``; the last
step merges the held-out documents by their digests and writes the manifest. Whatever dies in
between, the next run goes on with the units that are left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from xmod_jax import claims, storage
from xmod_jax.data import heldout as heldout_files
from xmod_jax.data import vocabulary
from xmod_jax.data import workers as worker_processes
from xmod_jax.data.documents import TFDS, Documents, Reading, Source, digest, is_heldout
from xmod_jax.data.shards import (
    MANIFEST,
    Manifest,
    Shard,
    ShardWriter,
    check_size,
    fingerprint,
)
from xmod_jax.data.tokenizer import Tokenizer, Untokenizable, get_tokenizer
from xmod_jax.errors import UserError

SETTINGS = "settings.json"
_UNITS = "units"
_UNIT_BYTES = 64 << 20  # small files go together up to this
_BATCH_CHARACTERS = 1 << 20  # text that is tokenised at once


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the tokens of a prepared directory; stored in it, and compared on restart.

    Attributes:
      tokenizer: its name.
      vocabulary: folder of its vocabulary files, or None.
      heldout_share: share of the documents that is held out.
      reading: how documents are read.
    """

    tokenizer: str
    vocabulary: str | None = None
    heldout_share: float = 0.005
    reading: Reading = dataclasses.field(default_factory=Reading)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a preparation is.

    Attributes:
      done: units of work finished.
      units: all units of work.
      size: bytes (TFDS: examples) read of those of all sources.
      tokens: tokens made by this run.
    """

    done: int
    units: int
    size: float
    tokens: int


def prepare(
    sources: Sequence[Source],
    output: pathlib.Path,
    settings: Settings,
    workers: int,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Prepares `sources` in `output`, or goes on where an earlier call was stopped.

    Args:
      sources: in the order that their tokens shall have.
      output: the directory to make.
      settings: see there.
      workers: processes; with fewer units of work than that, each tokenises on several threads.
      progress: called now and then.

    Returns:
      The manifest, also where the directory was finished before.

    Raises:
      UserError: a source cannot be read, or `output` holds another preparation or other files.
      OSError: the disk.
    """
    tokenizer = get_tokenizer(settings.tokenizer, settings.vocabulary)
    _check_output(output, sources, settings)
    with _claimed(output, sources, settings):
        _bind(output, sources, settings)
        if (output / MANIFEST).exists():
            manifest = Manifest.read(output)
            for shard in (*manifest.train, *manifest.heldout):
                check_size(output / shard.file, shard)
            return manifest
        _remove_temporaries(output)
        units = _units(sources)
        try:
            _run_units(units, output, settings, workers, progress)
            return _finish(units, output, settings, tokenizer)
        except BaseException:
            _remove_temporaries(output)
            raise


def _remove_temporaries(output: pathlib.Path) -> None:
    """Removes what processes that died or were stopped had begun to write."""
    for old in (*output.glob(".*.tmp"), *(output / _UNITS).glob(".*.tmp")):
        old.unlink()


@contextlib.contextmanager
def _claimed(output: pathlib.Path, sources: Sequence[Source], settings: Settings) -> Iterator[None]:
    """Holds the directory; waits for another process that prepares the same in it."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(claims.claim(output))
        except claims.RunClaimed:
            if (output / SETTINGS).exists():
                _check_bound(output, sources, settings)
            logging.warning("%s is being prepared by another process: waiting for it", output)
            held.enter_context(claims.claim(output, wait=True))
        yield


def _check_output(output: pathlib.Path, sources: Sequence[Source], settings: Settings) -> None:
    """Refuses a directory of something else before anything is written into it."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: choose a folder")
    if not (output / SETTINGS).exists():
        if output.exists() and any(p.name != claims.LOCK for p in output.iterdir()):
            raise UserError(f"{output} holds other files: choose a new or empty folder")
        return
    if _begun(output):
        _check_bound(output, sources, settings)


def _check_bound(output: pathlib.Path, sources: Sequence[Source], settings: Settings) -> None:
    """Refuses a directory that is bound to other sources or settings."""
    theirs = storage.read_json(output / SETTINGS)
    for name, ours in _identity(sources, settings).items():
        if theirs.get(name) != ours:
            what = "other inputs, or inputs that changed" if name == "sources" else f"other {name}"
            raise UserError(
                f"{output} holds a preparation of {what}: choose another folder or delete it"
            )


def _identity(sources: Sequence[Source], settings: Settings) -> dict[str, Any]:
    """What a directory is bound to, in the form it has in JSON."""
    identity = dataclasses.asdict(settings) | {"sources": [dataclasses.asdict(s) for s in sources]}
    del identity["vocabulary"]  # the files are checked by their hashes, wherever they are
    return dict(json.loads(json.dumps(identity)))


def _begun(output: pathlib.Path) -> bool:
    """Whether a unit of work is finished: until then other settings may take the folder."""
    return (output / MANIFEST).exists() or any((output / _UNITS).glob("*.json"))


def _bind(output: pathlib.Path, sources: Sequence[Source], settings: Settings) -> None:
    """Binds the folder to these sources and settings, or checks that it is bound to them."""
    _check_output(output, sources, settings)
    if not _begun(output):
        for old in output.glob("train-*.arrayrecord"):  # of a unit that died before its note
            old.unlink()
        storage.write_json(output / SETTINGS, _identity(sources, settings))


def _units(sources: Sequence[Source]) -> list[list[Source]]:
    """Cuts the sources into units of work, in order."""
    units: list[list[Source]] = []
    size = 0
    for source in sources:
        if not units or source.kind == TFDS or size + source.size > _UNIT_BYTES:
            units.append([])
            size = 0
        units[-1].append(source)
        size += source.size
    return units


def _run_units(
    units: Sequence[list[Source]],
    output: pathlib.Path,
    settings: Settings,
    workers: int,
    progress: Callable[[Progress], None],
) -> None:
    """Tokenises every unit that is not finished yet."""
    made_by = _made_by(output)
    left = [i for i in range(len(units)) if not _finished(output, i, made_by)]
    size = float(sum(s.size for i in set(range(len(units))) - set(left) for s in units[i]))
    tokens, done = 0, len(units) - len(left)

    def tell(part: tuple[float, int]) -> None:
        nonlocal size, tokens
        size, tokens = size + part[0], tokens + part[1]
        progress(Progress(done, len(units), size, tokens))

    def ended() -> None:
        nonlocal done
        done += 1

    count = max(1, min(workers, len(left)))
    threads = max(1, min(workers, default_workers()) // count)
    work = [(i, units[i], output, settings, threads, made_by) for i in left]
    worker_processes.spread(_unit, work, count, tell, ended)


def _made_by(output: pathlib.Path) -> str:
    """A hash of what the directory is bound to, for the notes of its units."""
    content = json.dumps(storage.read_json(output / SETTINGS), sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def _note(output: pathlib.Path, index: int) -> pathlib.Path:
    return output / _UNITS / f"{index:05}.json"


def _finished(output: pathlib.Path, index: int, made_by: str) -> bool:
    """Whether a unit was made in full, and by these settings."""
    try:
        note = storage.read_json(_note(output, index))
        shard = Shard(**note["shard"])
        check_size(output / shard.file, shard)
        return note["made_by"] == made_by and _note(output, index).with_suffix(".heldout").exists()
    except (UserError, KeyError, TypeError):
        return False


def _unit(
    index: int,
    unit: list[Source],
    output: pathlib.Path,
    settings: Settings,
    threads: int,
    made_by: str,
    tell: Callable[[tuple[float, int]], None],
) -> None:
    """One unit: its training shard, its held-out documents, and last its note."""
    tokenizer = get_tokenizer(settings.tokenizer, settings.vocabulary)
    train = ShardWriter(output / f"train-{index:05}.arrayrecord", tokenizer.vocab_size)
    heldout: list[tuple[bytes, np.ndarray]] = []
    counts = []
    try:
        for source in unit:
            documents = Documents(source, settings.reading)
            found = held = empty = 0
            told = 0.0
            for batch in _batches(documents):
                full = [(place, text) for place, text in batch if text]
                empty += len(batch) - len(full)
                before = len(heldout)
                pieces, kept = _tokenise(source, full, tokenizer, settings, threads, heldout)
                if pieces:
                    train.add(np.concatenate(pieces), kept)
                found += len(full)
                held += len(heldout) - before
                read = documents.done * source.size
                tell((read - told, sum(map(len, pieces))))
                told = read
            tell((source.size - told, 0))
            count = {"path": source.path, "size": source.size, "documents": found, "heldout": held}
            omitted = {name: getattr(documents, name) for name in ("null", "invalid", "nul")}
            omitted["empty"] = empty
            counts.append(count | omitted)
        shard = train.close()
    except BaseException:
        train.abandon()
        raise
    note = {
        "shard": dataclasses.asdict(shard),
        "heldout": heldout_files.write(_note(output, index).with_suffix(".heldout"), heldout),
        "sources": counts,
        "made_by": made_by,
    }
    worker_processes.leave_if_orphaned()
    storage.write_json(_note(output, index), note)


def _batches(documents: Documents) -> Iterator[list[tuple[str, str]]]:
    """Places and texts of documents, some at a time."""
    batch: list[tuple[str, str]] = []
    size = 0
    for text in documents:
        batch.append((documents.place, text))
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenise(
    source: Source,
    batch: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    settings: Settings,
    threads: int,
    heldout: list[tuple[bytes, np.ndarray]],
) -> tuple[list[np.ndarray], int]:
    """Ids to train on, an end-of-text token after each document, and the number of documents.

    Held-out documents go to `heldout` with their digests.
    """
    end = np.array([tokenizer.end_of_text], np.uint32)
    pieces: list[np.ndarray] = []
    kept = 0
    texts = [text for _, text in batch]
    try:
        encoded = tokenizer.encode_batch(texts, threads)
    except Untokenizable as error:
        raise UserError(f"{source.path}: {batch[error.index][0]}: {error}") from error
    for text, ids in zip(texts, encoded, strict=True):
        key = digest(text)
        if is_heldout(key, settings.heldout_share):
            heldout.append((key, np.concatenate([ids, end.astype(ids.dtype)])))
        else:
            pieces += [ids, end.astype(ids.dtype)]
            kept += 1
    return pieces, kept


def _finish(
    units: Sequence[list[Source]], output: pathlib.Path, settings: Settings, tokenizer: Tokenizer
) -> Manifest:
    """Merges the held-out documents and writes the manifest."""
    made_by = _made_by(output)
    for i in range(len(units)):
        if not _finished(output, i, made_by):
            raise UserError(
                f"{_note(output, i)}: not of this preparation: another command wrote into "
                f"{output}: start again"
            )
    notes = [storage.read_json(_note(output, i)) for i in range(len(units))]
    train = tuple(Shard(**note["shard"]) for note in notes)
    paths = [_note(output, i).with_suffix(".heldout") for i in range(len(units))]
    digests = [note["heldout"] for note in notes]
    heldout = heldout_files.merge(paths, digests, output, tokenizer.vocab_size)
    documents = sum(shard.documents for shard in train)
    if not documents:
        raise UserError(
            f"{output}: no document to train on ({heldout.documents} held out): give more text, or "
            "cut plain text by --documents=line or paragraph"
        )
    told = tuple(source for note in notes for source in note["sources"])
    shards = iter((*train, heldout))
    manifest = Manifest(
        tokenizer.name,
        tokenizer.vocab_size,
        tokenizer.end_of_text,
        train,
        (heldout,),
        settings.heldout_share,
        told,
        fingerprint(tokenizer.name, tokenizer.vocab_size, shards),
    )
    folder = pathlib.Path(settings.vocabulary) if settings.vocabulary else None
    vocabulary.keep(output, tokenizer.name, folder)
    manifest.write(output)
    shutil.rmtree(output / _UNITS)
    return manifest


def default_workers() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
