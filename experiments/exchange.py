"""Exchanges models with Hugging Face: Qwen3 and Qwen3-MoE checkpoints, safetensors only.

    python -m experiments.exchange --checkpoint=RUN_DIR --import_hf=FOLDER [--data=...]
    python -m experiments.exchange --checkpoint=RUN_DIR --export_hf=FOLDER [--dtype=bfloat16]

An import makes a run directory that generate, evaluate and train --start_from take. Its texts go
through the tokenizer of --data, whose ids must be those of the checkpoint; a Hugging Face tokenizer
is not read. An export writes config.json, generation_config.json and model.safetensors (above
--max_shard_gb several and their index), which transformers loads, and tokenizer files: of an
imported checkpoint, and of a run that started from it, those that came with it, with its special
ids; else such as give the ids of the run's own tokenizer.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from experiments import cli, trained
from xmod_jax.config import Compute, DataConfig
from xmod_jax.errors import UserError

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "run directory, made by an import")
_IMPORT = flags.DEFINE_string("import_hf", None, "Hugging Face folder to read")
_EXPORT = flags.DEFINE_string("export_hf", None, "Hugging Face folder to make")
_DATA = flags.DEFINE_string(
    "data", "embedded", "of an import: data whose token ids the checkpoint knows, as in train"
)
_COMPUTE = flags.DEFINE_enum_class(
    "compute", Compute.FLOAT32, Compute, "of an import: precision of activations; weights: float32"
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "of an export: precision of the weights"
)
_SHARD = flags.DEFINE_float(
    "max_shard_gb", 5.0, "of an export: most GB of a file", lower_bound=1e-6, upper_bound=1e6
)


def main() -> None:
    """Imports or exports."""
    if not _CHECKPOINT.value:
        raise UserError("--checkpoint is missing: give a run directory")
    directory = pathlib.Path(_CHECKPOINT.value)
    if _IMPORT.value and not _EXPORT.value:
        _import(pathlib.Path(_IMPORT.value), directory)
    elif _EXPORT.value and not _IMPORT.value:
        _export(directory, pathlib.Path(_EXPORT.value))
    else:
        raise UserError("give one of --import_hf=FOLDER and --export_hf=FOLDER")


def _import(folder: pathlib.Path, directory: pathlib.Path) -> None:
    # Only now: a mistake is told without loading what models need.
    from xmod_jax.exchange import imported

    made = imported.make_run(folder, directory, DataConfig(_DATA.value), _COMPUTE.value)
    _note(made.notes)
    print(directory)


def _note(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _export(directory: pathlib.Path, folder: pathlib.Path) -> None:
    run = trained.find(str(directory))
    from xmod_jax.exchange import imported, qwen3, settings, tensors

    # Before the weights are read, which may be many.
    tensors.check_free(folder)
    tensors.library()
    settings.check_writable(run.config.model)
    accompanying = imported.accompanying(run, trained.tokenizer(run))
    state = trained.load(run)
    qwen3.write(
        state.model,
        folder,
        run.config.train.context_length,
        dtype=_DTYPE.value,
        shard_bytes=int(_SHARD.value * 1e9),
        beside=accompanying.beside,
    )
    _note(accompanying.notes)
    print(folder)


if __name__ == "__main__":
    cli.run(main)
