"""GPT-2's tokenizer: ids as published, whatever the text, and back."""

from __future__ import annotations

import pathlib
import random
import shutil
import sys

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

from xmod_jax.data import tokenizer
from xmod_jax.data.tokenizer import Gpt2Tokenizer, get_tokenizer
from xmod_jax.errors import UserError

VOCABULARY = tokenizer.packaged_vocabulary()


@pytest.fixture(scope="module")
def published() -> tiktoken.Encoding:
    """tiktoken's own encoding, as its registry builds it, without the download."""
    ranks = data_gym_to_mergeable_bpe_ranks(f"{VOCABULARY}/vocab.bpe", f"{VOCABULARY}/encoder.json")
    return tiktoken.Encoding(
        "published",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
        explicit_n_vocab=50257,
    )


def varied(seed: int) -> str:
    """A megabyte of text from every plane of Unicode, with all that goes wrong in text."""
    draw = random.Random(seed)
    planes = [chr(draw.randrange(plane << 16, (plane + 1) << 16)) for plane in range(17)] * 3
    pieces = ["", "\r\n", "\t" * 9, "'s", "'ll", " 123", "<|endoftext|>", "\x00\x07\x7f", " " * 40]
    pieces += ["word", " naïve", "你好", "🙂", " don't", "e\u0301", "\ufeff", "\u202e"]
    pieces += [char for char in planes if not 0xD800 <= ord(char) < 0xE000]
    return "".join(draw.choices(pieces, k=300_000))


def test_ids_are_gpt2s_published_ones():
    encoder = get_tokenizer("gpt2")
    assert encoder.encode("Hello world").tolist() == [15496, 995]
    assert encoder.encode("Hello 🙂\n\n  don't").tolist()[:1] == [15496]
    assert 50256 not in encoder.encode("<|endoftext|>")
    assert encoder.decode([15496, 50256]) == "Hello<|endoftext|>"


def test_ten_megabytes_of_varied_text_equal_tiktoken_and_return(published):
    encoder = get_tokenizer("gpt2")
    texts = [varied(seed) for seed in range(10)]
    texts += ["", "x" * 1_000_000, " " * 1_000_000, "\n" * 100_000, "é" * 200_000]
    texts += [path.read_text() for path in sorted(pathlib.Path(np.__file__).parent.glob("*/*.py"))]
    assert sum(len(text.encode()) for text in texts) > 10_000_000
    for text, ids in zip(texts, encoder.encode_batch(texts, threads=2), strict=True):
        assert ids.dtype == np.uint16
        np.testing.assert_array_equal(ids, published.encode_ordinary(text))
        assert encoder.decode(ids) == text


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_every_text_returns(text):
    encoder = get_tokenizer("gpt2")
    assert encoder.decode(encoder.encode(text)) == text


def test_lone_surrogates_and_wrong_ids_are_refused():
    encoder = get_tokenizer("gpt2")
    with pytest.raises(ValueError):
        encoder.encode("a\ud800")
    with pytest.raises(ValueError):
        encoder.encode_batch(["a", "a\ud800"])
    for ids in ([-1], [50257]):
        with pytest.raises(ValueError, match="outside"):
            encoder.decode(ids)


def copied(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(f"{VOCABULARY}/{name}", folder)
    return folder


def test_vocabulary_files_are_read_from_a_folder(tmp_path):
    assert Gpt2Tokenizer(copied(tmp_path / "files")).encode("Hello").tolist() == [15496]


def test_missing_or_changed_vocabulary_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"vocab.bpe: no such file"):
        Gpt2Tokenizer(tmp_path)
    changed = copied(tmp_path / "changed")
    with (changed / "vocab.bpe").open("a") as file:
        file.write("a b\n")
    with pytest.raises(UserError, match=r"changed: cannot be read") as error:
        Gpt2Tokenizer(changed)
    assert "\n" not in str(error.value)


def test_without_tiktoken_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match="install the extra gpt2"):
        Gpt2Tokenizer()
