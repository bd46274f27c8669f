"""What a run writes and how it is read back: the run directory (the law reads only this).

A run directory holds

- ``config.json``: ``{"hash", "config", "accounting"}``, everything that defines the run;
- ``train.jsonl``, ``eval.jsonl``: one JSON object a line, append-only, in order of ``step``;
- ``checkpoints/``;
- ``DONE`` or ``FAILED``: JSON with the final evaluation or the reason;
- ``.lock``: held by the worker that trains the run (see `claims.claim`).

A process may die at any instruction: whole files are replaced atomically, and a torn last line of a
JSON-lines file is ignored by readers and removed by the next writer. Records hold finite numbers
only; writing or reading NaN or infinity raises.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from xmod_jax import accounting, storage
from xmod_jax.config import RunConfig, from_dict, to_dict
from xmod_jax.errors import UserError
from xmod_jax.identity import config_hash, difference, first_hash
from xmod_jax.storage import Path

CONFIG = "config.json"
TRAIN = "train.jsonl"
EVAL = "eval.jsonl"
CHECKPOINTS = "checkpoints"
SOURCE = "huggingface"  # what belongs to imported weights: ids, tokenizer files
DONE = "DONE"
FAILED = "FAILED"
SWEEP = "sweep.json"
_LABELS = ("scale",)  # of a record; all else in it are numbers
# What every evaluation holds as numbers, the first two above 0.
_EVALUATED = ("tokens", "flops", "loss_topk", "loss_threshold", "loss_calibrated")
# What readers divide by.
_ACCOUNTED = ("n_act", "total_params", "phi_ratio", "hardware_flops_per_token")
_FORMAT = 2  # of config.json; the first had none, and how a run is executed among what it trains
# What the first format kept in "train".
_EXECUTION = (
    "accumulation",
    "keep_products",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
)

Record = dict[str, Any]


class Status(enum.StrEnum):
    """How far a run is."""

    UNFINISHED = "unfinished"
    DONE = "done"
    FAILED = "failed"


def read_lines(path: Path) -> list[Record]:
    """The records of a JSON-lines file, in order; empty when there is no file.

    Raises:
      UserError: a line that is not a record (an object with an integer ``step``, of numbers, nulls
        and, for labels, text); a torn last line is ignored instead.
    """
    try:
        content = pathlib.Path(path).read_bytes()
    except FileNotFoundError:
        return []
    records = []
    # What follows the last line feed is torn, or empty.
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        try:
            record = storage.parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON: {error}") from error
        if trouble := _not_a_record(record):
            raise UserError(
                f"{path}: line {number} {trouble}: remove the line, or the run directory to train "
                "it again"
            )
        records.append(record)
    return records


def _not_a_record(value: Any) -> str | None:
    """What keeps a JSON value from being a record of a step, or None."""
    if not isinstance(value, dict):
        return "is not a JSON object"
    if not isinstance(value.get("step"), int) or isinstance(value["step"], bool):
        return "has no step"
    for key, entry in value.items():
        if not (_is_number(entry) or entry is None or key in _LABELS):
            return f"has no number as {key}"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _not_an_evaluation(record: Record) -> str | None:
    """What keeps a record from being a final evaluation, or None."""
    for key in _EVALUATED:
        if not _is_number(record.get(key)):
            return f"lacks {key}"
        if key in ("tokens", "flops") and record[key] <= 0:
            return f"has no number above 0 as {key}"
    return None


def truncate_after(path: Path, step: int) -> None:
    """Drops the records of later steps than `step`, and a torn last line; atomically.

    A resumed run calls this with the step of its checkpoint: the steps that it repeats then stand
    in the file once.
    """
    path = pathlib.Path(path)
    if path.exists():
        kept = [record for record in read_lines(path) if record["step"] <= step]
        storage.write_atomically(path, b"".join(storage.encode(record) for record in kept))


def prepare(directory: Path, config: RunConfig) -> None:
    """Makes the run directory of `config`, or checks that it is that already.

    A run that goes on with another `Execution` is recorded with it. A directory of an older format
    is brought to this one.

    Raises:
      UserError: the directory holds a run of another configuration, of which it names the first
        field; or it is no folder of this machine.
    """
    directory = pathlib.Path(storage.local_path(str(directory)))
    directory.mkdir(parents=True, exist_ok=True)
    check_same_run(directory, config)
    path = directory / CONFIG
    if path.exists():
        # Labels stay those of whoever made the directory.
        stored = RunRecord.load(directory).config
        data = config.data if config.data.hash else stored.data
        config = dataclasses.replace(stored, execution=config.execution, data=data)
    keep = config.execution.keep_products
    content = {
        "format": _FORMAT,
        "hash": config_hash(config),
        "config": to_dict(config),
        "accounting": accounting.summary(config.model, config.train.context_length, keep),
    }
    if not path.exists() or storage.read_json(path) != content:
        storage.write_json(path, content)


def check_same_run(directory: Path, config: RunConfig) -> None:
    """Refuses a directory that holds a run of another configuration.

    Labels and the execution may differ; data that nobody has looked at pass for the same.

    Raises:
      UserError: names the first field that differs.
    """
    if not (pathlib.Path(directory) / CONFIG).exists():
        return
    if differs := difference(RunRecord.load(directory).config, config):
        raise UserError(
            f"{directory} holds a run of another configuration ({differs}): choose another work "
            "directory, or the flags and data it was made with"
        )


def mark_done(directory: Path, final: Mapping[str, Any]) -> None:
    """Marks the run finished; `final` is its last evaluation record."""
    storage.write_json(pathlib.Path(directory) / DONE, {"final": dict(final)})


def mark_failed(directory: Path, reason: str, **details: Any) -> None:
    """Marks the run failed: `reason` in one line; `details` as JSON values (step, checkpoint)."""
    storage.write_json(pathlib.Path(directory) / FAILED, {"reason": reason, **details})


def clear_failed(directory: Path) -> None:
    """Removes the mark of a failed run, so that it is tried again."""
    (pathlib.Path(directory) / FAILED).unlink(missing_ok=True)


def status(directory: Path) -> Status:
    """How far the run in `directory` is; unfinished when nothing is there."""
    directory = pathlib.Path(directory)
    if (directory / DONE).exists():
        return Status.DONE
    return Status.FAILED if (directory / FAILED).exists() else Status.UNFINISHED


def failure(directory: Path) -> str:
    """Why the run failed, in one line."""
    return str(storage.read_json(pathlib.Path(directory) / FAILED).get("reason", "unknown reason"))


def _read_config(stored: dict[str, Any], directory: pathlib.Path) -> RunConfig:
    """The configuration in what config.json holds, of this format or the first.

    Raises:
      KeyError, ValueError: what it holds is not that.
    """
    if "format" not in stored:
        return _read_first_format(stored, directory)
    if stored["format"] != _FORMAT:
        raise ValueError(
            f"it is of format {stored['format']!r}, this version reads {_FORMAT}: use the version "
            "that wrote it"
        )
    config = from_dict(RunConfig, stored["config"])
    _check_hash(stored["hash"], config_hash(config))
    return config


def _check_hash(stored: Any, found: str) -> None:
    if stored != found:
        raise ValueError(
            f"its hash {stored!r} is not that of what it says, {found}: it was changed by hand; "
            "undo that, or choose another work directory"
        )


def _read_first_format(stored: dict[str, Any], directory: pathlib.Path) -> RunConfig:
    """What a directory of the first format trains; its data are known from a checkpoint."""
    values = stored["config"]
    if not isinstance(values, dict) or not isinstance(values.get("train"), dict):
        return from_dict(RunConfig, values)  # says what is wrong
    train = dict(values["train"])
    execution = {name: train.pop(name) for name in _EXECUTION if name in train}
    config = from_dict(RunConfig, values | {"train": train, "execution": execution})
    _check_hash(stored["hash"], first_hash(values))
    data = dataclasses.replace(config.data, hash=_data_of_checkpoint(directory))
    return dataclasses.replace(config, data=data)


def _data_of_checkpoint(directory: pathlib.Path) -> str:
    """The fingerprint of the data that the run's checkpoints were trained on, "" without any."""
    for path in sorted((directory / CHECKPOINTS).glob("[0-9]*/meta/metadata")):
        try:
            found = storage.read_json(path).get("data")
        except UserError:
            continue  # damaged: whoever reads the checkpoint will say so
        if isinstance(found, str):
            return found
    return ""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run as its directory tells it; files are read on first use and then kept.

    Attributes:
      directory: the run directory.
      config: what the run trains.
      hash: identity of its computation; equal hashes are the same training.
      accounting: `xmod_jax.accounting.summary` of the model, as written at the start.
    """

    directory: pathlib.Path
    config: RunConfig
    hash: str
    accounting: dict[str, float]

    @classmethod
    def load(cls, directory: Path) -> RunRecord:
        """Reads a run directory.

        Raises:
          UserError: not a run directory, or one whose configuration cannot be read.
        """
        directory = pathlib.Path(directory)
        path = directory / CONFIG
        if not path.is_file():
            raise UserError(f"{directory}: not a run directory: it has no {CONFIG}")
        stored = storage.read_json(path)
        try:
            config, accounted = _read_config(stored, directory), stored["accounting"]
            if not isinstance(accounted, dict) or not all(map(_is_number, accounted.values())):
                raise ValueError("accounting is not an object of numbers")
            if wrong := [name for name in _ACCOUNTED if not _is_positive(accounted.get(name))]:
                raise ValueError(f"accounting has no number above 0 as {wrong[0]}")
            return cls(directory, config, config_hash(config), accounted)
        except KeyError as error:
            raise UserError(f"{path}: no field {error}") from error
        except ValueError as error:
            raise UserError(f"{path}: {error}") from error

    @property
    def status(self) -> Status:
        """How far the run is now."""
        return status(self.directory)

    @functools.cached_property
    def evals(self) -> list[Record]:
        """Every evaluation, in order of steps."""
        return read_lines(self.directory / EVAL)

    @functools.cached_property
    def train(self) -> list[Record]:
        """The training records, in order of steps."""
        return read_lines(self.directory / TRAIN)

    @functools.cached_property
    def final(self) -> Record | None:
        """The last evaluation of a finished run, None for any other.

        Raises:
          UserError: the DONE mark does not hold it.
        """
        if self.status is not Status.DONE:
            return None
        path = self.directory / DONE
        final: Any = storage.read_json(path).get("final")
        if trouble := _not_a_record(final) or _not_an_evaluation(final):
            raise UserError(
                f"{path}: its final evaluation {trouble}: remove {DONE} and start the run again"
            )
        return final


@dataclasses.dataclass(frozen=True)
class DeclaredRun:
    """A run as sweep.json names it: its directory's name and its `identity.config_hash`."""

    name: str
    hash: str


