"""config.json: keys that are read, that must have one value, that do nothing, and all others."""

from __future__ import annotations

import json

import pytest

from tests.exchange.folders import CONFIG, EXPERTS
from xmod_jax.config import Compute, Scores
from xmod_jax.errors import UserError
from xmod_jax.exchange import settings


@pytest.fixture
def describe(tmp_path):
    def described(config):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return settings.describe(path, Compute.FLOAT32)

    return described


@pytest.fixture
def refusal(describe, tmp_path):
    def message(config):
        with pytest.raises(UserError) as error:
            describe(config)
        text = str(error.value)
        assert "\n" not in text and text.startswith(f"{tmp_path / 'config.json'}: ")
        return text

    return message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture ['LlamaForCausalLM'] is not known"),
        ({"architectures": None}, "architecture None is not known"),
        ({"architectures": "Qwen3ForCausalLM"}, "architecture Qwen3ForCausalLM is not known"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "is not known"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "is not known"),
        ({"model_type": "llama"}, "model_type is 'llama', but Qwen3ForCausalLM is a qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', our layers have nothing but silu"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": {"bits": 4}}, "save the model dequantised"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"auto_map": {"AutoModel": "mine.Mine"}}, "code of its own, which is not run"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is"),
        ({"dual_chunk_attention_config": {"chunk_size": 1}}, "this key is not known"),
        ({"use_qk_norm": False}, "use_qk_norm is False: this key is not known"),
        ({"logits_scaling": 8.0}, "logits_scaling is 8.0: this key is not known"),
        ({"num_experts": 4}, "num_experts is 4: this key is not known"),
        ({"x": "y" * 9999}, "x is 'yyyy"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "type linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers is 2"),
        ({"layer_types": 5}, "layer_types is 5, not a list of names"),
        ({"layer_types": [["full_attention"], {}]}, "not a list of names"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', neither true nor false"),
    ],
)
def test_what_changes_the_model_and_is_not_ours_is_refused_by_name(refusal, change, message):
    text = refusal(CONFIG | change)
    assert message in text and len(text) < 300


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "of the type 'yarn'"),
        ({"rope_parameters": {"type": "yarn", "rope_theta": 1e6}}, "of the type 'yarn'"),
        ({"rope_parameters": {"type": "linear", "rope_type": "default"}}, "of the type 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of the type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "of the type 'llama3'"),
        ({"rope_parameters": {"factor": 4.0}}, "factor is 4.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"mrope_section": [1, 1, 2]}}, "mrope_section is [1, 1, 2]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention is"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', not an object"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling is ['yarn'], not an object"),
        ({"rope_parameters": {"type": ["yarn"]}}, "of the type ['yarn']"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta has another value"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta must be a positive number"),
        ({"rope_scaling": {"type": "default"}, "rope_parameters": {"type": "default"}}, "only one"),
        ({"rope_theta": None}, "rope_theta must be a positive number, it is None"),
        ({"rope_theta": 0.5}, "rope_theta must be 1 to 1e+12, it is 0.5"),
        ({"rope_theta": 10**300}, "rope_theta must be 1 to 1e+12"),
    ],
)
def test_rotary_embeddings_that_are_not_plain_are_refused(refusal, rope, message):
    assert message in refusal(CONFIG | rope)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"type": "default", "rope_theta": 500000}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default", "factor": None}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {}},
    ],
)
def test_plain_rotary_embeddings_are_read_wherever_they_stand(describe, rope):
    assert describe(CONFIG | rope).model.backbone.rope_base == 5e5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": None}, "head_dim must be a positive number, it is None"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive number"),
        ({"hidden_size": True}, "hidden_size must be a positive number, it is True"),
        ({"hidden_size": 16.5}, "hidden_size must be a positive number, it is 16.5"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"vocab_size": 10**10}, "vocab_size must be at most"),
        ({"vocab_size": -1}, "vocab_size must be a positive number, it is -1"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings must be at most 10000000"),
        ({"rms_norm_eps": 1e5}, "rms_norm_eps must be below 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(refusal, change, message):
    assert message in refusal(CONFIG | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"num_experts_per_tok": 5}, "active 5 of only 4 experts"),
        ({"num_experts": None}, "num_experts must be a positive number"),
        ({"num_local_experts": 5}, "num_experts is 4, num_local_experts 5"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob is 'false', neither true nor false"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size is 8"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor is 2.5"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    ],
)
def test_experts_that_are_not_ours_are_refused(refusal, change, message):
    assert message in refusal(EXPERTS | change)


def test_what_changes_no_logit_is_passed_over_and_dropout_is_told(describe):
    said = CONFIG | {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "initializer_range": 0.02,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "eos_token_id": [151645, 151643],
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * 2,
        "some_key_of_tomorrow": None,
        "hidden_act": "swish",
    }
    plain = describe(CONFIG)
    assert describe(said) == plain and plain.notes == ()
    (note,) = describe(CONFIG | {"attention_dropout": 0.1}).notes
    assert "attention_dropout is 0.1: training here has none" in note


def test_either_name_of_the_number_of_experts_and_a_base_model_are_read(describe):
    local = {key: value for key, value in EXPERTS.items() if key != "num_experts"}
    moe = describe(local | {"num_local_experts": 4, "norm_topk_prob": None}).model.moe
    assert (moe.experts, moe.scores) == (4, Scores.SOFTMAX_ALL)
    base = describe(CONFIG | {"architectures": ["Qwen3Model"]})
    assert base == describe(CONFIG)


def test_keys_of_the_source_stay_where_the_model_does_not_say_otherwise(describe):
    source = CONFIG | {
        "bos_token_id": 3,
        "eos_token_id": [4, 5],
        "pad_token_id": None,
        "max_window_layers": 28,
        "torch_dtype": "float16",
        "hidden_size": 99,
        "rope_scaling": {"type": "default"},
    }
    model = describe(CONFIG).model
    written = settings.config(model, 64, True, "bfloat16", source)
    assert (written["bos_token_id"], written["eos_token_id"]) == (3, [4, 5])
    assert written["pad_token_id"] is None and written["max_window_layers"] == 28
    assert (written["hidden_size"], written["dtype"]) == (16, "bfloat16")
    assert written["tie_word_embeddings"] is True
    assert not {"torch_dtype", "rope_scaling"} & written.keys()
    assert describe(written).model == model
