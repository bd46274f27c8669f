"""Tasks of lm-evaluation-harness: found by name, loaded, and their faults told in one line."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from xmod_jax.errors import UserError

_ADAPTER = "experiments.harness"  # where the harness calls the model
_PACKAGE = "xmod_jax"


def load(names: Sequence[str], folders: Sequence[str], shots: int | None) -> tuple[Any, list[Any]]:
    """The tasks and groups that names mean, with their data.

    Args:
      names: with * and ? for several.
      folders: with YAML files of more tasks than the harness's own.
      shots: examples before each question; None: as the tasks have it.

    Returns:
      The harness's manager of tasks, and what `simple_evaluate` takes as tasks.

    Raises:
      UserError: no such task, or one whose settings or data are at fault.
    """
    from lm_eval.tasks import TaskManager

    with _skipped_files() as skipped:
        manager = TaskManager(include_path=list(folders) or None)
    found: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            own = [line for line in skipped if any(folder in line for folder in folders)]
            raise UserError(
                f"--tasks: no task is called {name}; `lm_eval ls tasks` lists the harness's own, "
                "--include_path adds others" + "".join(f"; could not read {line}" for line in own)
            )
        found += [match for match in matching if match not in found]
    with blaming(names):
        loaded = manager.load(found)
        for name, task in loaded["tasks"].items():
            _require_examples(name, task, shots)
    groups = loaded.get("groups", {}).values()
    inner = {task.task_name for group in groups for task in group.get_all_tasks()}
    inner |= {part.name for group in groups for part in group.get_all_groups()}
    alone = [task for name, task in loaded["tasks"].items() if name not in inner]
    return manager, [*(group for group in groups if group.name not in inner), *alone]


def single(loaded: Sequence[Any]) -> list[Any]:
    """The tasks of what `load` gives, those of groups too."""
    return [
        task
        for entry in loaded
        for task in (entry.get_all_tasks() if hasattr(entry, "get_all_tasks") else [entry])
    ]


def _require_examples(name: str, task: Any, shots: int | None) -> None:
    """Refuses as many examples as a task has: one of them may be the question itself."""
    if not shots or task.get_config("num_fewshot") == 0:
        return  # a task's own 0 stays
    rows = len(list(task.fewshot_docs()))
    if rows <= shots:
        raise UserError(
            f"--num_fewshot={shots}: {name} has {rows} examples, and needs one more than it shows"
        )


@contextlib.contextmanager
def blaming(names: Sequence[str]) -> Iterator[None]:
    """Tells in one line what went wrong in a task or its data, both of which are the user's.

    The harness and the library that fetches data raise exceptions of many kinds for them. What
    passed through this project keeps its traceback.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        modules = [str(frame.f_globals.get("__name__")) for frame in frames]
        if any(name == _ADAPTER or name.split(".")[0] == _PACKAGE for name in modules):
            raise
        fetching = isinstance(error, ConnectionError | FileNotFoundError)
        what = "data cannot be had" if fetching else f"cannot be run: {type(error).__name__}"
        raise UserError(f"--tasks={','.join(names)}: {what}: {error}") from error


@contextlib.contextmanager
def _skipped_files() -> Iterator[list[str]]:
    """What the harness says, below its usual level, of files that it could not read."""
    logger, handler = logging.getLogger("lm_eval.tasks._index"), _Skipped()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Skipped(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Skip "):
            self.lines.append(text.removeprefix("Skip "))
