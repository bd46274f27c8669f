"""The diagnostics of a run: measured, kept in its file, and the table that shows them."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from experiments import progress, tables, trained
from xmod_jax import storage
from xmod_jax.config import DataConfig
from xmod_jax.diagnostics import Diagnostics, Intervals, diagnose, independent_subsets
from xmod_jax.errors import UserError
from xmod_jax.records import RunRecord

FILE = "diagnostics.json"
HEADER = (
    "model",
    "layers",
    "intervals",
    "threshold",
    "coverage %",
    "Jaccard %",
    "agreement %",
    "independent: coverage %",
    "Jaccard %",
)
NOTE = (
    "layers: consecutive sparse ones between dense layers; agreement: of top-k with the 0.5 "
    "threshold, in top-k passes; independent: each layer selects 1/K of the tokens at random"
)


def measure(
    run: RunRecord,
    sequences: int | None = None,
    title: str = "diagnosing",
    source: str | None = None,
) -> tuple[Diagnostics, int]:
    """Diagnoses the newest checkpoint of a run; shows its progress on stderr.

    Args:
      run: a run with sparse layers and a checkpoint.
      sequences: held-out sequences; None: as many as the run evaluates.
      title: of the progress bar.
      source: where the run's data lie now; None: where they were.

    Returns:
      The diagnostics, and the step of the checkpoint.

    Raises:
      UserError: no whole checkpoint, or one of something else; data that are not there, or are
        others than the run's.
    """
    # Only now: a mistake is told without loading what training needs.
    from xmod_jax.data import pipeline, sources
    from xmod_jax.training.compilation import jit

    train = run.config.train
    data = run.config.data
    dataset = sources.load(DataConfig(source, data.hash) if source else data)
    state = trained.load(run)
    asked = sequences or train.eval_sequences
    batches = pipeline.eval_batches(dataset, train.context_length, run.config.micro_batch, asked)
    parts = dataset.parts if isinstance(dataset, sources.Mixture) else (dataset,)
    windows = sum((len(part.heldout) - 1) // train.context_length for part in parts)
    count = min(asked, windows)
    with progress.steps(title, "sequences") as tell:
        found = diagnose(
            state.model, state.thresholds, batches, jit, lambda done: tell(done, count)
        )
    if found.sequences < asked:
        progress.warn([f"{title}: the held-out data has {found.sequences} sequences, not {asked}"])
    return found, int(state.step)


def write(run: RunRecord, found: Diagnostics, step: int) -> None:
    """Writes diagnostics.json into the run's directory."""
    place = {"hash": run.hash, "step": step, "context_length": run.config.train.context_length}
    storage.write_json(run.directory / FILE, place | found.record())


def read(directory: pathlib.Path) -> Diagnostics | None:
    """The diagnostics of a run directory; None where it has none.

    Raises:
      UserError: the file cannot be read.
    """
    path = directory / FILE
    if not path.is_file():
        return None
    stored = storage.read_json(path)
    try:
        return Diagnostics.from_record(stored)
    except ValueError as error:
        raise UserError(f"{path}: not diagnostics: {error}; run diagnose again") from error


def table_rows(models: Mapping[str, Diagnostics]) -> list[tuple[str, ...]]:
    """Cells under `HEADER`: a row for each model, threshold and length of interval."""
    return [
        _row(name, found, label, intervals)
        for name, found in models.items()
        for label, passes in (("calibrated", found.calibrated), ("0.5", found.threshold))
        for intervals in passes
    ]


def _row(name: str, found: Diagnostics, label: str, intervals: Intervals) -> tuple[str, ...]:
    reference = independent_subsets(intervals.layers, found.sparsity)
    pairs = intervals.layers > 1
    return (
        name,
        str(intervals.layers),
        str(intervals.count),
        label,
        f"{100 * intervals.coverage:.2f}",
        "-" if intervals.jaccard is None else f"{100 * intervals.jaccard:.2f}",
        f"{100 * found.agreement:.2f}" if label == "0.5" else "-",
        f"{100 * reference.coverage:.2f}",
        f"{100 * reference.jaccard:.2f}" if pairs else "-",
    )


def table(models: Mapping[str, Diagnostics]) -> str:
    """The text table, with its note."""
    return f"{tables.text_table(HEADER, table_rows(models))}\n{NOTE}"
