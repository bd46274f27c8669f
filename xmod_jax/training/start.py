"""Runs that start from the weights of another run: upcycling, or the same model trained further."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from xmod_jax import records, storage, upcycling
from xmod_jax.config import RunConfig, SparseStart, Start
from xmod_jax.data import sources, vocabulary
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.compilation import jit
from xmod_jax.training.optimizer import make_optimizer
from xmod_jax.training.step import TrainState, abstract_state, shardings


def find(directory: pathlib.Path, config: RunConfig, sparse: SparseStart) -> Start:
    """The start of `config` from the newest checkpoint of another run.

    Args:
      directory: the other run's, of a dense model with the backbone and as many layers as `config`
        has dense ones, or of the same model as `config`.
      config: the run that will start.
      sparse: what sparse layers begin with that the other run does not have.

    Raises:
      UserError: no run, no checkpoint, or one that does not fit.
    """
    source = RunRecord.load(directory)
    if source.config.model != config.model:
        upcycling.check(source.config.model, config.model)
    theirs, ours = _tokenizer(source), sources.load(config.data).tokenizer
    if theirs != ours:
        raise UserError(f"{directory} was trained on tokens of {theirs}, {config.name} has {ours}")
    with _open(source) as checkpoints:
        step = checkpoints.latest
    if step is None:
        raise UserError(f"{directory}: it has no checkpoint yet: train it first")
    return Start(str(directory), source.hash, step, sparse)


def started_state(config: RunConfig, mesh: Mesh | None = None) -> TrainState:
    """The state that a run with a start begins with, laid out on a mesh as `initial_state`.

    A model upcycled from a dense one begins with its function; the same model with its thresholds
    as well. The optimiser is new.

    Raises:
      UserError: what it starts from is gone, or is another run by now.
    """
    start = config.start
    assert start is not None
    source = RunRecord.load(start.directory)
    if source.hash != start.hash:
        raise UserError(
            f"{start.directory} is another run by now ({source.hash}) than {config.name} starts "
            f"from ({start.hash})"
        )
    like = dataclasses.replace(abstract_state(source.config, mesh), optimizer=None)
    with _open(source) as checkpoints:
        weights = checkpoints.restore_step(start.step, like)

    def make(weights: TrainState, seed: jax.Array) -> TrainState:
        model, thresholds = weights.model, weights.thresholds
        if source.config.model != config.model:
            rngs = nnx.Rngs(jax.random.key(seed))
            model = upcycling.upcycle(model, config.model, start.sparse, rngs=rngs)
            thresholds = model.thresholds()
        optimizer = make_optimizer(config.train.optimizer, config.train.steps).init(model)
        return TrainState(model, optimizer, thresholds, jnp.zeros((), jnp.int32))

    placed = None if mesh is None else shardings(config, mesh)
    return jit(make, out_shardings=placed)(weights, np.uint32(config.train.seed))


def carry(config: RunConfig, directory: pathlib.Path) -> None:
    """Takes along what belongs to imported weights, so that the run needs its start no more.

    Args:
      config: a run with a start.
      directory: its run directory.
    """
    assert config.start is not None
    source = pathlib.Path(config.start.directory) / records.SOURCE
    for path in source.rglob("*") if source.is_dir() else ():
        if path.is_file():
            place = directory / records.SOURCE / path.relative_to(source)
            storage.write_atomically(place, path.read_bytes())


def _open(source: RunRecord) -> Checkpoints:
    """The checkpoints of a run that somebody may be training."""
    return Checkpoints(source.directory, source.config, read_only=True)


def _tokenizer(source: RunRecord) -> str:
    """The name of a run's tokenizer; one of an earlier version has it in its data."""
    return vocabulary.kept_name(source.directory) or sources.load(source.config.data).tokenizer
