"""Trains or resumes one run: batches, steps, evaluations, checkpoints, records."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import logging
from tensorboardX import SummaryWriter

from xmod_jax import accounting, records
from xmod_jax.config import RunConfig
from xmod_jax.data import pipeline, sources
from xmod_jax.errors import UserError
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.compilation import jit
from xmod_jax.training.evaluation import make_evaluator
from xmod_jax.training.step import Metrics, TrainState, abstract_state, initial_state, make_step

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


def train(
    config: RunConfig, directory: pathlib.Path, progress: Callable[[Progress], None]
) -> dict[str, Any]:
    """Runs or resumes `config` in `directory` until it is DONE.

    Args:
      config: the run.
      directory: the run directory; the caller holds its claim.
      progress: called after every step.

    Returns:
      The last evaluation record.

    Raises:
      RunFailed: a loss that is not finite; FAILED is written.
      UserError: data, disk, or a checkpoint of something else.
    """
    records.prepare(directory, config)
    dataset = sources.load(config.data)
    if dataset.vocab_size > config.model.backbone.vocab_size:
        raise UserError(
            f"{dataset.name} has {dataset.vocab_size} token ids, the model only "
            f"{config.model.backbone.vocab_size}"
        )
    with Checkpoints(directory, config, dataset.hash) as checkpoints:
        return _Run(config, directory, dataset, checkpoints, progress).go()


class _Run:
    """State of a run's loop; everything on the host."""

    def __init__(
        self,
        config: RunConfig,
        directory: pathlib.Path,
        dataset: sources.Dataset | sources.Mixture,
        checkpoints: Checkpoints,
        progress: Callable[[Progress], None],
    ) -> None:
        self.config, self.train, self.directory = config, config.train, directory
        self.checkpoints, self.progress, self.dataset = checkpoints, progress, dataset
        length = self.train.context_length
        self.batches = pipeline.train_iterator(
            dataset, length, self.train.batch_size, self.train.seed
        )
        self.flops = accounting.flops_per_token(config.model, length)
        self.hardware_flops = accounting.train_hardware_flops_per_token(config.model, length)
        # On CPU a donated buffer could be one that a background save still reads.
        donated = () if jax.default_backend() == "cpu" else (0,)
        self.step = jit(make_step(config), donate_argnums=donated)
        self.evaluate = make_evaluator()
        self.tokens_per_s = 0.0
        self.clock: float | None = None  # of the last recorded step; None after other work

    def go(self) -> dict[str, Any]:
        """Takes the steps that are left, then marks the run done."""
        state = self._start()
        first = int(state.step)
        with contextlib.closing(self._tensorboard(first)) as self.board:
            waiting = None
            for step in range(first + 1, self.train.steps + 1):
                state, metrics = self.step(state, next(self.batches))
                # Only now read the step before: the device already has work.
                if waiting:
                    self._record_step(*waiting)
                waiting = (step, metrics)
                evaluates = self._due(step, self.train.eval_every)
                saves = self._due(step, self.train.checkpoint_every)
                if evaluates or saves:
                    self._record_step(*waiting)
                    waiting = None
                if evaluates:
                    self._record_evaluation(step, state)
                if saves:
                    self._sync_records()
                    self.checkpoints.save(state, self.batches.get_state())
            # A death between the last checkpoint and its records: they are made again.
            if self._last_step(records.EVAL) != self.train.steps:
                self._record_evaluation(self.train.steps, state)
        self._sync_records()
        self.checkpoints.wait()
        final = records.read_lines(self.directory / records.EVAL)[-1]
        records.mark_done(self.directory, final)
        return final

    def _start(self) -> TrainState:
        """Fresh or restored state; records later than it are dropped."""
        if self.checkpoints.latest is None:
            state = initial_state(self.config)
        else:
            state, position = self.checkpoints.restore(abstract_state(self.config))
            self.batches.set_state(position)
        for name in (records.TRAIN, records.EVAL):
            records.truncate_after(self.directory / name, int(state.step))
        if (last := self._last_step(records.TRAIN)) < int(state.step):
            logging.warning(
                "%s ends at step %d, the checkpoint is of step %d: the curve keeps a gap",
                self.directory / records.TRAIN,
                last,
                int(state.step),
            )
        return state

    def _last_step(self, name: str) -> int:
        lines = records.read_lines(self.directory / name)
        return lines[-1]["step"] if lines else 0

    def _sync_records(self) -> None:
        for name in (records.TRAIN, records.EVAL):
            records.sync(self.directory / name)

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
        sequences = train.batch_size // train.accumulation
        batches = pipeline.eval_batches(
            self.dataset, train.context_length, sequences, train.eval_sequences
        )
        values = self.evaluate(state.model, state.thresholds, batches)
        self._check_finite(step, {n: v for n, v in values.items() if n.startswith("loss")})
        self._write(records.EVAL, step, values | {"scale": self.config.scale})
        self.clock = None

    def _write(self, name: str, step: int, values: dict[str, Any]) -> None:
        tokens = step * self.train.tokens_per_step
        place = {
            "step": step,
            "tokens": tokens,
            "flops": tokens * self.flops,
            "hardware_flops": tokens * self.hardware_flops,
        }
        records.append(self.directory / name, place | values)
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
        kept = f"the last checkpoint is step {last}" if last else "there is no checkpoint"
        reason = f"{wrong[0]} is not finite at step {step}; {kept}"
        records.mark_failed(self.directory, reason, step=step, checkpoint=last)
        raise RunFailed(reason)

    def _tensorboard(self, step: int) -> SummaryWriter:
        # Purging hides what an interrupted run wrote after the checkpoint that this one starts at.
        folder = str(self.directory / "tensorboard")
        return SummaryWriter(folder, purge_step=step + 1 if step else None)
