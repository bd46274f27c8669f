"""Tensors under other names than Qwen3's: read as they are meant, or refused by what they are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.exchange import folders
from tests.exchange.folders import CONFIG, EXPERTS
from xmod_jax.config import Compute
from xmod_jax.errors import UserError
from xmod_jax.exchange import qwen3
from xmod_jax.exchange.names import Stored
from xmod_jax.exchange.tensors import TensorFolder

TIED = CONFIG | {"tie_word_embeddings": True}


def _hash(folder):
    return qwen3.read(folder, Compute.FLOAT32).hash


@pytest.fixture
def same(tmp_path):
    """Checks that tensors read as the plain ones of a configuration do."""

    def check(config, tensors, said=None):
        folders.make(tmp_path / "plain", config)
        folders.make(tmp_path / "other", said or config, tensors)
        assert _hash(tmp_path / "other") == _hash(tmp_path / "plain")

    return check


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.module.{name}",
        lambda name: name.replace(".mlp.", "._orig_mod.mlp."),
        lambda name: name.replace("model.layers.1.", "model.layers.1._checkpoint_wrapped_module."),
    ],
)
def test_prefixes_of_wrapped_modules_are_left_out(same, rename):
    same(CONFIG, {rename(name): tensor for name, tensor in folders.weights(CONFIG).items()})


def test_buffers_that_follow_from_the_configuration_are_left_out(same):
    buffers = {
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    same(CONFIG, folders.weights(CONFIG) | buffers)


def test_a_tied_checkpoint_may_store_its_head_alone(same):
    tensors = folders.weights(TIED)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    same(TIED, tensors)


def test_a_base_model_is_read_where_the_embedding_is_the_head(same, tmp_path):
    bare = {k.removeprefix("model."): v for k, v in folders.weights(TIED).items()}
    same(TIED, bare, TIED | {"architectures": ["Qwen3Model"]})
    folders.make(tmp_path / "headless", CONFIG | {"architectures": ["Qwen3Model"]}, bare)
    with pytest.raises(UserError, match="a base model without its head"):
        _hash(tmp_path / "headless")


def _fused():
    tensors = folders.weights(EXPERTS)
    for n in range(2):
        experts = f"model.layers.{n}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{experts}.{x}.{kind}_proj.weight") for x in range(4)])
            for kind in ("gate", "up", "down")
        )
        both = np.concatenate([gate, up], axis=1)
        tensors |= {f"{experts}.gate_up_proj": both, f"{experts}.down_proj": down}
    return tensors


def test_experts_in_one_tensor_are_told_apart(same):
    same(EXPERTS, _fused())


def test_experts_in_one_tensor_of_another_layout_are_one_line(tmp_path):
    name = "model.layers.1.mlp.experts.gate_up_proj"
    for change, message in [
        (lambda tensor: tensor[:, :23], r"has the shape \(4, 23, 16\), no experts'"),
        (lambda tensor: tensor[0], r"has the shape \(24, 16\), no experts'"),
        (lambda tensor: tensor.swapaxes(1, 2), r"has the shape \(8, 24\), .* asks for \(12, 16\)"),
        (lambda tensor: tensor[:3], r"gate_proj.weight and 1 more .* is missing"),
        (lambda tensor: np.zeros((0, 24, 16), np.float32), "no experts'"),
    ]:
        tensors = _fused()
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folders.make(folder, EXPERTS, tensors)
        with pytest.raises(UserError, match=message):
            _hash(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "an adapter: merge it"),
        ("model.layers.0.self_attn.q_proj.lora_B.default.weight", "an adapter: merge it"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "an adapter: merge it"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "quantised weights"),
        ("model.layers.0.mlp.up_proj.weight_scale", "quantised weights"),
        ("model.layers.0.mlp.up_proj.input_scale", "quantised weights"),
        ("model.layers.0.mlp.up_proj.qweight", "quantised weights"),
        ("model.layers.0.mlp.up_proj.weight.absmax", "quantised weights"),
        ("model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4", "quantised weights"),
        ("model.layers.0.mlp.up_proj.weight_packed", "quantised weights"),
        ("model.layers.0.self_attn.q_proj.bias", "a bias, our layers have none"),
        ("lm_head.bias", "a bias, our layers have none"),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "a shared expert"),
        ("v_head.summary.weight", "tensor v_head.summary.weight has no place"),
        ("module.lm_head.weight", "module.lm_head.weight and lm_head.weight are both"),
    ],
)
def test_tensors_of_another_model_are_refused_by_what_they_are(tmp_path, name, message):
    folders.make(
        tmp_path / "theirs", CONFIG, folders.weights(CONFIG) | {name: np.ones((2, 2), "f")}
    )
    with pytest.raises(UserError) as error:
        _hash(tmp_path / "theirs")
    assert message in str(error.value).replace(f"{tmp_path / 'theirs/model.safetensors'}: ", "")


def test_no_name_of_a_plain_checkpoint_is_taken_for_anything_else(tmp_path):
    for name, config in [("dense", CONFIG), ("experts", EXPERTS)]:
        folders.make(tmp_path / name, config)
        assert Stored(TensorFolder(tmp_path / name), False).names == folders.shapes(config).keys()
