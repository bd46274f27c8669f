"""Scores the newest checkpoint of a run on tasks of lm-evaluation-harness (the extra eval).

    python -m experiments.evaluate --checkpoint=RUN_DIR --tasks=hellaswag,arc_easy,piqa
    python -m experiments.evaluate --checkpoint=RUN_DIR --tasks=mine --include_path=DIR --output=DIR

Routing is by threshold, which is causal. Tasks are the harness's own, which fetch their data, and
those of --include_path: YAML files, whose data may be local JSON files (dataset_path: json and
dataset_kwargs: data_files). The table is printed; --output keeps results, and with --log_samples
every answer, as the harness writes them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from absl import flags

from experiments import cli, progress, trained
from xmod_jax.data.tokenizer import BYTES
from xmod_jax.errors import UserError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory")
_TASKS = flags.DEFINE_list("tasks", None, "names of tasks, with * and ? for several")
_INCLUDE = flags.DEFINE_list("include_path", None, "folders with more tasks")
_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "examples before each question (default: the task's)", lower_bound=0
)
_LIMIT = flags.DEFINE_integer("limit", None, "only the first questions of a task", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 8, "texts that run together at most", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "max_length", None, "tokens of a window (default: the context of training)", lower_bound=2
)
_THRESHOLD = flags.DEFINE_enum(
    "threshold", "calibrated", ["calibrated", "paper"], "of the routers; paper: r >= 0.5"
)
_VOCABULARY = flags.DEFINE_string(
    "vocabulary", None, "folder of GPT-2's vocabulary files (default: those that the run keeps)"
)
_OUTPUT = flags.DEFINE_string("output", None, "folder for the results")
_SAMPLES = flags.DEFINE_bool("log_samples", False, "keep every answer as well; needs --output")


def main() -> None:
    """Evaluates and prints."""
    if not _CHECKPOINT.value:
        raise UserError("--checkpoint is missing: give a run directory")
    if not _TASKS.value:
        raise UserError("--tasks is missing: give names of tasks, for instance hellaswag,piqa")
    if _SAMPLES.value and not _OUTPUT.value:
        raise UserError("--log_samples needs --output=DIR")
    run = trained.find(_CHECKPOINT.value)
    tokenizer = trained.tokenizer(run, _VOCABULARY.value)
    for path in _INCLUDE.value or ():
        if not pathlib.Path(path).is_dir():
            raise UserError(f"--include_path={path}: no such folder")
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError("evaluation needs the package lm_eval: install the extra eval") from error
    if _OUTPUT.value:
        if pathlib.Path(_OUTPUT.value).suffix == ".json":  # the harness would take it for a file
            raise UserError(f"--output={_OUTPUT.value}: name a folder, without .json at its end")
        cli.output_folder(_OUTPUT.value)  # the harness would only log a failure, after the work
    doubts = []
    if _VOCABULARY.value and tokenizer.name == BYTES:
        doubts.append(f"--vocabulary is not used: the tokenizer of the run is {BYTES}")
    most = run.config.train.context_length
    if _LENGTH.value and _LENGTH.value > most:
        doubts.append(
            f"--max_length={_LENGTH.value} is more than the {most} tokens that the model was "
            "trained with, beyond which it is not reliable"
        )
    progress.warn(doubts)
    results, tracker, outcomes = _evaluate()
    _report(results, tracker)
    progress.warn([*doubts, *outcomes])


def _evaluate() -> tuple[dict[str, Any], Any, list[str]]:
    """The harness's results, what writes them, and what a reader should know of them."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    from experiments import harness, harness_tasks

    names = _TASKS.value or ()
    manager, tasks = harness_tasks.load(names, _INCLUDE.value or (), _FEWSHOT.value)
    tracker = EvaluationTracker(output_path=_OUTPUT.value)
    settings: dict[str, Any] = {
        "pretrained": _CHECKPOINT.value,
        "max_length": _LENGTH.value,
        "threshold": _THRESHOLD.value,
        "vocabulary": _VOCABULARY.value,
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    model = harness.XmodLM(batch_size=_BATCH.value, **settings)
    model.tasks = harness_tasks.single(tasks)
    with harness_tasks.blaming(names):
        results = simple_evaluate(
            model=model,
            model_args=settings,
            tasks=tasks,
            num_fewshot=_FEWSHOT.value,
            batch_size=_BATCH.value,
            limit=_LIMIT.value,
            task_manager=manager,
            evaluation_tracker=tracker,
            log_samples=_SAMPLES.value,
        )
    assert results is not None
    # The harness knows the class only of a model that is made already.
    results["config"]["model"] = tracker.general_config_tracker.model_source = harness.NAME
    return results, tracker, model.outcomes.lines()


def _report(results: dict[str, Any], tracker: Any) -> None:
    """Prints the table; writes the files where a folder is given.

    Raises:
      UserError: a file is not there or not whole, of which the harness says nothing.
    """
    from lm_eval.utils import make_table

    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    sys.stdout.flush()
    if not _OUTPUT.value:
        return
    samples = results.pop("samples", None) or {}
    lengths = {name: len(samples[name]) for name in samples}
    tracker.save_results_aggregated(results=results, samples=samples)
    for task in samples:
        tracker.save_results_samples(task_name=task, samples=samples[task])
    folder = pathlib.Path(_OUTPUT.value, tracker.general_config_tracker.model_name_sanitized)
    _require_whole(folder, getattr(tracker, "date_id", "DATE"), lengths)
    print(f"results in {folder}", file=sys.stderr)


def _require_whole(folder: pathlib.Path, date: str, lengths: dict[str, int]) -> None:
    """Refuses files of results and of so many answers of every task that are not all there."""
    wanted: dict[str, int | None] = {f"results_{date}.json": None}
    wanted |= {f"samples_{task}_{date}.jsonl": count for task, count in lengths.items()}
    for name, lines in wanted.items():
        try:
            text = (folder / name).read_text("utf-8")
            whole = bool(json.loads(text)) if lines is None else text.count("\n") == lines
        except (OSError, ValueError):
            whole = False
        if not whole:
            raise UserError(
                f"{folder / name}: could not be written whole: free some space or choose another "
                "folder; the table holds the results"
            )


if __name__ == "__main__":
    cli.run(main)
