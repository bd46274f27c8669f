"""Sampling, and text from tokens: whole characters, stop strings, repetition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmod_jax.data.tokenizer import ByteTokenizer
from xmod_jax.errors import UserError
from xmod_jax.inference.sampling import Sampling, filtered, keys, names, sample
from xmod_jax.inference.text import Stop, Text

BYTES = ByteTokenizer()


def feed(ids, stop=None):
    text = Text(BYTES, stop)
    pieces = [text.add(token) for token in ids]
    pieces.append(text.finish("length"))
    assert "".join(pieces) == text.text
    return text, pieces


@given(st.binary(max_size=30))
def test_streamed_bytes_give_the_text_of_all_bytes_together(data):
    text, _ = feed(data)
    assert text.text == BYTES.decode(data) and text.finished == "length"


def test_a_character_appears_when_it_is_whole():
    text = Text(BYTES)
    assert [text.add(byte) for byte in "aé😀b".encode()] == [
        *"a",
        "",
        "é",
        *["", "", ""],
        "😀",
        "b",
    ]


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string_and_shows_none_of_it(data, stops):
    text, _ = feed(data.encode(), Stop(tuple(stops)))
    # The first token that completes a stop string ends the text; of several the earliest start.
    ends = [n for n in range(len(data) + 1) if any(data[:n].endswith(stop) for stop in stops)]
    if not ends:
        assert (text.text, text.finished) == (data, "length")
        return
    seen = data[: ends[0]]
    assert text.text == seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert text.finished == "stop" and len(text.ids) == ends[0]


def test_one_string_is_one_stop_string():
    assert feed(b"stop at top", Stop("top"))[0].text == "s"
    assert feed(b"so pot", Stop("top"))[0].text == "so pot"


def test_the_end_of_text_token_ends_and_is_no_text():
    text, pieces = feed([*b"ab\xc3", BYTES.end_of_text, *b"cd"], Stop("bx"))
    assert (text.text, text.finished) == ("ab\ufffd", "end") and pieces[-3:] == [""] * 3


def test_repetition_ends_a_text():
    text, _ = feed(b"xabababab", Stop(repetition=3))
    assert (text.text, text.finished) == ("xababab", "repetition")
    assert feed(b"xababxabab", Stop(repetition=3))[0].finished == "length"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Stop(("a", "")),
        lambda: Stop(repetition=1),
        lambda: Sampling(temperature=-1),
        lambda: Sampling(top_p=0),
        lambda: Sampling(top_k=-1),
        lambda: Sampling(temperature=float("nan")),
        lambda: Sampling(temperature=float("inf")),
        lambda: Sampling(temperature=1e-40),
        lambda: Sampling(top_p=float("nan")),
    ],
)
def test_settings_without_meaning_are_refused(wrong):
    with pytest.raises(UserError):
        wrong()


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    p_BV = np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]])
    logits_BV = jnp.log(p_BV)
    kept = lambda **options: np.isfinite(filtered(logits_BV, Sampling(1.0, **options))).tolist()
    assert kept() == kept(top_k=9) == [[True] * 4] * 2
    assert kept(top_k=2) == [[False, True, False, True], [True, True, False, False]]
    assert kept(top_p=0.45) == [[False, True, False, True], [True, True, False, False]]
    assert kept(top_p=1e-6) == [[False, True, False, False], [True, False, False, False]]
    # 0 in float32.
    assert kept(top_p=1e-300) == [[False, True, False, False], [True, False, False, False]]
    # Of the three likeliest, scaled to a sum of 1, two hold 0.7 / 0.9.
    assert kept(top_k=3, top_p=0.75)[0] == [False, True, False, True]


def test_draws_follow_the_probabilities_and_their_seed_and_not_the_neighbours():
    count, sampling = 4000, Sampling(0.5)
    logits_BV = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.6, 0.3])), (count, 3))
    draw = jax.jit(sample, static_argnums=1)
    position_B = jnp.zeros(count, jnp.int32)
    drawn = np.asarray(draw(logits_BV, sampling, keys(7, np.arange(count)), position_B))
    want = np.array([0.01, 0.36, 0.09]) / 0.46
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / count, want, atol=0.03)
    assert np.array_equal(
        drawn[:5], sample(logits_BV[:5], sampling, keys(7, np.arange(5)), position_B[:5])
    )
    assert not np.array_equal(
        drawn, draw(logits_BV, sampling, keys(8, np.arange(count)), position_B)
    )
    assert not np.array_equal(
        drawn, draw(logits_BV, sampling, keys(7, np.arange(count)), position_B + 1)
    )
    assert sample(logits_BV[:1], Sampling(), keys(0, np.arange(1)), position_B[:1]).tolist() == [1]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7), Sampling(1.0, 2, 0.5)])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_no_token_comes_of_logits_that_are_not_finite(sampling, wrong):
    logits_BV = jnp.array([[0.0, 1.0, 2.0], [0.0, wrong, 2.0], [2.0, 1.0, wrong]])
    drawn_B = sample(logits_BV, sampling, keys(0, np.arange(3)), jnp.zeros(3, jnp.int32))
    assert drawn_B[0] >= 0 and drawn_B[1:].tolist() == [-1, -1]


def test_equal_prompts_have_names_of_their_own_wherever_they_stand():
    name_B = names(["a", "b", "a", "a"])
    assert len(set(name_B.tolist())) == 4
    assert names(["b", "c", "a", "a"]).tolist()[2:] == [name_B[0], name_B[2]]
