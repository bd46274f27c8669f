"""A stand-in for training: same files and marks, no model."""

import dataclasses
import math

from experiments.runner import Trainer
from xmod_jax import accounting, records, storage


@dataclasses.dataclass
class FakeProgress:
    step: int
    steps: int
    tokens: int
    loss: float
    tokens_per_s: float = 1e5
    eta_s: float = 1.0


class FakeFailure(Exception):
    pass


def loss_of(config):
    """A loss with its optimum at K = 8."""
    return 2.0 + 0.01 * abs(math.log2(config.model.hierarchy.sparsity) - 3)


def final_record(config):
    train = config.train
    loss = loss_of(config)
    sparse = config.model.hierarchy.sparse_layers > 0
    return {
        "step": train.steps,
        "tokens": train.tokens,
        "flops": accounting.training_flops(config.model, train.context_length, train.tokens),
        "hardware_flops": 1.0,
        "scale": config.scale,
        "loss_topk": loss - 0.02 * sparse,
        "loss_threshold": loss + 0.05 * sparse,
        "loss_calibrated": loss,
        "coverage": 0.9 if sparse else None,
        "jaccard": 0.1 if sparse else None,
    }


def fake_train(config, directory, progress):
    """Three steps, resuming after the last recorded one."""
    records.prepare(directory, config)
    done = len(records.read_lines(directory / records.TRAIN))
    for step in range(done + 1, 4):
        progress(FakeProgress(step, 3, config.train.tokens * step // 3, loss_of(config)))
        storage.append(directory / records.TRAIN, {"step": step, "tokens_per_s": 1e5})
    storage.append(directory / records.EVAL, final_record(config))
    records.mark_done(directory, final_record(config))


def trainer(*, failing=(), seen=None):
    """Trains as `fake_train`; runs named in `failing` fail; names go to `seen` in order."""

    def train(config, directory, progress):
        if seen is not None:
            seen.append(config.name)
        if config.name in failing:
            records.prepare(directory, config)
            records.mark_failed(directory, "loss is not finite at step 2", step=2)
            raise FakeFailure(config.name)
        fake_train(config, directory, progress)

    return Trainer(train, FakeFailure)
