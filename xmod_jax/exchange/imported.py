"""A run directory made of an imported checkpoint: what commands take that use trained models.

What belongs to the weights beside them, the tokenizer's files and the special ids, is kept in the
run directory's folder `records.SOURCE` and found again by an export, also of runs that started
there.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import NamedTuple

import jax.numpy as jnp

from xmod_jax import records, storage
from xmod_jax.config import Compute, DataConfig, RunConfig, Start, TrainConfig
from xmod_jax.data import sources, vocabulary
from xmod_jax.data.tokenizer import Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.exchange import qwen3, settings, tensors, tokenizers
from xmod_jax.records import RunRecord
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import TrainState

EXPERIMENT = "imported"


class Imported(NamedTuple):
    """What `make_run` made.

    Attributes:
      run: the run's configuration.
      notes: what a user should know of it, each a sentence.
    """

    run: RunConfig
    notes: tuple[str, ...]


def make_run(
    folder: pathlib.Path, directory: pathlib.Path, data: DataConfig, compute: Compute
) -> Imported:
    """Imports a Hugging Face folder into a new run directory, which appears whole or not at all.

    Its checkpoint of step 0 has no optimiser: the run can be used and started from, not resumed.

    Args:
      folder: what `qwen3.read` takes.
      directory: must not be there, or be empty.
      data: where texts get their tokenizer; its ids must be the checkpoint's.
      compute: precision of activations.

    Returns:
      The run's configuration, whose `start` says where the weights are from, and notes.

    Raises:
      UserError: as `qwen3.read`; data that cannot be had, or with more token ids than the model;
        a directory that is taken.
    """
    tensors.check_free(directory)
    known = qwen3.describe(folder, compute).model.backbone.vocab_size
    dataset = sources.load(data)
    if dataset.vocab_size > known:
        raise UserError(
            f"--data={data.source} has {dataset.vocab_size} token ids, {folder} only {known}"
        )
    kept = tokenizers.travelling(folder)
    checkpoint = qwen3.read(folder, compute)
    model = checkpoint.model
    data = dataclasses.replace(data, hash=dataset.hash)
    run = RunConfig(
        EXPERIMENT,
        directory.resolve().name,
        "dense" if model.config.moe is None else "moe",
        EXPERIMENT,
        EXPERIMENT,
        model.config,
        TrainConfig(checkpoint.context_length, batch_size=1, steps=1),
        data,
        Start(str(folder), checkpoint.hash),
    )
    state = TrainState(model, None, model.thresholds(), jnp.zeros((), jnp.int32))
    with tensors.replacing(directory) as temporary:
        records.prepare(temporary, run)
        vocabulary.keep(temporary, dataset.tokenizer, dataset.vocabulary)
        for name, content in kept.items():
            (temporary / records.SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / records.SOURCE / name).write_bytes(content)
        with Checkpoints(temporary, run) as checkpoints:
            checkpoints.save(state, {})
    tokenizer = vocabulary.kept(directory, dataset.tokenizer)
    return Imported(run, checkpoint.notes + _tokenizer_notes(folder, run, tokenizer))


def _tokenizer_notes(folder: pathlib.Path, run: RunConfig, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What sets the checkpoint's tokenizer apart from that of --data."""
    notes = []
    theirs = tokenizers.tokenizer_files(folder)
    if theirs and theirs != tokenizers.own_files(tokenizer, run.train.context_length):
        notes.append(
            f"the checkpoint's own tokenizer ({min(theirs)}) is not read, only kept for an export: "
            f"texts go through that of --data={run.data.source} ({tokenizer.name})"
        )
    known = run.model.backbone.vocab_size
    if known > tokenizer.vocab_size:
        notes.append(
            f"the checkpoint has {known} token ids, --data={run.data.source} "
            f"{tokenizer.vocab_size}: texts hold those alone"
        )
    return tuple(notes)


class Accompanying(NamedTuple):
    """What an export writes beside the weights.

    Attributes:
      beside: as `qwen3.write` takes it.
      notes: what a user should know of it, each a sentence.
    """

    beside: qwen3.Beside
    notes: tuple[str, ...]


def accompanying(run: RunRecord, tokenizer: Tokenizer) -> Accompanying:
    """The special ids and tokenizer files of a run's weights.

    Those of the checkpoint that was imported, by this run or by one that it started from, else our
    own tokenizer's.

    Args:
      run: to be exported.
      tokenizer: of the data that it was trained on.

    Raises:
      UserError: what was kept in the run directory cannot be read.
      OSError: likewise.
    """
    source = _source(run)
    kept = source.directory / records.SOURCE
    if (kept / settings.CONFIG).is_file():
        files = tokenizers.travelling(kept)
        notes = []
        if not tokenizers.tokenizer_files(kept):
            notes.append("the imported checkpoint had no tokenizer files: none are written")
        if run.config.experiment != EXPERIMENT:
            notes.append(
                f"special ids and tokenizer files are those of {_origin(run, source)}, where the "
                f"run started; it was trained on tokens of {tokenizer.name}"
            )
        beside = qwen3.Beside(storage.read_json(kept / settings.CONFIG), files)
        return Accompanying(beside, tuple(notes))
    if source.config.experiment == EXPERIMENT:
        note = f"{source.directory} kept neither special ids nor tokenizer files: none are written"
        return Accompanying(qwen3.Beside(), (note,))
    ids = tokenizers.special_ids(tokenizer)
    files = tokenizers.own_files(tokenizer, run.config.train.context_length)
    files[settings.GENERATION] = tensors.encode(ids)
    lost = source.config.start
    note = f"special ids and tokenizer files are those of {tokenizer.name}"
    notes = [f"{lost.directory}, where it started, is not there any more: {note}"] if lost else []
    return Accompanying(qwen3.Beside(ids, files), tuple(notes))


def _origin(run: RunRecord, source: RunRecord) -> str:
    """Where the weights of `run` come from, as a note says it."""
    start = run.config.start
    if start is None or source.directory != run.directory:
        return str(source.directory)
    return start.directory


def _source(run: RunRecord) -> RunRecord:
    """The first run of those that a run's weights come from, as far as they are still there.

    A run that started from an import keeps what belongs to its weights itself.
    """
    seen = set()
    while (start := run.config.start) and run.config.experiment != EXPERIMENT:
        if run.hash in seen or (run.directory / records.SOURCE).is_dir():
            break
        seen.add(run.hash)
        try:
            before = RunRecord.load(start.directory)
        except UserError:
            break
        if before.hash != start.hash:
            break
        run = before
    return run
