"""The newest checkpoint of a run, for commands that use what was trained."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from xmod_jax import records
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord

if TYPE_CHECKING:
    from xmod_jax.data.sources import Dataset, Mixture
    from xmod_jax.training.step import TrainState


def has_checkpoint(run: RunRecord) -> bool:
    """Whether a checkpoint is there, whole or not; loads nothing."""
    return any((run.directory / records.CHECKPOINTS).glob("[0-9]*"))


def find(directory: str) -> RunRecord:
    """The run of a directory; loads nothing of its checkpoints.

    Raises:
      UserError: no run directory, or no checkpoint in it.
    """
    run = RunRecord.load(pathlib.Path(directory))
    if not has_checkpoint(run):
        raise UserError(f"{run.directory}: it has no checkpoint yet: train it first")
    return run


def load(run: RunRecord) -> tuple[TrainState, Dataset | Mixture]:
    """The state of a run's newest checkpoint, and the data that it was trained on.

    Changes nothing there: a worker may be training the run. The optimiser's part, as large as the
    model, is not read: it is None.

    Raises:
      UserError: no whole checkpoint, or one of something else.
    """
    # Only now: a mistake is told without loading what training needs.
    from xmod_jax.data import sources
    from xmod_jax.training.checkpoint import Checkpoints
    from xmod_jax.training.step import abstract_state

    dataset = sources.load(run.config.data)
    with Checkpoints(run.directory, run.config, dataset.hash, read_only=True) as saved:
        if saved.latest is None:
            raise UserError(f"{run.directory}: no whole checkpoint yet: resume the run first")
        like = dataclasses.replace(abstract_state(run.config), optimizer=None)
        state, _ = saved.restore(like)
    return state, dataset


def check_vocabulary(folder: str | None) -> None:
    """Reads the vocabulary files of ``--vocabulary``, if it is given, before a checkpoint is.

    Raises:
      UserError: they cannot be read, or are not GPT-2's.
    """
    from xmod_jax.data.tokenizer import GPT2, get_tokenizer

    if folder:
        get_tokenizer(GPT2, folder)
