"""config.json of Qwen3 and Qwen3-MoE: what it says about the model, and how it is written.

Every key that could change what a model computes is read, must have the one value that our layers
have, or is refused by name: nothing is passed over that might matter.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

from xmod_jax import storage
from xmod_jax.config import Backbone, Compute, ModelConfig, MoE, Scores
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy

CONFIG, GENERATION = "config.json", "generation_config.json"
DENSE, EXPERTS = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
# What `architectures` and `model_type` may be. A base model is one without its head.
_KINDS = {
    DENSE: "qwen3",
    "Qwen3Model": "qwen3",
    EXPERTS: "qwen3_moe",
    "Qwen3MoeModel": "qwen3_moe",
}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
# Beyond these a config.json is mistaken: nobody has trained such a model.
_LONGEST = 10**7  # tokens of a context
_LARGEST_BASE = 1e12  # of rotary wavelengths
N = TypeVar("N", int, float)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_READ = _words(
    """
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    tie_word_embeddings layer_types rope_theta rope_parameters rope_scaling
    """
)
_READ_OF_EXPERTS = _words(
    """
    num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob
    """
)
# What must have one of these values, as our layers have nothing else. Absent and null are as good.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
    "use_mrope": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "quantization_config": (),
    "compression_config": (),
    "per_layer_config": ({},),
    "auto_map": (),
    "pruned_heads": ({},),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "router_jitter_noise": (0.0,),
}
# What changes no logit: labels, how a library runs or samples, training that is not done here.
_WITHOUT_EFFECT = _words(
    """
    sep_token_id decoder_start_token_id _name_or_path name_or_path _commit_hash
    transformers_version unsloth_version unsloth_fixed dtype torch_dtype use_bfloat16
    torchscript use_cache initializer_range max_window_layers sliding_window attention_dropout
    output_router_logits router_aux_loss_coef pretraining_tp gradient_checkpointing
    attn_implementation _attn_implementation _attn_implementation_internal
    _attn_implementation_autoset
    _experts_implementation experts_implementation chunk_size_feed_forward is_decoder
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params tf_legacy_loss max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id remove_invalid_values
    """
) | {*SPECIAL}
# What to do about some of the refused.
_ADVICE = {
    "quantization_config": "save the model dequantised",
    "compression_config": "save the model dequantised",
    "auto_map": "the model is code of its own, which is not run",
}
# Keys that `config` states anew, under another name as well.
_STATED_ANEW = {"torch_dtype", "num_local_experts", "rope_scaling", "layer_types"}


@dataclasses.dataclass(frozen=True)
class Described:
    """What a config.json says.

    Attributes:
      model: our configuration of it.
      context_length: longest context it was made for, in tokens.
      tied: whether the embedding is the head as well.
      notes: what it says that has no counterpart here, each a sentence for the user.
    """

    model: ModelConfig
    context_length: int
    tied: bool
    notes: tuple[str, ...] = ()


def describe(path: pathlib.Path, compute: Compute) -> Described:
    """Our configuration from theirs.

    Args:
      path: of the config.json.
      compute: precision of the model's activations.

    Raises:
      UserError: an architecture, or an option of it, that our model does not have, or a key that
        is not known.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: not a file")
    said = storage.read_json(path)
    try:
        experts = _architecture(said) == "qwen3_moe"
        _check_keys(said, experts)
        described = _described(said, experts, compute)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    dropout = said.get("attention_dropout")
    notes = (f"{path}: attention_dropout is {dropout}: training here has none",) if dropout else ()
    return dataclasses.replace(described, notes=notes)


def _architecture(said: Mapping[str, Any]) -> str:
    """The model_type of what is described."""
    stated = said.get("architectures")
    name = stated[0] if isinstance(stated, list) and len(stated) == 1 else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"architecture {stated} is not known: {DENSE} and {EXPERTS} are")
    if said.get("model_type", kind) != kind:
        raise ValueError(f"model_type is {said['model_type']!r}, but {name} is a {kind}")
    return kind


def _check_keys(said: Mapping[str, Any], experts: bool) -> None:
    """Refuses values that our layers do not have, and keys that nothing is known about."""
    for key, allowed in _FIXED.items():
        value = said.get(key)
        if value is not None and value not in allowed:
            ours = " or ".join(map(str, allowed)) if allowed else "null"
            advice = f": {_ADVICE[key]}" if key in _ADVICE else ""
            raise ValueError(
                f"{key} is {_short(value)}, our layers have nothing but {ours}{advice}"
            )
    known = _READ | _FIXED.keys() | _WITHOUT_EFFECT | (_READ_OF_EXPERTS if experts else frozenset())
    for key in sorted(said.keys() - known):
        if said[key] is not None:
            raise ValueError(
                f"{key} is {_short(said[key])}: this key is not known, it may change the model: "
                "remove it if it does not"
            )
    tied = said.get("tie_word_embeddings")
    if tied is not None and not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {_short(tied)}, neither true nor false")
    kinds = said.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"layer_types is {_short(kinds)}, not a list of names")
    if other := sorted(set(kinds) - {"full_attention"}):
        raise ValueError(f"layers of the type {other[0]}: only full_attention is known")
    if len(kinds) != said.get("num_hidden_layers"):
        raise ValueError(
            f"layer_types names {len(kinds)} layers, num_hidden_layers is "
            f"{_short(said.get('num_hidden_layers'))}"
        )


