"""A config.json of other sizes than the tensors: told from their headers, nothing allocated."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.exchange import folders
from tests.exchange.folders import CONFIG, EXPERTS
from xmod_jax.config import Compute
from xmod_jax.errors import UserError
from xmod_jax.exchange import matching, qwen3


def _refusal(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        qwen3.read(folder, Compute.FLOAT32)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of dense layers and one of experts."""
    above = tmp_path_factory.mktemp("made")
    folders.make(above / "dense", CONFIG)
    folders.make(above / "experts", EXPERTS)
    return above


HUGE = 10**9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": HUGE},
            "num_hidden_layers is 1000000000, the tensors are those of 2",
        ),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the tensors are those of 2 layers"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, the tensors are those of 2 layers"),
        ({"vocab_size": HUGE}, "vocab_size is 1000000000, but"),
        ({"vocab_size": 256}, "model.embed_tokens.weight has the shape (257, 16)"),
        ({"hidden_size": HUGE}, "hidden_size is 1000000000, but"),
        ({"intermediate_size": HUGE}, "intermediate_size is 1000000000, but"),
        ({"intermediate_size": 25}, "mlp.gate_proj.weight has the shape (24, 16)"),
        ({"head_dim": HUGE}, "head_dim is 1000000000, but"),
        ({"num_attention_heads": HUGE}, "num_attention_heads * head_dim is 8000000000, but"),
        (
            {"num_attention_heads": HUGE, "num_key_value_heads": HUGE, "head_dim": HUGE},
            "head_dim is 1000000000, but",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads * head_dim is 32, but"),
    ],
)
def test_a_size_that_is_not_the_tensors_is_one_line(made, change, message):
    assert message in _refusal(made / "dense", CONFIG | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": HUGE}, "num_experts is 1000000000, but"),
        ({"num_experts": 3}, "mlp.gate.weight has the shape (4, 16)"),
        ({"moe_intermediate_size": HUGE}, "moe_intermediate_size is 1000000000, but"),
        ({"num_hidden_layers": HUGE}, "the tensors are those of 2 layers"),
    ],
)
def test_a_size_of_experts_that_is_not_the_tensors_is_one_line(made, change, message):
    assert message in _refusal(made / "experts", EXPERTS | change)


def test_the_tensors_of_another_kind_of_layer_are_one_line(made):
    message = _refusal(made / "dense", EXPERTS)
    assert "model.layers.0.mlp.gate.weight of config.json's model is missing" in message
    assert "model.layers.0.mlp.gate_proj.weight of" in _refusal(made / "experts", CONFIG)


def test_layers_by_other_numbers_are_missing_without_being_counted_out(tmp_path):
    tensors = {
        name.replace("model.layers.1.", "model.layers.999999999."): tensor
        for name, tensor in folders.weights(CONFIG).items()
    }
    folders.make(tmp_path / "theirs", CONFIG, tensors)
    message = _refusal(tmp_path / "theirs", CONFIG | {"num_hidden_layers": HUGE})
    assert "the tensors are those of 2 layers" in message
    message = _refusal(tmp_path / "theirs", CONFIG)
    assert "tensor model.layers.1.input_layernorm.weight and 10 more" in message
    tensors = {name.replace("model.layers.0.", "model.layers.2."): t for name, t in tensors.items()}
    folders.make(tmp_path / "second", EXPERTS, tensors)
    message = _refusal(tmp_path / "second", EXPERTS | {"num_experts": HUGE})
    assert "tensor model.layers.0.self_attn.q_norm.weight of" in message


def test_a_tensor_of_another_shape_or_rank_is_one_line(tmp_path):
    name = "model.layers.1.self_attn.o_proj.weight"
    for number, shape in enumerate([(16, 31), (32, 16), (16,), (), (16, 32, 1), (16, 0)]):
        wrong = folders.weights(CONFIG) | {name: np.ones(shape, np.float32)}
        folders.make(tmp_path / str(number), CONFIG, wrong)
        message = _refusal(tmp_path / str(number), CONFIG)
        assert f"{name} has the shape {shape}, config.json asks for (16, 32)" in message


def test_a_model_larger_than_the_machine_is_one_line(made, monkeypatch):
    monkeypatch.setattr(matching, "_memory", lambda: 40_000)
    assert "its weights take 0 GB in float32, this machine has 0" in _refusal(
        made / "dense", CONFIG
    )
