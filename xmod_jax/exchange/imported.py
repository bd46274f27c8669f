"""A run directory made of an imported checkpoint: what commands take that use trained models."""

from __future__ import annotations

import dataclasses
import pathlib

import jax.numpy as jnp

from xmod_jax import records
from xmod_jax.config import Compute, DataConfig, RunConfig, Start, TrainConfig
from xmod_jax.data import sources, vocabulary
from xmod_jax.errors import UserError
from xmod_jax.exchange import qwen3, tensors
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import TrainState

EXPERIMENT = "imported"


def make_run(
    folder: pathlib.Path, directory: pathlib.Path, data: DataConfig, compute: Compute
) -> RunConfig:
    """Imports a Hugging Face folder into a new run directory, which appears whole or not at all.

    Its checkpoint of step 0 has no optimiser: the run can be used and started from, not resumed.

    Args:
      folder: what `qwen3.read` takes.
      directory: must not be there, or be empty.
      data: where texts get their tokenizer; its ids must be the checkpoint's.
      compute: precision of activations.

    Returns:
      The run's configuration; its `start` says where the weights are from.

    Raises:
      UserError: as `qwen3.read`; data that cannot be had, or with more token ids than the model;
        a directory that is taken.
    """
    tensors.check_free(directory)
    dataset = sources.load(data)
    checkpoint = qwen3.read(folder, compute)
    model = checkpoint.model
    if dataset.vocab_size > model.config.backbone.vocab_size:
        raise UserError(
            f"--data={data.source} has {dataset.vocab_size} token ids, {folder} only "
            f"{model.config.backbone.vocab_size}"
        )
    data = dataclasses.replace(data, hash=dataset.hash)
    run = RunConfig(
        EXPERIMENT,
        directory.name,
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
        with Checkpoints(temporary, run) as checkpoints:
            checkpoints.save(state, {})
    return run
