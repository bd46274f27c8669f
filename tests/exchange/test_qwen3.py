"""Qwen3 folders against a NumPy reference, back and forth, and refusals in one line."""

from __future__ import annotations

import dataclasses
import json
import os
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

    beside = qwen3.Beside({"eos_token_id": 256}, {"merges.txt": b"#"})
    qwen3.write(checkpoint.model, tmp_path / "ours", 64, shard_bytes=10_000, beside=beside)
    assert (tmp_path / "ours/merges.txt").read_bytes() == b"#"
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


def test_numbers_that_are_none_are_one_line(tmp_path):
    stored = folders.weights(CONFIG)
    stored["model.norm.weight"][3] = np.nan
    folders.make(tmp_path / "theirs", CONFIG, stored)
    assert "model.norm.weight holds numbers that are not finite" in _refusal(tmp_path / "theirs")


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
    with pytest.raises(UserError, match="No space left"):
        qwen3.write(make_model("dense"), tmp_path / "new", 64)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), "config.json: no such file"),
        (("pytorch_model.bin",), "config.json: no such file"),
        (("adapter_config.json", "adapter_model.safetensors"), "an adapter (adapter_config.json)"),
        (("config.json", "model.safetensors", "adapter_config.json"), "merge it into its base"),
        (("model-Q4_K_M.gguf",), "GGUF is not read"),
        (("snapshots/1/config.json", "refs/main"), "give one of the folders in snapshots/"),
        (("config.json/file",), "config.json: not a file"),
    ],
)
def test_a_folder_of_something_else_is_refused_by_what_it_is(tmp_path, files, message):
    (tmp_path / "theirs").mkdir()
    for name in files:
        (tmp_path / "theirs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "theirs" / name).write_text(json.dumps(CONFIG))
    assert message in _refusal(tmp_path / "theirs")


def test_a_path_that_is_no_folder_is_refused_by_what_it_is(tmp_path):
    assert "no such folder: nothing is downloaded" in _refusal(tmp_path / "Qwen/Qwen3-0.6B")
    (tmp_path / "model.safetensors").touch()
    assert "a file: give the folder of a checkpoint" in _refusal(tmp_path / "model.safetensors")
    (tmp_path / "theirs").mkdir()
    os.mkfifo(tmp_path / "theirs/config.json")
    assert "config.json: not a file" in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"a": NaN}', b"[" * 100_000, b""])
def test_a_config_that_is_no_json_object_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    assert "config.json: not a JSON object" in _refusal(tmp_path)
