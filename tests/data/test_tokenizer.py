from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmod_jax.config import BYTE_VOCABULARY
from xmod_jax.data.tokenizer import ByteTokenizer, Tokenizer

TOKENIZER: Tokenizer = ByteTokenizer()


@given(st.text())
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text())
def test_ids_are_the_utf8_bytes(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())


def test_end_of_text_is_the_last_id_and_never_encoded():
    assert TOKENIZER.vocab_size == BYTE_VOCABULARY == 257
    assert TOKENIZER.end_of_text == 256
    assert 256 not in TOKENIZER.encode("<|endoftext|>")


@given(st.lists(st.integers(0, 256)))
def test_any_ids_of_the_vocabulary_decode(ids):
    assert TOKENIZER.decode(ids).count("<|endoftext|>") >= ids.count(256)


def test_invalid_utf8_is_marked_and_end_of_text_named():
    assert TOKENIZER.decode([104, 0xFF, 256, 105]) == "h\N{REPLACEMENT CHARACTER}<|endoftext|>i"


@pytest.mark.parametrize("token", [-1, 257])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError):
        TOKENIZER.decode([token])


def test_a_lone_surrogate_is_refused():
    with pytest.raises(ValueError):
        TOKENIZER.encode("\ud800")
