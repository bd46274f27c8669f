"""Documents of parquet files, text, JSON lines and TFDS data sets, streamed.

Nothing is dropped in silence: what cannot be a document raises an error that names file and place,
unless `Reading` says to leave it out or to mend it, and then it is counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from absl import logging

from xmod_jax.data import columns, folders, formats, streams
from xmod_jax.data.folders import JSONL, PARQUET, TEXT
from xmod_jax.errors import UserError

TFDS = "tfds"
KINDS = (PARQUET, TEXT, JSONL, TFDS)
UNITS = ("file", "line", "paragraph")  # what a document of plain text is
MAX_DOCUMENT = 64 << 20  # bytes; a document is held in memory as a whole
_TFDS_PART = 20_000  # documents of one piece of work


@dataclasses.dataclass(frozen=True)
class Source:
    """One piece of work: a file, or a part of a TFDS split.

    Attributes:
      kind: one of KINDS.
      path: file; for TFDS ``NAME[split]``.
      size: bytes of the file, examples for TFDS.
      changed: time of the file's last change in nanoseconds, 0 for TFDS.
      start: first example, for TFDS.
    """

    kind: str
    path: str
    size: int
    changed: int = 0
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Reading:
    """How documents are read.

    Attributes:
      field: column or key that holds the text.
      unit: what a document of plain text is, one of UNITS.
      replace_invalid: replace what is not UTF-8 by U+FFFD instead of refusing it.
      skip_null: leave rows without text out instead of refusing them.
    """

    field: str = "text"
    unit: str = "file"
    replace_invalid: bool = False
    skip_null: bool = False


def find(
    inputs: Sequence[str], kind: str | None, warn: Callable[[str], None] = logging.warning
) -> tuple[Source, ...]:
    """The sources that `inputs` name: files, folders (all files below, by name) or TFDS names.

    Args:
      inputs: paths, or ``NAME``, ``NAME:version``, ``NAME[split]`` for TFDS.
      kind: one of KINDS; None: what the files are.
      warn: is told what is left out or may be a mistake.

    Raises:
      UserError: an input is missing, empty of files, or of no known kind, or a folder holds
        several; a broken link or a folder that cannot be read below it.
    """
    if kind == TFDS:
        return _tfds_sources(inputs, warn)
    sources = []
    for path, chosen in folders.choose(inputs, kind, warn):
        status = path.stat()
        sources.append(Source(chosen, str(path), status.st_size, status.st_mtime_ns))
    return tuple(sources)


def digest(text: str) -> bytes:
    """A stable hash of a document, 8 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def is_heldout(key: bytes, share: float) -> bool:
    """Whether the document of a `digest` belongs to the `share` that is held out.

    Neither other documents nor their order matter, so every model, context length and process
    count has the same held-out documents, also when the corpus grows.
    """
    return int.from_bytes(key) < share * 2**64


class Documents:
    """The documents of one source, in order; iterate once.

    Attributes:
      null: rows without text that were left out.
      invalid: documents in which something was replaced.
      nul: documents that hold a NUL character, which text seldom does.
      done: share of the source that has been read.
      place: of the newest document, such as ``row 7``.
    """

    def __init__(self, source: Source, reading: Reading) -> None:
        self._source, self._reading = source, reading
        self.null = self.invalid = self.nul = 0
        self.done = 0.0
        self.place = ""

    def __iter__(self) -> Iterator[str]:
        """Yields texts.

        Raises:
          UserError: a document that cannot be had; names file and place.
        """
        readers = {PARQUET: _parquet, TEXT: _text, JSONL: _jsonl, TFDS: _tfds}
        for place, value in readers[self._source.kind](self):
            if value is None:
                if not self._reading.skip_null:
                    self._refuse(place, "no text (null)", "--skip_null leaves such rows out")
                self.null += 1
                continue
            text = self._decoded(place, value)
            self.nul += "\0" in text
            self.place = place
            yield text

    def _decoded(self, place: str, value: str | bytes) -> str:
        size = len(value)
        if size > MAX_DOCUMENT:
            self._refuse(place, f"a document of {size >> 20} MB", "split it: see --documents")
        try:
            if isinstance(value, bytes):
                return value.decode()
            value.encode()
            return value
        except UnicodeError as error:
            if not self._reading.replace_invalid:
                self._refuse(
                    place,
                    f"not UTF-8: {error}",
                    "make it UTF-8 if it is of another encoding, such as Latin-1 (iconv); "
                    "--replace_invalid puts U+FFFD in place of what is damaged",
                )
        self.invalid += 1
        if isinstance(value, str):
            value = value.encode(errors="surrogatepass")
        return value.decode(errors="replace")

    def _refuse(self, place: str, what: str, advice: str) -> None:
        raise UserError(f"{self._source.path}: {place}: {what}; {advice}")


