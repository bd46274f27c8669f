"""Whether the tensors of a folder are those that its config.json describes.

All of it is told from the files' headers, before anything is allocated. Sizes come first and alone:
a config.json may say a thousand million layers, whose names could not even be listed.
"""

from __future__ import annotations

import math
import os
import pathlib
import re
from collections.abc import Iterator, Set
from typing import Any

import jax

from xmod_jax.config import ModelConfig
from xmod_jax.errors import UserError
from xmod_jax.exchange.names import EMBEDDING, HEAD, Stored, theirs
from xmod_jax.exchange.settings import CONFIG

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def check_sizes(folder: pathlib.Path, stored: Stored, model: ModelConfig) -> None:
    """Compares every size of a config.json with the tensors.

    Raises:
      UserError: the first that differs, with the tensor that shows it, or lacks that tensor.
    """
    layers = len({found[1] for name in stored.names if (found := _LAYER.match(name))})
    if layers != model.hierarchy.prefix:
        raise UserError(
            f"{folder / CONFIG}: num_hidden_layers is {model.hierarchy.prefix}, the tensors are "
            f"those of {layers} layers"
        )
    for key, size, name, axis in _sizes(model):
        shape = stored.shape(name)
        if shape is None:
            raise _missing(folder, {name})
        if axis >= len(shape) or shape[axis] != size:
            raise UserError(
                f"{folder / CONFIG}: {key} is {size}, but {stored.where(name)} has the shape "
                f"{shape}"
            )


def _sizes(model: ModelConfig) -> Iterator[tuple[str, int, str, int]]:
    """Key of a config.json, its value, and the tensor and axis that have it."""
    backbone, moe = model.backbone, model.moe
    layer = lambda name: f"model.layers.0.{name}.weight"
    yield "vocab_size", backbone.vocab_size, EMBEDDING, 0
    yield "hidden_size", backbone.d_model, EMBEDDING, 1
    yield "head_dim", backbone.head_dim, layer("self_attn.q_norm"), 0
    for key, heads, name in (
        ("num_attention_heads", backbone.num_heads, layer("self_attn.q_proj")),
        ("num_key_value_heads", backbone.num_kv_heads, layer("self_attn.k_proj")),
    ):
        yield f"{key} * head_dim", heads * backbone.head_dim, name, 0
    if moe is None:
        yield "intermediate_size", backbone.d_ff, layer("mlp.gate_proj"), 0
        return
    yield "num_experts", moe.experts, layer("mlp.gate"), 0
    yield "moe_intermediate_size", moe.d_expert, layer("mlp.experts.0.gate_proj"), 0


def check_tensors(folder: pathlib.Path, stored: Stored, shapes: Any, tied: bool) -> None:
    """Refuses tensors that are missing, have no place in the model, or another shape.

    Args:
      folder: where they are.
      stored: whose sizes `check_sizes` found right.
      shapes: our model, abstract.
      tied: whether the embedding is the head as well.

    Raises:
      UserError: the first of them; or a model that the machine's memory cannot hold.
    """
    wanted = dict(_wanted(shapes, tied))
    lacking, strange = wanted.keys() - stored.names, stored.names - wanted.keys()
    if lacking == {HEAD}:
        raise UserError(
            f"{folder}: {HEAD} is missing: a base model without its head; if the embedding is the "
            f"head, set tie_word_embeddings in {CONFIG}"
        )
    if lacking:
        raise _missing(folder, lacking)
    if strange := strange - ({HEAD} if tied else set()):
        raise UserError(
            f"{folder}: tensor {min(strange)}{_more(strange)} has no place in {CONFIG}'s model"
        )
    for name, shape in wanted.items():
        if stored.shape(name) != shape:
            raise UserError(
                f"{stored.where(name)} has the shape {stored.shape(name)}, {CONFIG} asks for "
                f"{shape}"
            )
    need, have = 4 * sum(math.prod(shape) for shape in wanted.values()), _memory()
    if need > have:
        raise UserError(
            f"{folder}: its weights take {need / 1e9:.0f} GB in float32, this machine has "
            f"{have / 1e9:.0f}: import it on a larger one"
        )


def _wanted(shapes: Any, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, as they are stored."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]:
        if place := theirs(path, leaf.shape, tied):
            shape = leaf.shape[place.names.ndim :]
            for name in place.names.flat:
                yield name, shape[::-1] if place.turned else shape


def _missing(folder: pathlib.Path, names: Set[str]) -> UserError:
    return UserError(f"{folder}: tensor {min(names)}{_more(names)} of {CONFIG}'s model is missing")


def _more(names: Set[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
