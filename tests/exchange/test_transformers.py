"""Qwen3 of `transformers` and ours: equal logits and gradients, in both directions."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.exchange import folders
from xmod_jax.config import Compute
from xmod_jax.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from xmod_jax.exchange import qwen3, tokenizers
from xmod_jax.model import Decoder, Threshold
from xmod_jax.training.loss import cross_entropy

_REASON = "needs the packages of requirements-hf.lock"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

SMALL = folders.CONFIG
SIZES = {
    "grouped queries, untied": SMALL,
    "grouped queries, tied": SMALL | {"tie_word_embeddings": True},
    "wide heads, one key": SMALL
    | {"hidden_size": 64, "head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 160},
    "deep, all keys, tied": SMALL
    | {"num_hidden_layers": 6, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "experts": folders.EXPERTS,
    "experts, not scaled": folders.EXPERTS | {"norm_topk_prob": False},
}
TOKENS_BL1 = np.random.default_rng(3).integers(0, 257, (2, 25))


def _fresh(config):
    """A model of `transformers` with random weights."""
    torch.manual_seed(0)
    experts = config["model_type"] == "qwen3_moe"
    kind = transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config
    model = transformers.AutoModelForCausalLM.from_config(kind(**config))
    with torch.no_grad():  # no part of the model at its neutral start
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif weight.ndim > 1:
                weight.mul_(5)
    return model


def _theirs(model):
    """Logits [B, L, V] and the gradients of the mean loss by name."""
    tokens_BL1 = torch.tensor(TOKENS_BL1)
    logits_BLV = model(tokens_BL1[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL1[:, 1:].flatten())
    loss.backward()
    gradients = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    return logits_BLV.detach().numpy(), gradients


@jax.jit
def _ours(model: Decoder, tokens_BL1: jax.Array):
    def loss(model):
        states_BLD, _ = model(tokens_BL1[:, :-1], Threshold(()))
        targets_BL = tokens_BL1[:, 1:]
        ones_BL = jnp.ones(targets_BL.shape, jnp.float32)
        total = cross_entropy(states_BLD, model.whole_head(), targets_BL, ones_BL)
        return total / targets_BL.size, model.logits(states_BLD)

    return jax.grad(loss, has_aux=True)(model)


def _close(got, want, tolerance):
    """Largest difference, relative to the largest value of the tensor."""
    assert np.abs(np.asarray(got) - want).max() <= tolerance * max(1e-6, np.abs(want).max())


def _compare(model, ours):
    logits_BLV, gradients = _theirs(model)
    gradient, got_BLV = _ours(ours, jnp.asarray(TOKENS_BL1, jnp.int32))
    np.testing.assert_allclose(got_BLV, logits_BLV, atol=1e-4)
    tied = model.config.tie_word_embeddings
    embedding = np.asarray(gradient.embedding[...])
    if tied:  # theirs is the sum of both uses
        embedding = embedding + np.asarray(gradient.head[...]).T
    else:
        _close(gradient.head[...].T, gradients["lm_head.weight"], 1e-3)
    _close(embedding, gradients["model.embed_tokens.weight"], 1e-3)
    _close(gradient.final_norm.scale[...], gradients["model.norm.weight"], 1e-3)
    for n in range(model.config.num_hidden_layers):
        theirs = lambda name, n=n: gradients[f"model.layers.{n}.{name}"]
        block = jax.tree.map(lambda leaf, n=n: leaf[n], gradient.prefix)
        attention = block.attention
        _close(attention.query[...].T, theirs("self_attn.q_proj.weight"), 1e-3)
        _close(attention.key[...].T, theirs("self_attn.k_proj.weight"), 1e-3)
        _close(attention.value[...].T, theirs("self_attn.v_proj.weight"), 1e-3)
        _close(attention.output[...].T, theirs("self_attn.o_proj.weight"), 1e-3)
        _close(attention.query_norm.scale[...], theirs("self_attn.q_norm.weight"), 1e-3)
        _close(attention.key_norm.scale[...], theirs("self_attn.k_norm.weight"), 1e-3)
        _close(block.attention_norm.scale[...], theirs("input_layernorm.weight"), 1e-3)
        _close(block.ffn_norm.scale[...], theirs("post_attention_layernorm.weight"), 1e-3)
        if ours.config.moe is None:
            _close(block.ffn.gate[...].T, theirs("mlp.gate_proj.weight"), 1e-3)
            _close(block.ffn.up[...].T, theirs("mlp.up_proj.weight"), 1e-3)
            _close(block.ffn.down[...].T, theirs("mlp.down_proj.weight"), 1e-3)
            continue
        _close(block.ffn.router[...].T, theirs("mlp.gate.weight"), 1e-3)
        both = np.concatenate([block.ffn.gate[...], block.ffn.up[...]], axis=-1).swapaxes(1, 2)
        _close(both, theirs("mlp.experts.gate_up_proj"), 1e-3)
        _close(block.ffn.down[...].swapaxes(1, 2), theirs("mlp.experts.down_proj"), 1e-3)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("grouped queries, tied", "experts")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in SIZES
    ],
)
def test_both_agree_in_logits_and_gradients_in_either_direction(tmp_path, name):
    model = _fresh(SIZES[name])
    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    ours = qwen3.read(tmp_path / "theirs", Compute.FLOAT32).model
    _compare(model, ours)

    # Back, with other weights than those that came.
    moved = jax.tree.map(lambda leaf: leaf * 1.1 if leaf.ndim > 1 else leaf, ours)
    source = json.loads((tmp_path / "theirs/config.json").read_bytes())
    beside = qwen3.Beside(source | {"eos_token_id": [3, 4], "bos_token_id": 5})
    qwen3.write(moved, tmp_path / "ours", 64, shard_bytes=60_000, beside=beside)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (5, [3, 4])
    assert loaded.generation_config.eos_token_id == [3, 4]
    assert loaded.config.tie_word_embeddings == SIZES[name]["tie_word_embeddings"]
    _compare(loaded, moved)


TEXTS = ("Hello  world!\n\n it's 123 d\u00e9j\u00e0 \U0001f600 ", " a", "", "x\t\r\n\u00a0y")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Gpt2Tokenizer()], ids=lambda t: t.name)
def test_files_of_our_tokenizers_give_the_same_ids_and_texts(tmp_path, tokenizer):
    for name, content in tokenizers.own_files(tokenizer, 64).items():
        (tmp_path / name).write_bytes(content)
    said = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    end = tokenizer.end_of_text
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (end, end, end + 1)
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text) == ids and theirs.decode(ids) == text


def _head_alone(tensors):
    return tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}


def _with_buffer(tensors):
    buffer = np.ones(4, np.float32)
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": buffer}


def _base(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [_head_alone, _with_buffer, _base])
def test_tensors_stored_in_other_ways_are_loaded_as_transformers_loads_them(tmp_path, change):
    config = SMALL | {"tie_word_embeddings": True}
    folders.make(tmp_path / "theirs", config, change(folders.weights(config)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    tokens_BL = TOKENS_BL1[:, :-1]
    with torch.no_grad():
        want_BLV = theirs(torch.tensor(tokens_BL)).logits.numpy()
    ours = qwen3.read(tmp_path / "theirs", Compute.FLOAT32).model
    states_BLD, _ = ours(jnp.asarray(tokens_BL, jnp.int32), Threshold(()))
    np.testing.assert_allclose(ours.logits(states_BLD), want_BLV, atol=1e-4)