def _parquet(documents: Documents) -> Iterator[tuple[str, Any]]:
    source, field = documents._source, documents._reading.field
    row = 0
    for done, values in columns.texts(source.path, field):
        for value in values:
            row += 1
            yield f"row {row}", value
        documents.done = done


def _open(documents: Documents) -> contextlib.AbstractContextManager[IO[bytes]]:
    def told(share: float) -> None:
        documents.done = share

    return streams.opened(documents._source.path, told)


def _lines(documents: Documents) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without their line feed, or a byte order mark where files were joined."""
    with _open(documents) as stream:
        number = 0
        while line := stream.readline(MAX_DOCUMENT + 2):
            number += 1
            line = line.removeprefix(formats.BYTE_ORDER_MARK)
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _text(documents: Documents) -> Iterator[tuple[str, Any]]:
    unit = documents._reading.unit
    if unit == "file":
        with _open(documents) as stream:
            yield "whole file", stream.read(MAX_DOCUMENT + 1)
    elif unit == "line":
        for number, line in _lines(documents):
            yield f"line {number}", line
    else:
        yield from _paragraphs(documents)


def _paragraphs(documents: Documents) -> Iterator[tuple[str, Any]]:
    """Runs of lines between blank lines."""
    first, size = 1, 0
    held: list[bytes] = []
    for number, line in _lines(documents):
        if line.strip():
            first = first if held else number
            held.append(line)
            size += len(line) + 1
        if held and (not line.strip() or size > MAX_DOCUMENT):
            yield f"paragraph at line {first}", b"\n".join(held)
            held, size = [], 0
    if held:
        yield f"paragraph at line {first}", b"\n".join(held)


def _jsonl(documents: Documents) -> Iterator[tuple[str, Any]]:
    path, field = documents._source.path, documents._reading.field
    for number, line in _lines(documents):
        if not line.strip():
            continue
        place = f"line {number}"
        try:
            value = _JSON.decode(documents._decoded(place, line))
        except (ValueError, RecursionError) as error:
            reason = f"not JSON: {error}; a line holds one object"
            raise UserError(f"{path}: {place}: {reason}") from error
        if not isinstance(value, dict) or field not in value:
            shape = "" if isinstance(value, dict) else "; a line holds one object, and this is none"
            raise UserError(f"{path}: {place}: no key {field!r}; choose one with --field{shape}")
        if isinstance(value, _Repeated) and field in value.keys_repeated:
            raise UserError(f"{path}: {place}: {field!r} stands there twice: leave one")
        if not isinstance(value[field], str | None):
            raise UserError(f"{path}: {place}: {field!r} is not text")
        yield place, value[field]


class _Repeated(dict[str, Any]):
    """An object of JSON that names a key twice."""

    keys_repeated: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    counts = collections.Counter(key for key, _ in pairs)
    repeated = _Repeated(value)
    repeated.keys_repeated = frozenset(key for key, count in counts.items() if count > 1)
    return repeated


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def _tfds_sources(names: Sequence[str], warn: Callable[[str], None]) -> tuple[Source, ...]:
    """The parts of every split, each split once."""
    splits = [_tfds_name(name) for name in names]
    for split in {split for split in splits if splits.count(split) > 1}:
        warn(f"TFDS {split} is given more than once and read once")
    return tuple(part for split in dict.fromkeys(splits) for part in _tfds_parts(split))


def _tfds_name(name: str) -> str:
    """``NAME[split]``, also of a name without a split."""
    name, _, split = name.removesuffix("]").partition("[")
    return f"{name}[{split or 'train'}]"


def _tfds_parts(name: str) -> Iterator[Source]:
    name, _, split = name.removesuffix("]").partition("[")
    count = len(_tfds_source(name, split))
    if not count:
        raise UserError(f"TFDS {name}[{split}]: no examples")
    for start in range(0, count, _TFDS_PART):
        size = min(_TFDS_PART, count - start)
        yield Source(TFDS, f"{name}[{split}]", size, start=start)


def _tfds_source(name: str, split: str) -> Any:
    import tensorflow_datasets as tfds

    try:
        return tfds.data_source(name, split=split)
    except Exception as error:  # of many kinds: unknown names, splits, formats, folders, network
        reason = str(error).strip().splitlines()
        raise UserError(
            f"TFDS {name}[{split}]: {reason[0] if reason else type(error).__name__}; it must be "
            f"prepared in the array_record format under {os.environ.get('TFDS_DATA_DIR', '~')}"
        ) from error


def _tfds(documents: Documents) -> Iterator[tuple[str, Any]]:
    source, field = documents._source, documents._reading.field
    name, _, split = source.path.removesuffix("]").partition("[")
    examples = _tfds_source(name, split)
    for index in range(source.start, source.start + source.size):
        example = examples[index]
        if field not in example:
            raise UserError(
                f"{source.path}: no feature {field!r}; it has {', '.join(example)}; choose one "
                "with --field"
            )
        yield f"example {index}", example[field]
        documents.done = (index + 1 - source.start) / source.size
