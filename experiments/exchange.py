"""Exchanges models with Hugging Face: Qwen3 and Qwen3-MoE checkpoints, safetensors only.

    python -m experiments.exchange --checkpoint=RUN_DIR --import_hf=FOLDER [--data=...]
    python -m experiments.exchange --checkpoint=RUN_DIR --export_hf=FOLDER [--dtype=bfloat16]

An import makes a run directory that generate, evaluate and train --start_from take. Its texts go
through the tokenizer of --data, whose ids must be those of the checkpoint; a Hugging Face tokenizer
is not read. An export writes config.json, generation_config.json and model.safetensors (above
--max_shard_gb several and their index), which transformers loads.
"""

from __future__ import annotations

import pathlib
import sys

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
    from xmod_jax.data import sources
    from xmod_jax.exchange import imported

    run = imported.make_run(folder, directory, DataConfig(_DATA.value), _COMPUTE.value)
    vocabulary, known = run.model.backbone.vocab_size, sources.load(run.data).vocab_size
    if vocabulary > known:
        print(
            f"note: the checkpoint has {vocabulary} token ids, --data={_DATA.value} {known}: texts "
            "hold those alone",
            file=sys.stderr,
        )
    print(directory)


def _export(directory: pathlib.Path, folder: pathlib.Path) -> None:
    run = trained.find(str(directory))
    from xmod_jax.exchange import qwen3, tensors

    # Before the weights are read, which may be many.
    tensors.check_free(folder)
    tensors.library()
    qwen3.check_writable(run.config.model)
    tokenizer = trained.tokenizer(run)
    state = trained.load(run)
    qwen3.write(
        state.model,
        folder,
        run.config.train.context_length,
        dtype=_DTYPE.value,
        shard_bytes=int(_SHARD.value * 1e9),
        end_of_text=tokenizer.end_of_text,
    )
    print(folder)


if __name__ == "__main__":
    cli.run(main)
