"""Qwen3 and Qwen3-MoE checkpoints of Hugging Face: read into our dense model, and written from it.

Our dense layer is Qwen3's, name for name, but that a linear layer's matrix stands transposed.
Qwen3-MoE maps onto our experts where every layer has experts: its routers weigh by a softmax, which
`Scores` has beside our own sigmoid; shared experts and selection biases it does not have.

Shapes: D width, V vocabulary, X experts, N layers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import nnx

from xmod_jax import storage
from xmod_jax.config import Backbone, Compute, ModelConfig, MoE, Scores
from xmod_jax.errors import UserError
from xmod_jax.exchange import tensors
from xmod_jax.hierarchy import Hierarchy
from xmod_jax.model import Decoder
from xmod_jax.nn.moe import MoEBlock

CONFIG = "config.json"
DENSE, EXPERTS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
N = TypeVar("N", int, float)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# What must have this value: our layers have nothing else. Absent is as good.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
    "quantization_config": None,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
# Ours to theirs; {} stands for the layer, and for the expert.
_WHOLE = {"embedding": _EMBEDDING, "head": _HEAD, "final_norm.scale": "model.norm.weight"}
_LAYER = {
    "attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    "attention.query": "model.layers.{}.self_attn.q_proj.weight",
    "attention.key": "model.layers.{}.self_attn.k_proj.weight",
    "attention.value": "model.layers.{}.self_attn.v_proj.weight",
    "attention.output": "model.layers.{}.self_attn.o_proj.weight",
    "attention.query_norm.scale": "model.layers.{}.self_attn.q_norm.weight",
    "attention.key_norm.scale": "model.layers.{}.self_attn.k_norm.weight",
    "ffn_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
}
_FFN = {
    "ffn.gate": "model.layers.{}.mlp.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.down_proj.weight",
}
_MOE = {
    "ffn.router": "model.layers.{}.mlp.gate.weight",
    "ffn.gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "ffn.up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "ffn.down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model and what its folder says beside it.

    Attributes:
      model: the weights, float32.
      context_length: longest context it was made for, in tokens.
      hash: fingerprint of the weights.
    """

    model: Decoder
    context_length: int
    hash: str


class _Described(NamedTuple):
    """What a config.json says."""

    model: ModelConfig
    context_length: int
    tied: bool


