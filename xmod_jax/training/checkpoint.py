"""Checkpoints of a run by Orbax: training state, data position, and what they belong to."""

from __future__ import annotations

import dataclasses
import errno
import pathlib
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from xmod_jax import records
from xmod_jax.config import RunConfig, to_dict
from xmod_jax.errors import UserError
from xmod_jax.identity import config_hash, first_difference
from xmod_jax.processes import ALONE, LeavingTogether, Processes
from xmod_jax.training.step import TrainState


def named_leaves(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by path; the form in which checkpoints hold them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}


_POLL_S = 0.02  # between looks at a save that other processes take part in


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when newer ones are there.

    Attributes:
      newest: how many of the newest; None: as many as the run's configuration says.
      every: steps between those that stay for good; 0 for none.
    """

    newest: int | None = None
    every: int = 0


NEWEST = Keep()


# What the system says when a file cannot be had now, but is not damaged.
_PASSING = (
    errno.EACCES,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EHOSTDOWN,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENETUNREACH,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOTCONN,
    errno.EPERM,
    errno.EREMOTEIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
)
# TensorStore's words for such failures; it puts the number of the system's into its text.
_PASSING_TEXT = re.compile(r"UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|RESOURCE_EXHAUSTED")
_NUMBER_TEXT = re.compile(r"OS error (\d+)")


def passing(error: BaseException | None) -> bool:
    """Whether reading failed for a reason that says nothing about what the file holds."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in _PASSING:
            return True
        numbers = map(int, _NUMBER_TEXT.findall(str(error)))
        if _PASSING_TEXT.search(str(error)) or any(number in _PASSING for number in numbers):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Told:
    """A future of Orbax's that also tells why it failed."""

    def __init__(self, future: Any, tell: Callable[[Exception], None]) -> None:
        self._future, self._tell = future, tell

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout=timeout)
        except Exception as error:
            self._tell(error)
            raise


class _Telling(ocp.AsyncCheckpointHandler):
    """A handler of Orbax's that also tells why a save failed in the background.

    Where several processes save and one of them fails, each waits in another of Orbax's barriers,
    and nobody learns of the error before these give up after 20 minutes.
    """

    def __init__(self, handler: Any, tell: Callable[[Exception], None]) -> None:
        self._handler, self._tell = handler, tell

    def save(self, *args: Any, **kwargs: Any) -> None:
        self._handler.save(*args, **kwargs)

    async def async_save(self, *args: Any, **kwargs: Any) -> list[Any]:
        futures = await self._handler.async_save(*args, **kwargs)
        return [_Told(future, self._tell) for future in futures or []]

    def restore(self, *args: Any, **kwargs: Any) -> Any:
        return self._handler.restore(*args, **kwargs)

    def finalize(self, directory: Any) -> None:
        try:
            self._handler.finalize(directory)
        except Exception as error:
            self._tell(error)
            raise

    def close(self) -> None:
        self._handler.close()


