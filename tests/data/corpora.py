"""Small corpora of text files, and what is prepared of them."""

from __future__ import annotations

import pathlib

from xmod_jax.data import documents
from xmod_jax.data.preparation import Settings, prepare

END = 256
BYTES = Settings("bytes", heldout_share=0.2, reading=documents.Reading(unit="line"))


def corpus(folder: pathlib.Path, files: int = 3, lines: int = 400) -> list[str]:
    """Writes files of lines; returns the documents in order."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for file in range(files):
        rows = [f"file {file} line {i} " + "ü" * (i % 90) for i in range(lines)]
        (folder / f"{file}.txt").write_text("\n".join(rows))
        texts += rows
    return texts


def prepared(folder: pathlib.Path, **options) -> pathlib.Path:
    texts = folder / "texts"
    corpus(texts)
    output = folder / "prepared"
    prepare(documents.find([str(texts)], None), output, BYTES, workers=1, **options)
    return output
