"""Qwen3 and Qwen3-MoE checkpoints of Hugging Face: read into our dense model, and written from it.

Our dense layer is Qwen3's, name for name, but that a linear layer's matrix stands transposed.
Qwen3-MoE maps onto our experts where every layer has experts: its routers weigh by a softmax, which
`Scores` has beside our own sigmoid; shared experts and selection biases it does not have.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from xmod_jax.config import Compute
from xmod_jax.errors import UserError
from xmod_jax.exchange import matching, names, settings, tensors
from xmod_jax.exchange.names import EMBEDDING, HEAD
from xmod_jax.exchange.settings import CONFIG, EXPERTS
from xmod_jax.model import Decoder
from xmod_jax.nn.moe import MoEBlock

_ADAPTER = "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model and what its folder says beside it.

    Attributes:
      model: the weights, float32.
      context_length: longest context it was made for, in tokens.
      hash: fingerprint of the weights.
      notes: what has no counterpart here, each a sentence for the user.
    """

    model: Decoder
    context_length: int
    hash: str
    notes: tuple[str, ...] = ()


def describe(folder: pathlib.Path, compute: Compute) -> settings.Described:
    """What a folder's config.json says; reads no weights.

    Args:
      folder: a Qwen3 or Qwen3-MoE checkpoint.
      compute: precision of the model's activations.

    Raises:
      UserError: something else than such a folder, or as `settings.describe`.
    """
    if folder.is_file():
        raise UserError(f"{folder}: a file: give the folder of a checkpoint (GGUF is not read)")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: nothing is downloaded, give one that is here")
    if (folder / "snapshots").is_dir():
        raise UserError(f"{folder}: a cache of downloads: give one of the folders in snapshots/")
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"{folder}: an adapter ({_ADAPTER}), not a whole model: merge it into its base model "
            "first (merge_and_unload)"
        )
    if not (folder / CONFIG).exists() and (found := sorted(folder.glob("*.gguf"))):
        raise UserError(f"{found[0]}: GGUF is not read: save the model as safetensors")
    return settings.describe(folder / CONFIG, compute)


def read(folder: pathlib.Path, compute: Compute) -> Checkpoint:
    """The model in a folder of ``config.json`` and safetensors.

    Of a checkpoint whose embedding is its head as well both get a copy. Experts may stand each for
    itself or all in one tensor, and names may have the prefixes that PyTorch's wrappers give them.

    Args:
      folder: a Qwen3 or Qwen3-MoE checkpoint.
      compute: precision of the model's activations.

    Raises:
      UserError: an architecture, or an option of it, that our model does not have; a file that is
        missing or damaged; a tensor that is missing, not expected or of another shape.
    """
    described = describe(folder, compute)
    tied = described.tied
    stored = names.Stored(tensors.TensorFolder(folder), tied)
    matching.check_sizes(folder, stored, described.model)
    shapes = jax.eval_shape(
        lambda key: Decoder(described.model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    matching.check_tensors(folder, stored, shapes, tied)
    digest = hashlib.blake2b(digest_size=8)

    def leaf(path: Any, like: Any) -> np.ndarray:
        filled = np.zeros(like.shape, np.float32)
        if place := names.theirs(path, like.shape, tied):
            for index, name in np.ndenumerate(place.names):
                place.view(filled[index])[...] = stored.read(name)
        digest.update(filled.data)
        return filled

    model = jax.tree_util.tree_map_with_path(leaf, shapes)
    if (
        tied
        and HEAD in stored.names
        and not np.array_equal(stored.read(HEAD), model.embedding[...])
    ):
        raise UserError(f"{folder}: tie_word_embeddings, but {HEAD} is not {EMBEDDING}")
    return Checkpoint(
        jax.device_put(model), described.context_length, digest.hexdigest(), described.notes
    )


@dataclasses.dataclass(frozen=True)
class Beside:
    """What is written beside the weights.

    Attributes:
      config: keys of the config.json that the model does not determine, its special ids among them.
      files: other files by name, the tokenizer's for instance.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


def write(
    model: Decoder,
    folder: pathlib.Path,
    context_length: int,
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    beside: Beside = Beside(),
) -> None:
    """Writes a checkpoint folder that `transformers` loads, whole or not at all.

    A head that equals the embedding is written once, as tied.

    Args:
      model: a dense model, or one of experts as Qwen3-MoE has them.
      folder: where; must not be there, or be empty.
      context_length: longest context it is meant for, in tokens.
      dtype: of the file: ``"float32"`` or ``"bfloat16"``.
      shard_bytes: most bytes of one file.
      beside: what else is written.

    Raises:
      UserError: an architecture that Qwen3 does not have, weights that are not finite, a folder
        that is taken or a disk that is full.
      OSError: the disk, otherwise.
    """
    settings.check_writable(model.config)
    _refuse_learnt_bias(model)
    embedding, head = np.asarray(model.embedding[...]), np.asarray(model.head[...])
    tied = np.array_equal(embedding, head.T)
    named: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if place := names.theirs(path, leaf.shape, tied):
            array = np.asarray(leaf)
            named |= {name: place.view(array[i]) for i, name in np.ndenumerate(place.names)}
    ordered = sorted(named.items(), key=lambda entry: names.order(entry[0]))
    config = settings.config(model.config, context_length, tied, dtype, beside.config)
    files = {**beside.files, CONFIG: tensors.encode(config)}
    tensors.write(folder, ordered, files, tensors.DTYPES[dtype], shard_bytes)


def _refuse_learnt_bias(model: Decoder) -> None:
    if isinstance(model.prefix, MoEBlock) and np.any(np.asarray(model.prefix.ffn.bias[...])):
        raise UserError(f"{EXPERTS} has no selection bias of experts, this model has learnt one")