class Checkpoints:
    """The checkpoints of one run directory.

    Saving goes on in the background; a checkpoint that a dying process left half-written is not
    seen by anyone. Use as a context manager: leaving waits for the last save.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        config: RunConfig,
        processes: Processes = ALONE,
        keep: Keep = NEWEST,
        read_only: bool = False,
    ) -> None:
        """Opens the checkpoints below a run directory.

        Args:
          directory: the run directory.
          config: the run; its hash, model and the fingerprint of its data are stored with every
            checkpoint.
          processes: those that save and restore together; each holds its part of the state.
          keep: which checkpoints stay.
          read_only: change nothing there; another worker may be saving.
        """
        self._folder = (directory / records.CHECKPOINTS).absolute()
        self._config = config
        self._processes = processes
        self._read_only = read_only
        if read_only:
            options = ocp.CheckpointManagerOptions(
                save_interval_steps=0, create=False, read_only=True
            )
        else:
            options = ocp.CheckpointManagerOptions(
                max_to_keep=keep.newest or config.execution.keep_checkpoints,
                keep_period=keep.every or None,
                cleanup_tmp_directories=True,
            )
        self._failure: Exception | None = None  # of a save that still goes on in other processes
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=options,
            handler_registry=self._telling() if processes.count > 1 else None,
        )

    def _telling(self) -> ocp.handlers.CheckpointHandlerRegistry:
        def tell(error: Exception) -> None:
            self._failure = error

        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        state = _Telling(ocp.StandardCheckpointHandler(), tell)
        meta = _Telling(ocp.JsonCheckpointHandler(), tell)
        registry.add("state", ocp.args.StandardSave, state)
        registry.add("state", ocp.args.StandardRestore, state)
        registry.add("meta", ocp.args.JsonSave, meta)
        registry.add("meta", ocp.args.JsonRestore, meta)
        return registry

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        together = kind is None or issubclass(kind, LeavingTogether)
        if self._processes.count > 1 and not together:
            return  # the others are not here to finish a save with
        try:
            self.wait()
        finally:
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data_state: dict[str, Any]) -> None:
        """Saves a state and the data iterator's position under the state's step.

        Raises:
          UserError: the disk is full or unwritable; older checkpoints stay.
        """
        meta = {
            "hash": config_hash(self._config),
            "model": to_dict(self._config.model),
            "data": self._config.data.hash,
            "data_state": data_state,
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(named_leaves(state)), meta=ocp.args.JsonSave(meta)
        )
        self.wait()  # the manager's own wait does not end where a process failed
        try:
            self._manager.save(int(state.step), args=items)
        except (OSError, ValueError) as error:
            raise self._disk_error(error) from error

    def check(self) -> None:
        """Raises as `save` does when this process, among others, could not save; never waits."""
        if self._failure is not None:
            raise self._disk_error(self._failure) from self._failure

    def wait(self) -> None:
        """Waits until what was saved is on disk; raises as `save` does."""
        if self._processes.count > 1:
            while self._manager.is_saving_in_progress():
                self.check()
                time.sleep(_POLL_S)
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise self._disk_error(error) from error

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint in the structure of `like`, and the data iterator's position.

        Args:
          like: a state, or its shapes, dtypes and shardings (`abstract_state`): it is read into
            these, whatever mesh wrote it; onto one device where there are none. Without an
            optimiser (None) nothing of the saved one is read.

        Where it is damaged the one before is used, told by a warning; the damaged are then set
        aside, but for a reader. Nothing is moved while none can be read, nor for a failure of the
        disk or the network, which may pass.

        Raises:
          UserError: it belongs to another architecture or other data, naming the difference; it
            holds numbers that are not finite, naming them; the disk does not give it; or no
            checkpoint can be read.
        """
        damaged = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            found, reason = self._try(step, like)
            if self._processes.any(found is None):
                damaged[step] = reason or "another process cannot read it"
                continue
            assert found is not None
            for newer, reason in damaged.items():
                moved = "" if self._read_only else f"moved to {self._set_aside(newer)}, "
                logging.warning(
                    "checkpoint %d cannot be read (%s): %susing %d",
                    newer,
                    reason,
                    moved,
                    step,
                )
            return found
        reason = next(iter(damaged.values()), "there is none")
        raise UserError(
            f"{self._folder}: no checkpoint can be read ({reason}): remove {self._folder.parent} "
            "to train the run from its start"
        )

    def restore_step(self, step: int, like: TrainState) -> TrainState:
        """The checkpoint of one step in the structure of `like`; moves nothing.

        Raises:
          UserError: it is not there, cannot be read, or belongs to something else.
        """
        found, reason = self._try(step, like)
        if found is None:
            raise UserError(f"{self._folder / str(step)}: cannot be read ({reason})")
        return found[0]

    def _try(
        self, step: int, like: TrainState
    ) -> tuple[tuple[TrainState, dict[str, Any]] | None, str]:
        """`_read`, or None and why the checkpoint cannot be read."""
        try:
            return self._read(step, like), ""
        except UserError:
            raise
        except Exception as error:  # whatever a library makes of damaged bytes
            cause = error.__cause__ or error  # Orbax puts the position before what was wrong there
            reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:200]
            if passing(error):
                raise UserError(
                    f"{self._folder / str(step)}: cannot be read at present ({reason}): nothing "
                    "was changed; start again once the disk answers"
                ) from error
            return None, reason

    def _read(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = {
            # Without a sharding Orbax insists on the devices that wrote the checkpoint.
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or here)
            for name, leaf in named_leaves(like).items()
        }
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        self._check(meta["meta"], step)
        wanted = ocp.args.StandardRestore(abstract)
        if like.optimizer is None:
            # A manager that has restored like this cannot save, but whoever saves has an optimiser.
            wanted = ocp.args.PyTreeRestore(
                abstract,
                restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                partial_restore=True,
            )
        items = ocp.args.Composite(state=wanted)
        leaves = self._manager.restore(step, args=items)["state"]
        structure = jax.tree.structure(like)
        state = jax.tree.unflatten(structure, [leaves[name] for name in named_leaves(like)])
        self._check_finite(state, step)
        return state, meta["meta"]["data_state"]

    def _set_aside(self, step: int) -> pathlib.Path:
        """Moves a checkpoint out of the way; nothing is deleted that somebody could still mend."""
        aside = self._folder.with_name(f"{records.CHECKPOINTS}_damaged") / str(step)
        number = 0
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{step}.{number}")
        self._processes.from_leader(lambda: self._move(step, aside))
        self._manager.reload()
        return aside

    def _move(self, step: int, aside: pathlib.Path) -> int:
        aside.parent.mkdir(exist_ok=True)
        (self._folder / str(step)).rename(aside)
        return 0

    def _check(self, meta: dict[str, Any], step: int | None) -> None:
        where = f"{self._folder / str(step)}"
        differs = first_difference(meta["model"], to_dict(self._config.model), "model")
        if differs:
            raise UserError(f"{where} is a checkpoint of another architecture: {differs}")
        known = self._config.data.hash
        if known and meta["data"] not in ("", known):
            raise UserError(
                f"{where} was trained on other data ({meta['data']}, here {known}): resume with "
                "the same data and Python version, or start in another folder"
            )

    def _check_finite(self, state: TrainState, step: int) -> None:
        """Refuses a state that is not finite: a router of NaNs, say, would route nothing."""
        # A local array is looked at where it lies; what other processes hold too, by a program.
        alone = jax.default_backend() == "cpu" and self._processes.count == 1
        isfinite = (lambda leaf: np.isfinite(np.asarray(leaf))) if alone else jnp.isfinite
        read = named_leaves(state.model)
        read |= {f"thresholds{n}": leaf for n, leaf in named_leaves(state.thresholds).items()}
        read |= {f"optimizer{n}": leaf for n, leaf in named_leaves(state.optimizer).items()}
        wrong = [name for name, leaf in read.items() if not isfinite(leaf).all()]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            what = "the state" if wrong[0].startswith("optimizer") else "the parameter"
            raise UserError(
                f"{self._folder / str(step)}: {what} {wrong[0]}{more} holds numbers that "
                "are not finite: remove that checkpoint, and the one before is used"
            )

    def _disk_error(self, error: Exception) -> Exception:
        text = str(error)
        if "No space left" in text or "RESOURCE_EXHAUSTED" in text or "Disk quota" in text:
            return UserError(
                f"{self._folder}: no space left for a checkpoint: free some, then start again; "
                "the run resumes from its last whole one"
            )
        return error