def read(folder: pathlib.Path, compute: Compute) -> Checkpoint:
    """The model in a folder of ``config.json`` and safetensors.

    Of a checkpoint whose embedding is its head as well both get a copy.

    Args:
      folder: a Qwen3 or Qwen3-MoE checkpoint.
      compute: precision of the model's activations.

    Raises:
      UserError: an architecture, or an option of it, that our model does not have; a file that is
        missing or damaged; a tensor that is missing, not expected or of another shape.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    described = _describe(folder / CONFIG, compute)
    stored = tensors.TensorFolder(folder)
    shapes = jax.eval_shape(
        lambda key: Decoder(described.model, rngs=nnx.Rngs(key)), jax.random.key(0)
    )
    _check_names(folder, stored.names, shapes, described.tied)
    digest = hashlib.blake2b(digest_size=8)

    def leaf(path: Any, like: Any) -> np.ndarray:
        filled = np.zeros(like.shape, np.float32)
        if place := _theirs(path, like.shape, described.tied):
            for index, name in np.ndenumerate(place.names):
                view = place.view(filled[index])
                view[...] = stored.read(name, view.shape)
        digest.update(filled.data)
        return filled

    model = jax.tree_util.tree_map_with_path(leaf, shapes)
    if described.tied and _HEAD in stored.names:
        head_VD = stored.read(_HEAD, model.head[...].shape[::-1])
        if not np.array_equal(head_VD, model.embedding[...]):
            raise UserError(f"{folder}: tie_word_embeddings, but {_HEAD} is not {_EMBEDDING}")
    return Checkpoint(jax.device_put(model), described.context_length, digest.hexdigest())


def write(
    model: Decoder,
    folder: pathlib.Path,
    context_length: int,
    *,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
    end_of_text: int | None = None,
) -> None:
    """Writes a checkpoint folder that `transformers` loads, whole or not at all.

    A head that equals the embedding is written once, as tied.

    Args:
      model: a dense model, or one of experts as Qwen3-MoE has them.
      folder: where; must not be there, or be empty.
      context_length: longest context it is meant for, in tokens.
      dtype: of the file: ``"float32"`` or ``"bfloat16"``.
      shard_bytes: most bytes of one file.
      end_of_text: id that begins and ends a text; None: not told.

    Raises:
      UserError: an architecture that Qwen3 does not have, or a folder that is taken.
      OSError: the disk.
    """
    check_writable(model.config)
    _refuse_learnt_bias(model)
    embedding, head = np.asarray(model.embedding[...]), np.asarray(model.head[...])
    tied = np.array_equal(embedding, head.T)
    named: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(model)[0]:
        if place := _theirs(path, leaf.shape, tied):
            array = np.asarray(leaf)
            named |= {name: place.view(array[i]) for i, name in np.ndenumerate(place.names)}
    ordered = sorted(named.items(), key=lambda entry: _order(entry[0]))
    special = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    texts = {
        CONFIG: _config(model.config, context_length, tied, dtype) | special,
        "generation_config.json": special,
    }
    tensors.write(folder, ordered, texts, tensors.DTYPES[dtype], shard_bytes)


# --- names


class _Theirs(NamedTuple):
    """Where one of our leaves stands in their files.

    Attributes:
      names: of their tensors: an array of [N], [N, X] or [].
      turned: whether theirs are [out, in] where ours are [in, out].
    """

    names: np.ndarray
    turned: bool

    def view(self, array: np.ndarray) -> np.ndarray:
        """One of our tensors as theirs, or back."""
        return array.T if self.turned else array


def _theirs(path: Any, shape: tuple[int, ...], tied: bool) -> _Theirs | None:
    """Their tensors of one of our leaves; None for a selection bias, which they do not have."""
    ours = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path).removesuffix(".value")))
    layer = ours.removeprefix("prefix.")
    if layer == "ffn.bias":
        return None
    experts = layer == "ffn.router" or (layer in _FFN and len(shape) == 4)
    template = (_WHOLE | _LAYER | (_MOE if experts else _FFN))[layer]
    if tied and template == _HEAD:
        template = _EMBEDDING
    names = np.empty(shape[: template.count("{}")], object)
    for index in np.ndindex(names.shape):
        names[index] = template.format(*index)
    return _Theirs(names, len(shape) > names.ndim + 1 and ours != "embedding")


def _check_names(folder: pathlib.Path, found: frozenset[str], shapes: Any, tied: bool) -> None:
    """Refuses tensors that are missing, and those that have no place in the model."""
    leaves = jax.tree_util.tree_flatten_with_path(shapes)[0]
    places = [_theirs(path, leaf.shape, tied) for path, leaf in leaves]
    wanted = {name for place in places if place for name in place.names.flat}
    more = lambda names: f" and {len(names) - 1} more" if len(names) > 1 else ""
    if lacking := wanted - found:
        raise UserError(
            f"{folder}: tensor {min(lacking)}{more(lacking)} of {CONFIG}'s model is missing"
        )
    if strange := found - wanted - ({_HEAD} if tied else set()):
        raise UserError(
            f"{folder}: tensor {min(strange)}{more(strange)} has no place in {CONFIG}'s model"
        )


def _order(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Sorts tensors as the model runs: embedding, layers by number, final norm, head."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
    return name == _HEAD, parts


# --- config.json


def _describe(path: pathlib.Path, compute: Compute) -> _Described:
    """Our configuration from theirs."""
    said = storage.read_json(path)
    architectures = said.get("architectures")
    if architectures not in ([DENSE], [EXPERTS]):
        known = f"{DENSE} and {EXPERTS}"
        raise UserError(f"{path}: architecture {architectures} is not known: {known} are")
    for key, value in _FIXED.items():
        if said.get(key, value) not in (value, None):
            raise UserError(f"{path}: {key} is {said[key]}, our layers have nothing but {value}")
    kinds = set(said.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UserError(f"{path}: layers of the type {min(kinds)}: only full_attention is known")
    try:
        backbone = Backbone(
            d_model=_number(said, "hidden_size", int),
            head_dim=_number(said, "head_dim", int),
            num_heads=_number(said, "num_attention_heads", int),
            num_kv_heads=_number(said, "num_key_value_heads", int),
            d_ff=_number(said, "intermediate_size", int),
            vocab_size=_number(said, "vocab_size", int),
            rope_base=_rope_base(said),
            norm_eps=_number(said, "rms_norm_eps", float),
        )
        hierarchy = Hierarchy.dense(_number(said, "num_hidden_layers", int))
        moe = _experts(said) if architectures == [EXPERTS] else None
        context_length = _number(said, "max_position_embeddings", int)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    model = ModelConfig(backbone, hierarchy, compute=compute, moe=moe)
    return _Described(model, context_length, bool(said.get("tie_word_embeddings", False)))


def _number(said: dict[str, Any], key: str, kind: type[N]) -> N:
    """A positive number of a config.json."""
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int | kind) or not value > 0:
        raise ValueError(f"{key} must be a positive number, it is {value!r}")
    return kind(value)


def _rope_base(said: dict[str, Any]) -> float:
    """Base of the rotary wavelengths; transformers 5 keeps it beside what may scale them."""
    rope = said.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    if kind != "default":
        raise ValueError(f"rotary embeddings of the type {kind} are not known, only the default")
    return _number(said | rope, "rope_theta", float)


def _experts(said: dict[str, Any]) -> MoE:
    """Experts that are balanced by a loss alone, so that what was trained can be written again."""
    key = "num_experts" if "num_experts" in said else "num_local_experts"
    return MoE(
        experts=_number(said, key, int),
        active=_number(said, "num_experts_per_tok", int),
        shared=0,
        d_expert=_number(said, "moe_intermediate_size", int),
        bias_rate=0.0,
        scores=Scores.SOFTMAX if said.get("norm_topk_prob") else Scores.SOFTMAX_ALL,
    )


def check_writable(config: ModelConfig) -> None:
    """Refuses a model that neither Qwen3 nor Qwen3-MoE can hold, before its weights are read.

    Raises:
      UserError: what they lack.
    """
    moe = config.moe
    if config.hierarchy.groups:
        raise UserError(f"{DENSE} has dense layers only: a model with sparse layers stays here")
    if moe is None:
        return
    if moe.shared:
        raise UserError(f"{EXPERTS} has no shared experts, this model has {moe.shared}")
    if moe.scores is Scores.SIGMOID:
        raise UserError(f"{EXPERTS} weighs experts by a softmax, this model by sigmoids")


def _refuse_learnt_bias(model: Decoder) -> None:
    if isinstance(model.prefix, MoEBlock) and np.any(np.asarray(model.prefix.ffn.bias[...])):
        raise UserError(f"{EXPERTS} has no selection bias of experts, this model has learnt one")


def _config(config: ModelConfig, context_length: int, tied: bool, dtype: str) -> dict[str, Any]:
    """Their configuration from ours."""
    backbone, moe = config.backbone, config.moe
    said = {
        "architectures": [DENSE if moe is None else EXPERTS],
        "model_type": "qwen3" if moe is None else "qwen3_moe",
        "hidden_size": backbone.d_model,
        "head_dim": backbone.head_dim,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "num_hidden_layers": config.hierarchy.prefix,
        "intermediate_size": backbone.d_ff,
        "vocab_size": backbone.vocab_size,
        "rms_norm_eps": backbone.norm_eps,
        "rope_theta": backbone.rope_base,  # for transformers 4, rope_parameters for 5
        "rope_parameters": {"rope_type": "default", "rope_theta": backbone.rope_base},
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tied,
        "dtype": dtype,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }
    if moe is not None:
        said |= {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": moe.d_expert,
            "norm_topk_prob": moe.scores is Scores.SOFTMAX,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return said