def _short(value: Any) -> str:
    """A value as a message shows it: nobody reads a thousand characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _described(said: Mapping[str, Any], experts: bool, compute: Compute) -> Described:
    epsilon = _number(said, "rms_norm_eps", float)
    if epsilon >= 1:
        raise ValueError(f"rms_norm_eps must be below 1, it is {epsilon}")
    backbone = Backbone(
        d_model=_number(said, "hidden_size", int),
        head_dim=_number(said, "head_dim", int),
        num_heads=_number(said, "num_attention_heads", int),
        num_kv_heads=_number(said, "num_key_value_heads", int),
        d_ff=_number(said, "intermediate_size", int),
        vocab_size=_number(said, "vocab_size", int),
        rope_base=_rope_base(said),
        norm_eps=epsilon,
    )
    hierarchy = Hierarchy.dense(_number(said, "num_hidden_layers", int))
    context_length = _number(said, "max_position_embeddings", int)
    if context_length > _LONGEST:
        raise ValueError(f"max_position_embeddings must be at most {_LONGEST} tokens")
    moe = _experts(said) if experts else None
    model = ModelConfig(backbone, hierarchy, compute=compute, moe=moe)
    return Described(model, context_length, bool(said.get("tie_word_embeddings")))


def _number(said: Mapping[str, Any], key: str, kind: type[N]) -> N:
    """A positive number of a config.json."""
    value = said.get(key)
    if isinstance(value, bool) or not isinstance(value, int | kind) or not value > 0:
        raise ValueError(f"{key} must be a positive number, it is {_short(value)}")
    return kind(value)


def _rope_base(said: Mapping[str, Any]) -> float:
    """Base of the rotary wavelengths; refuses whatever scales or cuts them.

    transformers 5 keeps both in rope_parameters, which older versions call rope_scaling.
    """
    bases = {"rope_theta": said} if said.get("rope_theta") is not None else {}
    places = [place for place in ("rope_scaling", "rope_parameters") if said.get(place)]
    if len(places) == 2:
        raise ValueError("rope_scaling and rope_parameters: only one of them may be given")
    for place in places:
        rope = said[place]
        if not isinstance(rope, dict):
            raise ValueError(f"{place} is {_short(rope)}, not an object")
        for key in ("rope_type", "type"):
            if rope.get(key, "default") != "default":
                raise ValueError(
                    f"{place}: rotary embeddings of the type {_short(rope[key])} are not known, "
                    "only the default"
                )
        for key in sorted(rope.keys() - {"rope_type", "type", "rope_theta"}):
            if rope[key] is not None and (key, rope[key]) != ("partial_rotary_factor", 1):
                raise ValueError(
                    f"{place}: {key} is {_short(rope[key])}, our rotary embeddings have no such "
                    "thing"
                )
        if rope.get("rope_theta") is not None:
            bases[place] = rope
    if len({_number(where, "rope_theta", float) for where in bases.values()}) > 1:
        raise ValueError(f"rope_theta has another value in {places[0]} than beside it")
    base = _number(next(iter(bases.values()), said), "rope_theta", float)
    if not 1 <= base <= _LARGEST_BASE:
        raise ValueError(f"rope_theta must be 1 to {_LARGEST_BASE:g}, it is {base}")
    return base


def _experts(said: Mapping[str, Any]) -> MoE:
    """Experts that are balanced by a loss alone, so that what was trained can be written again."""
    both = [said[key] for key in ("num_experts", "num_local_experts") if said.get(key) is not None]
    if len(both) == 2 and both[0] != both[1]:
        raise ValueError(f"num_experts is {both[0]!r}, num_local_experts {both[1]!r}")
    scaled = said.get("norm_topk_prob")
    if scaled is not None and not isinstance(scaled, bool):
        raise ValueError(f"norm_topk_prob is {_short(scaled)}, neither true nor false")
    return MoE(
        experts=_number({"num_experts": both[0] if both else None}, "num_experts", int),
        active=_number(said, "num_experts_per_tok", int),
        shared=0,
        d_expert=_number(said, "moe_intermediate_size", int),
        bias_rate=0.0,
        scores=Scores.SOFTMAX if scaled else Scores.SOFTMAX_ALL,
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


def config(
    model: ModelConfig, context_length: int, tied: bool, dtype: str, source: Mapping[str, Any]
) -> dict[str, Any]:
    """Their configuration from ours.

    Args:
      model: as `check_writable` takes it.
      context_length: longest context it is meant for, in tokens.
      tied: whether the embedding is the head as well.
      dtype: of the weights in the file.
      source: a config.json whose other keys are kept; it describes the same model.
    """
    backbone, moe = model.backbone, model.moe
    said = {
        "architectures": [DENSE if moe is None else EXPERTS],
        "model_type": "qwen3" if moe is None else "qwen3_moe",
        "hidden_size": backbone.d_model,
        "head_dim": backbone.head_dim,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "num_hidden_layers": model.hierarchy.prefix,
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
    kept = {key: value for key, value in source.items() if key not in _STATED_ANEW}
    return kept | said
