"""The newest checkpoint of a run, for commands that use what was trained."""

from __future__ import annotations

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


def load(run: RunRecord) -> tuple[TrainState, Dataset | Mixture]:
    """The state of a run's newest checkpoint, and the data that it was trained on.

    Raises:
      RunClaimed: a worker trains the run now.
      UserError: no whole checkpoint, or one of something else.
    """
    # Only now: a mistake is told without loading what training needs.
    from xmod_jax.data import sources
    from xmod_jax.training.checkpoint import Checkpoints
    from xmod_jax.training.step import abstract_state

    dataset = sources.load(run.config.data)
    # Opening checkpoints clears half-written ones away: not under a worker that writes them.
    with (
        records.claim(run.directory),
        Checkpoints(run.directory, run.config, dataset.hash) as saved,
    ):
        if saved.latest is None:
            raise UserError(f"{run.directory}: no whole checkpoint yet: resume the run first")
        state, _ = saved.restore(abstract_state(run.config))
    return state, dataset
