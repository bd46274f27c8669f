"""Qwen3 folders against a NumPy reference, back and forth, and refusals in one line."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.exchange import folders
from tests.exchange.folders import CONFIG, EXPERTS
from tests.test_model import make as make_model
from xmod_jax.config import Compute, MoE
from xmod_jax.errors import UserError
from xmod_jax.exchange import qwen3
from xmod_jax.model import Decoder, Threshold
from xmod_jax.nn.moe import MoEBlock

TIED = CONFIG | {"tie_word_embeddings": True}
IDS_L = np.random.default_rng(1).integers(0, 257, 11)


@jax.jit
def _logits(model: Decoder, ids_BL: jax.Array) -> jax.Array:
    return model.logits(model(ids_BL, Threshold(()))[0])


def _read(folder: pathlib.Path) -> qwen3.Checkpoint:
    return qwen3.read(folder, Compute.FLOAT32)


@pytest.mark.parametrize(
    ("config", "shards"),
    [
        (CONFIG, 1),
        (TIED, 3),
        (EXPERTS, 1),
        (EXPERTS | {"norm_topk_prob": False, "num_experts_per_tok": 3}, 2),
    ],
    ids=["untied", "tied", "experts", "experts, not scaled"],
)
def test_a_folder_reads_as_the_published_model_and_is_written_the_same(tmp_path, config, shards):
    stored = folders.make(tmp_path / "theirs", config, shards=shards)
    checkpoint = _read(tmp_path / "theirs")
    assert checkpoint.context_length == 64
    got_LV = _logits(checkpoint.model, jnp.asarray(IDS_L[None], jnp.int32))[0]
    np.testing.assert_allclose(got_LV, folders.logits(stored, config, IDS_L), atol=1e-4, rtol=1e-4)

    qwen3.write(checkpoint.model, tmp_path / "ours", 64, shard_bytes=10_000, end_of_text=256)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 1 and all(file.stat().st_mode & 0o044 for file in files)
    again = _read(tmp_path / "ours")
    assert (again.hash, again.model.config) == (checkpoint.hash, checkpoint.model.config)
    said = json.loads((tmp_path / "ours/config.json").read_text())
    assert {key: said[key] for key in config} == config and said["eos_token_id"] == 256


def test_half_precision_is_widened_and_can_be_written(tmp_path):
    stored = folders.weights(CONFIG)
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in stored.items()}
    folders.make(tmp_path / "half", CONFIG, half)
    checkpoint = _read(tmp_path / "half")
    assert checkpoint.model.head[...].dtype == jnp.float32
    folders.make(tmp_path / "mixed", CONFIG, half | {"lm_head.weight": stored["lm_head.weight"]})
    qwen3.write(_read(tmp_path / "mixed").model, tmp_path / "written", 64, dtype="bfloat16")
    assert _read(tmp_path / "written").hash == checkpoint.hash


def test_a_tied_folder_may_hold_the_head_as_well_if_it_is_the_same(tmp_path):
    stored = folders.weights(TIED)
    same = stored | {"lm_head.weight": stored["model.embed_tokens.weight"]}
    folders.make(tmp_path / "same", TIED, same)
    assert _read(tmp_path / "same").model.config.backbone.norm_eps == 1e-5
    folders.make(tmp_path / "other", TIED, stored | {"lm_head.weight": same["lm_head.weight"] + 1})
    assert "lm_head.weight is not model.embed_tokens.weight" in _refusal(tmp_path / "other")


def _refusal(folder: pathlib.Path) -> str:
    """What reading a folder is refused with: one line that names the folder."""
    with pytest.raises(UserError) as error:
        _read(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture ['LlamaForCausalLM'] is not known"),
        ({"architectures": None}, "architecture None is not known"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "of the type yarn"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "type linear_attention"),
        ({"head_dim": None}, "head_dim must be a positive number, it is None"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be a positive number"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight and 10 more"),
        ({"num_hidden_layers": 1}, "tensor model.layers.1.input_layernorm.weight and 10 more"),
        ({"intermediate_size": 25}, "has the shape (16, 24), config.json asks for (16, 25)"),
    ],
)
def test_a_model_that_is_not_ours_is_refused_in_one_line(tmp_path, change, message):
    folders.make(tmp_path / "theirs", CONFIG | change, folders.weights(CONFIG))
    assert message in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}])
def test_experts_in_some_layers_only_are_refused(tmp_path, change):
    folders.make(tmp_path / "theirs", EXPERTS | change)
    assert f"{next(iter(change))} is" in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize("cut", [0, 4, 100, -5])
def test_a_cut_or_damaged_file_is_one_line(tmp_path, cut):
    folders.make(tmp_path / "theirs", CONFIG, shards=2)
    path = tmp_path / "theirs/model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert "model-00002-of-00002.safetensors: damaged or cut" in _refusal(tmp_path / "theirs")


def test_numbers_that_are_none_are_one_line(tmp_path):
    stored = folders.weights(CONFIG)
    stored["model.norm.weight"][3] = np.nan
    folders.make(tmp_path / "theirs", CONFIG, stored)
    assert "model.norm.weight holds numbers that are not finite" in _refusal(tmp_path / "theirs")


def test_integers_are_refused(tmp_path):
    stored = folders.weights(CONFIG)
    folders.make(tmp_path / "theirs", CONFIG, stored | {"model.norm.weight": np.ones(16, np.int8)})
    assert "model.norm.weight is of type I8" in _refusal(tmp_path / "theirs")


def test_a_folder_without_safetensors_or_a_shard_is_one_line(tmp_path):
    assert "no such folder" in _refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "config.json: no such file" in _refusal(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text("{")
    assert "config.json: not a JSON object" in _refusal(tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "empty/pytorch_model.bin").write_bytes(b"pickled")
    assert "pickled weights (.bin) are not read" in _refusal(tmp_path / "empty")
    folders.make(tmp_path / "theirs", CONFIG, shards=2)
    (tmp_path / "theirs/model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors: no such file" in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize("place", ["../out.safetensors", "/etc/passwd", 3, None])
def test_an_index_reaches_no_file_outside_its_folder(tmp_path, place):
    folders.make(tmp_path / "theirs", CONFIG, shards=2)
    index = {"weight_map": {"model.norm.weight": place}}
    (tmp_path / "theirs/model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not name files of this folder" in _refusal(tmp_path / "theirs")


def test_what_qwen3_does_not_have_is_not_written(tmp_path):
    for name, message in [("xmod", "dense layers only"), ("moe", "no shared experts")]:
        with pytest.raises(UserError, match=message):
            qwen3.write(make_model(name), tmp_path / "out", 64)
    config = dataclasses.replace(make_model("moe").config, moe=MoE(6, 2, 0, 5))
    with pytest.raises(UserError, match="by sigmoids"):
        qwen3.write(Decoder(config, rngs=nnx.Rngs(0)), tmp_path / "out", 64)
    folders.make(tmp_path / "theirs", EXPERTS)
    model = _read(tmp_path / "theirs").model
    assert isinstance(model.prefix, MoEBlock)
    bias = model.prefix.ffn.bias
    bias[...] = bias[...] + 1
    with pytest.raises(UserError, match="selection bias"):
        qwen3.write(model, tmp_path / "out", 64)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_that_is_taken_or_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    with pytest.raises(UserError, match="not empty"):
        qwen3.write(make_model("dense"), tmp_path / "taken", 64)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(qwen3.tensors, "_save", full)
    with pytest.raises(OSError, match="No space left"):
        qwen3.write(make_model("dense"), tmp_path / "new", 64)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