@dataclasses.dataclass(frozen=True)
class SweepRecord:
    """What sweep.json holds: which experiment a work directory belongs to, and its runs."""

    experiment: str
    scale: str
    runs: tuple[DeclaredRun, ...]

    def write(self, workdir: Path) -> None:
        """Writes sweep.json."""
        storage.write_json(pathlib.Path(workdir) / SWEEP, dataclasses.asdict(self))

    @classmethod
    def find(cls, workdir: Path) -> SweepRecord | None:
        """What a work directory's sweep.json holds; None where there is none.

        Raises:
          UserError: it cannot be read.
        """
        path = pathlib.Path(workdir) / SWEEP
        if not path.is_file():
            return None
        stored = storage.read_json(path)
        try:
            return from_dict(cls, stored)
        except ValueError as error:
            raise UserError(
                f"{path}: not a sweep's: {error}; choose another folder, or remove it and start "
                "the sweep again"
            ) from error


def find_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """The runs in run directories and sweep directories, each once, finished or not.

    Args:
      paths: run directories, or sweep directories that hold run directories.

    Raises:
      UserError: names the first path that is neither, or a sweep that holds no run yet.
    """
    found: dict[pathlib.Path, RunRecord] = {}
    for path in map(pathlib.Path, paths):
        if (path / CONFIG).is_file():
            directories = [path]
        elif path.is_dir():
            directories = sorted(config.parent for config in path.glob(f"*/{CONFIG}"))
        else:
            what = "a file, not a folder" if path.exists() else "no such folder"
            raise UserError(f"{path}: {what}: give run or sweep directories")
        if not directories and (path / SWEEP).is_file():
            raise UserError(f"{path}: a sweep that has no run yet: start it first")
        if not directories:
            raise UserError(
                f"{path}: neither a run directory ({CONFIG}) nor a folder of run directories"
            )
        for directory in directories:
            found.setdefault(directory.resolve(), RunRecord.load(directory))
    return list(found.values())
