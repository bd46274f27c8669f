"""Preparing and reading training data, tokens a second."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from experiments.suites import timing
from experiments.suites.models import Setting
from experiments.suites.timing import Row

RAW, PREPARE, READ = "raw tiktoken", "prepare_data", "reading batches"
_READ_TOKENS = 1_000_000  # of a measurement


def data(setting: Setting) -> list[Row]:
    """Preparing the Python sources of this environment's SciPy and JAX, and reading the result."""
    return measured(python_sources(), setting)


def python_sources() -> list[str]:
    """The text of every Python file of SciPy and JAX: some ten million characters."""
    import jax
    import scipy

    folders = [pathlib.Path(str(package.__file__)).parent for package in (scipy, jax)]
    texts = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [text for text in texts if text]


def measured(texts: Sequence[str], setting: Setting) -> list[Row]:
    """`prepare_data` on the documents against tiktoken on as many threads; then reading.

    Each row has ``tokens/s``; reading is in batches of the setting's size.
    """
    from xmod_jax.data import documents, pipeline, preparation, sources
    from xmod_jax.data.tokenizer import Gpt2Tokenizer

    cores = preparation.default_workers()
    encode = Gpt2Tokenizer()._encoding.encode_ordinary_batch
    with tempfile.TemporaryDirectory() as name:
        place = pathlib.Path(name)
        (place / "texts.jsonl").write_text("".join(f"{json.dumps({'text': t})}\n" for t in texts))
        made: list[pathlib.Path] = []

        def prepare() -> None:
            made.append(place / f"prepared{len(made)}")
            found = documents.find([str(place / "texts.jsonl")], None)
            preparation.prepare(found, made[-1], preparation.Settings("gpt2"), cores)

        calls: dict[str, Callable[[], Any]] = {
            RAW: lambda: encode(list(texts), num_threads=cores),
            PREPARE: prepare,
        }
        rows = timing.rows(timing.interleave(calls, setting.rounds))
        dataset = sources.open_prepared(made[0], "data")
        batches = pipeline.train_iterator(dataset, setting.context, setting.batch, 0)
        steps = max(1, _READ_TOKENS // setting.tokens)
        read = {READ: lambda: [next(batches) for _ in range(steps)]}
        rows += timing.rows(timing.interleave(read, setting.rounds))
        amounts = [len(dataset.train)] * 2 + [steps * setting.tokens]
    for row, amount in zip(rows, amounts, strict=True):
        row["tokens/s"] = amount / row["seconds"]
    return rows
