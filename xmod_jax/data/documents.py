"""Documents of parquet files, text, JSON lines and TFDS data sets, streamed.

Nothing is dropped in silence: what cannot be a document raises an error that names file and place,
unless `Reading` says to leave it out or to mend it, and then it is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Any

from xmod_jax.errors import UserError

PARQUET, TEXT, JSONL, TFDS = "parquet", "text", "jsonl", "tfds"
KINDS = (PARQUET, TEXT, JSONL, TFDS)
UNITS = ("file", "line", "paragraph")  # what a document of plain text is
MAX_DOCUMENT = 64 << 20  # bytes; a document is held in memory as a whole
_PARQUET_ROWS = 256
_TFDS_PART = 20_000  # documents of one piece of work
_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")


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


def find(inputs: Sequence[str], kind: str | None) -> tuple[Source, ...]:
    """The sources that `inputs` name: files, folders (all files below, by name) or TFDS names.

    Args:
      inputs: paths, or ``NAME``, ``NAME:version``, ``NAME[split]`` for TFDS.
      kind: one of KINDS; None: by the files' endings.

    Raises:
      UserError: an input is missing, empty of files, or of no known kind; a broken link or a folder
        that cannot be read below it.
    """
    if kind == TFDS:
        return tuple(part for name in inputs for part in _tfds_parts(name))
    sources = []
    for given in inputs:
        path = pathlib.Path(given)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        files = sorted(_files(path, set())) if path.is_dir() else [path]
        if path.is_dir() and kind == PARQUET:
            files = [file for file in files if file.suffix == ".parquet"]
        if not files:
            raise UserError(f"{path}: no {kind or 'data'} files in it")
        for file in files:
            status = file.stat()
            chosen = kind or _kind(file)
            sources.append(Source(chosen, str(file), status.st_size, status.st_mtime_ns))
    return tuple(sources)


def _files(folder: pathlib.Path, above: set[pathlib.Path]) -> Iterator[pathlib.Path]:
    """The files below a folder, through links, but for hidden files and folders.

    `above` are the folders on the way there, which a link may lead back to.
    """
    real = folder.resolve()
    if real in above:
        raise UserError(f"{folder}: a link to a folder that it is in: remove it")
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry, above | {real})
        elif entry.is_file():
            yield entry
        elif entry.is_symlink():
            raise UserError(f"{entry}: a broken link: mend or remove it")


def _kind(path: pathlib.Path) -> str:
    name = path.name.lower()
    for ending in _PACKED:
        name = name.removesuffix(ending)
    if name.endswith(".parquet"):
        return PARQUET
    return JSONL if name.endswith(_JSON_ENDINGS) else TEXT


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
      done: share of the source that has been read.
    """

    def __init__(self, source: Source, reading: Reading) -> None:
        self._source, self._reading = source, reading
        self.null = self.invalid = 0
        self.done = 0.0

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
            yield self._decoded(place, value)

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
                self._refuse(place, f"not UTF-8: {error}", "--replace_invalid mends it")
        self.invalid += 1
        if isinstance(value, str):
            value = value.encode(errors="surrogatepass")
        return value.decode(errors="replace")

    def _refuse(self, place: str, what: str, advice: str) -> None:
        raise UserError(f"{self._source.path}: {place}: {what}; {advice}")


def _parquet(documents: Documents) -> Iterator[tuple[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    source, field = documents._source, documents._reading.field
    row = 0
    try:
        with parquet.ParquetFile(source.path, pre_buffer=False) as file:
            column = file.schema_arrow.field(field) if field in file.schema_arrow.names else None
            if column is None:
                raise UserError(
                    f"{source.path}: no column {field!r}; it has "
                    f"{', '.join(file.schema_arrow.names)}; choose one with --field"
                )
            text = (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
            binary = (pyarrow.binary(), pyarrow.large_binary())
            if column.type not in (*text, *binary):
                raise UserError(f"{source.path}: column {field!r} is {column.type}, not text")
            rows = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(_PARQUET_ROWS, columns=[field], use_threads=False):
                # As bytes, since the library does not look whether a string is UTF-8.
                values = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
                for value in values:
                    row += 1
                    yield f"row {row}", value
                documents.done = row / rows
    except (pyarrow.ArrowException, OSError) as error:
        # A full disk or a broken pipe is not the file's fault, but cannot come from reading it.
        raise UserError(f"{source.path}: cannot be read as parquet: {error}") from error


@contextlib.contextmanager
def _open(documents: Documents) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked by its ending."""
    import pyarrow

    path = documents._source.path
    with open(path, "rb") as raw:
        stream: Any = raw
        if path.lower().endswith(".gz"):
            stream = gzip.GzipFile(fileobj=raw)
        elif path.lower().endswith(".zst"):
            packed = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw), "zstd")
            stream = _Buffered(packed)
        try:
            yield _Watched(stream, raw, documents)  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            raise UserError(f"{path}: damaged or cut: {error}") from error


class _Buffered:
    """Lines from a stream that has none."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._rest = stream, b""

    def read(self, size: int) -> bytes:
        pieces, left = [self._rest], size - len(self._rest)
        while left > 0 and (piece := self._stream.read(min(left, 1 << 20))):
            pieces.append(piece)
            left -= len(piece)
        content = b"".join(pieces)
        self._rest = content[size:]
        return content[:size]

    def readline(self, limit: int) -> bytes:
        while b"\n" not in self._rest and len(self._rest) < limit:
            piece = self._stream.read(1 << 16)
            if not piece:
                break
            self._rest += piece
        end = self._rest.find(b"\n") + 1 or len(self._rest)
        line, self._rest = self._rest[: min(end, limit)], self._rest[min(end, limit) :]
        return line


class _Watched:
    """A stream that tells how much of its file has been read."""

    def __init__(self, stream: Any, raw: IO[bytes], documents: Documents) -> None:
        self._stream, self._raw, self._documents = stream, raw, documents

    def read(self, size: int) -> bytes:
        return self._told(self._stream.read(size))

    def readline(self, limit: int) -> bytes:
        return self._told(self._stream.readline(limit))

    def _told(self, content: bytes) -> bytes:
        self._documents.done = self._raw.tell() / max(self._documents._source.size, 1)
        return content


def _lines(documents: Documents) -> Iterator[tuple[int, bytes]]:
    """Numbered lines without their line feed."""
    with _open(documents) as stream:
        number = 0
        while line := stream.readline(MAX_DOCUMENT + 2):
            number += 1
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
            value = json.loads(documents._decoded(place, line))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: {place}: not JSON: {error}") from error
        if not isinstance(value, dict) or field not in value:
            raise UserError(f"{path}: {place}: no key {field!r}; choose one with --field")
        if not isinstance(value[field], str | None):
            raise UserError(f"{path}: {place}: {field!r} is not text")
        yield place, value[field]


def _tfds_parts(name: str) -> Iterator[Source]:
    name, _, split = name.removesuffix("]").partition("[")
    split = split or "train"
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
