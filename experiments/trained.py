"""The newest checkpoint of a run, for commands that use what was trained."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from xmod_jax import records
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord

if TYPE_CHECKING:
    from xmod_jax.data.tokenizer import Tokenizer
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


def tokenizer(run: RunRecord, vocabulary: str | None = None) -> Tokenizer:
    """The tokenizer of a run's texts, from its directory; the training data are not needed.

    Args:
      run: the run.
      vocabulary: folder of vocabulary files to use instead of those that the run keeps.

    Raises:
      UserError: its vocabulary cannot be had.
    """
    from xmod_jax.data import vocabulary as vocabularies
    from xmod_jax.data.tokenizer import GPT2, get_tokenizer

    if vocabulary:
        get_tokenizer(GPT2, vocabulary)  # looked at although the run's tokenizer may need no files
    name = vocabularies.kept_name(run.directory)
    if name is None:
        # A run of an earlier version: its data say which.
        from xmod_jax.data import sources

        name = sources.load(run.config.data).tokenizer
    return vocabularies.kept(run.directory, name, vocabulary)


def load(run: RunRecord) -> TrainState:
    """The state of a run's newest checkpoint.

    Changes nothing there: a worker may be training the run. The optimiser's part, as large as the
    model, is not read: it is None.

    Raises:
      UserError: no whole checkpoint, or one of something else.
    """
    # Only now: a mistake is told without loading what training needs.
    from xmod_jax.training.checkpoint import Checkpoints
    from xmod_jax.training.step import abstract_state

    with Checkpoints(run.directory, run.config, read_only=True) as saved:
        if saved.latest is None:
            raise UserError(f"{run.directory}: no whole checkpoint yet: resume the run first")
        like = dataclasses.replace(abstract_state(run.config), optimizer=None)
        state, _ = saved.restore(like)
    return state
