"""Trains or resumes one run: batches, steps, evaluations, checkpoints, records."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh
from tensorboardX import SummaryWriter

from xmod_jax import accounting, records, sharding, storage
from xmod_jax.config import RunConfig
from xmod_jax.data import pipeline, sources, vocabulary
from xmod_jax.errors import UserError
from xmod_jax.nn.attention import is_fused
from xmod_jax.training import start
from xmod_jax.training.checkpoint import NEWEST, Checkpoints, Keep
from xmod_jax.training.compilation import jit
from xmod_jax.training.evaluation import Evaluator, make_evaluator
from xmod_jax.training.preemption import Interrupted, Preempted, Watch
from xmod_jax.training.step import (
    Metrics,
    TrainState,
    abstract_state,
    flat,
    initial_state,
    make_step,
    program,
)

_SMOOTHING = 0.9  # of the measured throughput, per step


class RunFailed(Exception):
    """Training cannot go on; the run directory holds FAILED with the reason."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
      step: steps taken.
      steps: steps of the whole run.
      tokens: tokens seen.
      loss: training loss of the step, nats per token.
      tokens_per_s: smoothed throughput; 0 until it is known.
      eta_s: seconds until the last step, evaluations aside; infinite until known.
    """

    step: int
    steps: int
    tokens: int
    loss: float
    tokens_per_s: float
    eta_s: float


@functools.lru_cache(maxsize=1)
def _programs(config: RunConfig, mesh: Mesh | None) -> tuple[Any, Evaluator]:
    """The compiled step and evaluation of `program(config)`.

    Those of the last run stay: a sweep that trains its seeds one after another compiles once.
    """
    structure = jax.tree.structure(abstract_state(config))
    # On CPU a donated buffer could be one that a background save still reads.
    donated = () if jax.default_backend() == "cpu" else (0,)
    step = jit(flat(make_step(config, mesh), structure), donate_argnums=donated)
    return step, make_evaluator(mesh)


class _Waiting(NamedTuple):
    """A step whose metrics are still to be read."""

    step: int
    metrics: Metrics


def train(
    config: RunConfig,
    directory: pathlib.Path,
    progress: Callable[[Progress], None],
    shape: sharding.MeshShape | None = None,
    watch: Watch | None = None,
    keep: Keep = NEWEST,
) -> dict[str, Any]:
    """Runs or resumes `config` in `directory` until it is DONE.

    With several processes each calls this; process 0 alone writes records.

    Args:
      config: the run.
      directory: the run directory; the caller (of process 0) holds its claim.
      progress: called after every step.
      shape: the mesh to train on, whatever mesh the run was on before; None: one device.
      watch: who is asked whether to leave; None: nobody.
      keep: which checkpoints stay.

    Returns:
      The last evaluation record; an empty one in processes other than 0.

    Raises:
      RunFailed: a loss that is not finite; FAILED is written.
      Preempted: asked to leave; saved.
      UserError: data, disk, a mesh that does not fit, or a checkpoint of something else.
    """
    watch = watch or Watch()
    shape = shape or sharding.MeshShape()
    shape.check(config)
    # Several processes on a mesh of one device would each train the whole run: `make` refuses.
    mesh = shape.make() if shape.size > 1 or watch.processes.count > 1 else None
    dataset = sources.load(config.data)
    if dataset.vocab_size > config.model.backbone.vocab_size:
        raise UserError(
            f"{dataset.name} has {dataset.vocab_size} token ids, the model only "
            f"{config.model.backbone.vocab_size}: prepare it with --tokenizer=bytes for models of "
            "mini scale"
        )
    rows = config.train.batch_size
    part = (0, 1) if mesh is None else sharding.rows_of_process(mesh, rows)
    batches = pipeline.train_iterator(
        dataset, config.train.context_length, rows, config.train.seed, *part
    )
    # Else a first evaluation, after hours, would be the first to miss them.
    pipeline.eval_batches(dataset, config.train.context_length, 1, config.train.eval_sequences)
    if dataset.vocab_size < config.model.backbone.vocab_size and watch.processes.leads:
        logging.warning(
            "%s has %d token ids (%s), the model %d: the others are never seen",
            dataset.name,
            dataset.vocab_size,
            dataset.tokenizer,
            config.model.backbone.vocab_size,
        )
    # Only now: a mistake about the data leaves no run behind for a mended configuration to meet.
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, hash=dataset.hash))

    def prepare() -> None:
        records.prepare(directory, config)
        vocabulary.keep(directory, dataset.tokenizer, dataset.vocabulary)

    watch.processes.from_leader(prepare)
    with Checkpoints(directory, config, watch.processes, keep) as checkpoints:
        saves = (config.execution.checkpoint_every, keep.every)
        run = _Run(config, directory, dataset, batches, checkpoints, saves, progress, mesh, watch)
        return run.go()


class _Run:
    """State of a run's loop; everything on the host."""

    def __init__(
        self,
        config: RunConfig,
        directory: pathlib.Path,
        dataset: sources.Dataset | sources.Mixture,
        batches: grain.DatasetIterator[np.ndarray],
        checkpoints: Checkpoints,
        saves: tuple[int, ...],
        progress: Callable[[Progress], None],
        mesh: Mesh | None,
        watch: Watch,
    ) -> None:
        self.config, self.train, self.directory = config, config.train, directory
        self.checkpoints, self.progress, self.dataset = checkpoints, progress, dataset
        self.every = config.execution.eval_every
        self.saves = saves  # it does at the multiples of each of these steps
        self.mesh, self.watch, self.leads = mesh, watch, watch.processes.leads
        self.batches = batches
        self.position = batches.get_state()  # of the data, after the last step taken
        length = self.train.context_length
        self.flops = accounting.flops_per_token(config.model, length)
        self.hardware_flops = accounting.run_hardware_flops_per_token(
            config, saved_attention=not is_fused(config.model.compute.value)
        )
        self.step, self.evaluate = _programs(program(config), mesh)
        # What steps before a resumption took beyond that: they may have been executed otherwise.
        self.hardware_flops_before = 0.0
        self.tokens_per_s = 0.0
        self.clock: float | None = None  # of the last recorded step; None after other work
        self.waiting: _Waiting | None = None

    def go(self) -> dict[str, Any]:
        """Takes the steps that are left, then marks the run done."""
        state, self.taken = self._start()
        # Between evaluations and saves the state is a list of arrays (`flat`).
        self.leaves, self.structure = jax.tree.flatten(state)
        self.saved = self.taken  # step of the last checkpoint, if any
        with self._tensorboard(self.taken) as self.board:
            try:
                self._go_on()
            except Interrupted:
                self._leave()
        self._sync_records()
        self.checkpoints.wait()
        if not self.leads:
            return {}
        final = records.read_lines(self.directory / records.EVAL)[-1]
        records.mark_done(self.directory, final)
        return final

    def _go_on(self) -> None:
        # A death between the last checkpoint and its records, or a signal: made again. A run that
        # starts from another's weights shows what they are worth before its first step.
        started = self.config.start is not None
        evaluates = self._due(self.taken, self.every) if self.taken else started
        if evaluates and self._lacks_evaluation():
            self._record_evaluation(self.taken, self.state)
        while self.taken < self.train.steps:
            self._take_step()
            step = self.taken
            evaluates = self._due(step, self.every)
            saves = any(self._due(step, every) for every in self.saves)
            if evaluates or saves:
                self._record_waiting()
            if evaluates:
                self._record_evaluation(step, self.state)
            if saves:
                self._save()

    def _take_step(self) -> None:
        """One step; `Interrupted` once any process was asked to leave, with the step taken."""
        self.checkpoints.check()
        batch = self.watch.wait_for(lambda: next(self.batches))
        if self.mesh is not None:
            batch = sharding.global_batch(batch, self.train.batch_size, self.mesh)
        vote = self.watch.processes.vote(self.watch.arrived)
        self.leaves, metrics = self.step(self.leaves, batch)
        self.taken, self.position = self.taken + 1, self.batches.get_state()
        before, self.waiting = self.waiting, _Waiting(self.taken, metrics)
        # Only now read the step before: the device already has work.
        if before:
            self._record_step(*before)
        if vote:
            raise Interrupted

    @property
    def state(self) -> TrainState:
        """Parameters, optimiser and thresholds after the last step taken."""
        return jax.tree.unflatten(self.structure, self.leaves)

    def _record_waiting(self) -> None:
        if self.waiting:
            self._record_step(*self.waiting)
            self.waiting = None

    def _save(self) -> None:
        self._sync_records()
        self.checkpoints.save(self.state, self.position)
        self.saved = self.taken

    def _leave(self) -> None:
        """Saves what there is, for whoever resumes the run."""
        self._record_waiting()
        if self.saved != self.taken:
            self._save()
        self.checkpoints.wait()
        raise Preempted(
            f"{self.directory.name}: asked to leave at step {self.taken} of {self.train.steps}; "
            "saved, the same command resumes it"
        )

    def _start(self) -> tuple[TrainState, int]:
        """Fresh or restored state and its step; records later than it are dropped."""
        if self.checkpoints.latest is None and self.config.start is not None:
            state = start.started_state(self.config, self.mesh)
            if self.leads:
                start.carry(self.config, self.directory)
            # From now on the run needs nothing of the other.
            self.checkpoints.save(state, self.position)
        elif self.checkpoints.latest is None:
            state = initial_state(self.config, self.mesh)
        else:
            like = abstract_state(self.config, self.mesh)
            state, self.position = self.checkpoints.restore(like)
            self.batches.set_state(self.position)
        step = int(state.step)
        if not self.leads:
            return state, step
        for name in (records.TRAIN, records.EVAL):
            records.truncate_after(self.directory / name, step)
        if lines := records.read_lines(self.directory / records.TRAIN):
            spent = lines[-1].get("hardware_flops") or 0.0
            self.hardware_flops_before = spent - lines[-1]["tokens"] * self.hardware_flops
        if (last := self._last_step(records.TRAIN) or 0) < step:
            logging.warning(
                "%s ends at step %d, the checkpoint is of step %d: the curve keeps a gap",
                self.directory / records.TRAIN,
                last,
                step,
            )
        return state, step

    def _lacks_evaluation(self) -> bool:
        lacks = lambda: int(self._last_step(records.EVAL) != self.taken)
        return bool(self.watch.processes.from_leader(lacks))

    def _last_step(self, name: str) -> int | None:
        lines = records.read_lines(self.directory / name)
        return lines[-1]["step"] if lines else None

    def _sync_records(self) -> None:
        """A checkpoint must never outlive the records before it."""
        for name in (records.TRAIN, records.EVAL):
            storage.sync(self.directory / name)

    def _due(self, step: int, every: int) -> bool:
        return step == self.train.steps or (every > 0 and step % every == 0)

    def _record_step(self, step: int, metrics: Metrics) -> None:
        """Reads a step's metrics, checks and records them, and reports progress."""
        values = {name: float(value) for name, value in jax.device_get(metrics)._asdict().items()}
        self._check_finite(step, {"loss": values["loss"], "gradient norm": values["grad_norm"]})
        now = time.perf_counter()
        if self.clock is not None:
            rate = self.train.tokens_per_step / max(now - self.clock, 1e-9)
            known = self.tokens_per_s > 0
            keep = _SMOOTHING if known else 0.0
            self.tokens_per_s = keep * self.tokens_per_s + (1 - keep) * rate
        self.clock = now
        self._write(records.TRAIN, step, values | {"tokens_per_s": self.tokens_per_s})
        left = (self.train.steps - step) * self.train.tokens_per_step
        eta_s = left / self.tokens_per_s if self.tokens_per_s else math.inf
        tokens = step * self.train.tokens_per_step
        self.progress(
            Progress(step, self.train.steps, tokens, values["loss"], self.tokens_per_s, eta_s)
        )

    def _record_evaluation(self, step: int, state: TrainState) -> None:
        train = self.train
        batches = pipeline.eval_batches(
            self.dataset, train.context_length, self.config.micro_batch, train.eval_sequences
        )
        values = self.evaluate(state.model, state.thresholds, self.watch.until_asked(batches))
        self._check_finite(step, {n: v for n, v in values.items() if n.startswith("loss")})
        self._write(records.EVAL, step, values | {"scale": self.config.scale})
        self.clock = None

    def _write(self, name: str, step: int, values: dict[str, Any]) -> None:
        if not self.leads:
            return
        tokens = step * self.train.tokens_per_step
        place = {
            "step": step,
            "tokens": tokens,
            "flops": tokens * self.flops,
            "hardware_flops": tokens * self.hardware_flops + self.hardware_flops_before,
        }
        storage.append(self.directory / name, place | values)
        kind = pathlib.Path(name).stem
        for key, value in values.items():
            if isinstance(value, float):
                self.board.add_scalar(f"{kind}/{key}", value, step)

    def _check_finite(self, step: int, values: dict[str, Any]) -> None:
        """Stops a run whose numbers are lost; its checkpoints are all from before."""
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        if not wrong:
            return
        self.checkpoints.wait()
        last = self.checkpoints.latest
        kept = (
            f"the last checkpoint is step {last}" if last is not None else "there is no checkpoint"
        )
        reason = f"{wrong[0]} is not finite at step {step}; {kept}"
        if self.leads:
            records.mark_failed(self.directory, reason, step=step, checkpoint=last)
        raise RunFailed(reason)

    def _tensorboard(self, step: int) -> contextlib.AbstractContextManager[Any]:
        if not self.leads:
            return contextlib.nullcontext()
        # Purging hides what an interrupted run wrote after the checkpoint that this one starts at.
        folder = str(self.directory / "tensorboard")
        return contextlib.closing(SummaryWriter(folder, purge_step=step + 1 if step else None))
