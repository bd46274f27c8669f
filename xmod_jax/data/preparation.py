"""Tokenises documents into a prepared directory, in parallel and restartable.

Work goes by unit, a run of sources (`documents.Source`): a large file, or many small ones. A
finished unit leaves its training shard, its held-out documents and a note in ``units/``; the last
step merges the held-out documents by their digests and writes the manifest. Whatever dies in
between, the next run goes on with the units that are left.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from array_record.python import array_record_module

from xmod_jax import claims, storage
from xmod_jax.data import vocabulary
from xmod_jax.data.documents import TFDS, Documents, Reading, Source, digest, is_heldout
from xmod_jax.data.shards import (
    MANIFEST,
    Manifest,
    Shard,
    ShardWriter,
    check_size,
    fingerprint,
    writing,
)
from xmod_jax.data.tokenizer import Tokenizer, get_tokenizer
from xmod_jax.errors import UserError

SETTINGS = "settings.json"
_UNITS = "units"
_UNIT_BYTES = 64 << 20  # small files go together up to this
_BATCH_CHARACTERS = 1 << 20  # text that is tokenised at once
_MERGED = 4096  # held-out documents that are gathered at once
_POLL_S = 0.2


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
    with _claimed(output):
        _bind(output, sources, settings)
        if (output / MANIFEST).exists():
            manifest = Manifest.read(output)
            for shard in (*manifest.train, *manifest.heldout):
                check_size(output / shard.file, shard)
            return manifest
        for old in (*output.glob(".*.tmp"), *(output / _UNITS).glob(".*.tmp")):
            old.unlink()
        units = _units(sources)
        _run_units(units, output, settings, workers, progress)
        return _finish(units, output, settings, tokenizer)


@contextlib.contextmanager
def _claimed(output: pathlib.Path) -> Iterator[None]:
    """Holds the directory; waits for another process that prepares it."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(claims.claim(output))
        except claims.RunClaimed:
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
    if not _begun(output):
        return
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
    """Tokenises every unit that has no note yet."""
    left = [i for i in range(len(units)) if not _note(output, i).exists()]
    size = float(sum(s.size for i in range(len(units)) if i not in set(left) for s in units[i]))
    tokens, done = 0, len(units) - len(left)

    def tell(part: tuple[float, int]) -> None:
        nonlocal size, tokens
        size, tokens = size + part[0], tokens + part[1]
        progress(Progress(done, len(units), size, tokens))

    count = max(1, min(workers, len(left)))
    work = [(i, units[i], output, settings, max(1, workers // count)) for i in left]
    if count == 1:
        for item in work:
            _unit(*item, tell)
            done += 1
        return
    context = multiprocessing.get_context("spawn")
    parts = context.Queue()
    pool = concurrent.futures.ProcessPoolExecutor(count, context, _start_worker, (parts,))
    try:
        waiting = {pool.submit(_unit_in_worker, *item) for item in work}
        while waiting:
            ended, waiting = concurrent.futures.wait(
                waiting, _POLL_S, concurrent.futures.FIRST_COMPLETED
            )
            while True:
                try:
                    tell(parts.get_nowait())
                except queue.Empty:
                    break
            for future in ended:
                future.result()
                done += 1
    except concurrent.futures.process.BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed (out of memory?): start again, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_parts: Any = None  # of a worker process: where it tells its progress


def _start_worker(parts: Any) -> None:
    global _parts
    _parts = parts


def _unit_in_worker(
    index: int, unit: list[Source], output: pathlib.Path, settings: Settings, threads: int
) -> None:
    _unit(index, unit, output, settings, threads, _parts.put)


def _note(output: pathlib.Path, index: int) -> pathlib.Path:
    return output / _UNITS / f"{index:05}.json"


def _unit(
    index: int,
    unit: list[Source],
    output: pathlib.Path,
    settings: Settings,
    threads: int,
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
            for texts in _batches(documents):
                full = [text for text in texts if text]
                empty += len(texts) - len(full)
                before = len(heldout)
                pieces, kept = _tokenise(full, tokenizer, settings, threads, heldout)
                if pieces:
                    train.add(np.concatenate(pieces), kept)
                found += len(full)
                held += len(heldout) - before
                read = documents.done * source.size
                tell((read - told, sum(map(len, pieces))))
                told = read
            tell((source.size - told, 0))
            count = {"path": source.path, "size": source.size, "documents": found, "heldout": held}
            omitted = {"empty": empty, "null": documents.null, "invalid": documents.invalid}
            counts.append(count | omitted)
        shard = train.close()
    except BaseException:
        train.abandon()
        raise
    held_out = _write_heldout(output, index, heldout)
    note = {"shard": dataclasses.asdict(shard), "heldout": held_out, "sources": counts}
    storage.write_json(_note(output, index), note)


def _batches(documents: Documents) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _tokenise(
    texts: Sequence[str],
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
    for text, ids in zip(texts, tokenizer.encode_batch(texts, threads), strict=True):
        key = digest(text)
        if is_heldout(key, settings.heldout_share):
            heldout.append((key, np.concatenate([ids, end.astype(ids.dtype)])))
        else:
            pieces += [ids, end.astype(ids.dtype)]
            kept += 1
    return pieces, kept


def _write_heldout(
    output: pathlib.Path, index: int, heldout: list[tuple[bytes, np.ndarray]]
) -> list[str]:
    """Held-out documents of a unit, a record each; their digests."""
    path = output / _UNITS / f"{index:05}.heldout"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(exist_ok=True)
    try:
        with writing(path):
            writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1")
            for _, ids in heldout:
                writer.write(ids.astype("<u4").tobytes())
            writer.close()
        storage.sync(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    temporary.rename(path)
    storage.sync(path.parent)
    return [key.hex() for key, _ in heldout]


def _finish(
    units: Sequence[list[Source]], output: pathlib.Path, settings: Settings, tokenizer: Tokenizer
) -> Manifest:
    """Merges the held-out documents and writes the manifest."""
    notes = [storage.read_json(_note(output, i)) for i in range(len(units))]
    train = tuple(Shard(**note["shard"]) for note in notes)
    heldout = _merge_heldout(output, notes, tokenizer.vocab_size)
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


def _merge_heldout(output: pathlib.Path, notes: Sequence[dict[str, Any]], vocab_size: int) -> Shard:
    """One shard of all held-out documents in the order of their digests.

    Any prefix of it is then a fair sample of all sources.
    """
    order = sorted(
        (key, unit, index)
        for unit, note in enumerate(notes)
        for index, key in enumerate(note["heldout"])
    )
    writer = ShardWriter(output / "heldout-00000.arrayrecord", vocab_size)
    try:
        for start in range(0, len(order), _MERGED):
            part = order[start : start + _MERGED]
            found: dict[tuple[int, int], np.ndarray] = {}
            for unit in sorted({unit for _, unit, _ in part}):
                indices = sorted(index for _, u, index in part if u == unit)
                found |= _read_heldout(output, unit, indices)
            ids = np.concatenate([found[unit, index] for _, unit, index in part])
            writer.add(ids, len(part))
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def _read_heldout(
    output: pathlib.Path, unit: int, indices: list[int]
) -> dict[tuple[int, int], np.ndarray]:
    path = output / _UNITS / f"{unit:05}.heldout"
    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        contents = reader.read(indices)
    except (RuntimeError, IndexError) as error:
        raise UserError(
            f"{path}: damaged: {error}; delete {_note(output, unit)} and start again"
        ) from error
    finally:
        reader.close()
    pairs = zip(indices, contents, strict=True)
    return {(unit, index): np.frombuffer(content, "<u4") for index, content in pairs}


def default_workers() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
