"""The generator: padded prompts, chunks, growing buffers, and the end of single sequences."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.inference import confident
from tests.test_model import TINY, run
from xmod_jax.config import ModelConfig, Routing
from xmod_jax.data.tokenizer import ByteTokenizer
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.inference.generate import Generator, Prompts
from xmod_jax.inference.sampling import Sampling, names
from xmod_jax.inference.text import Stop, Text, generate, generate_padded
from xmod_jax.model import Decoder, Threshold

CONFIG = ModelConfig(
    TINY, Hierarchy(1, (StageGroup(2, 2),), sparsity=2), Routing(router_init_std=0.5)
)
LENGTHS, COUNT = (12, 3, 7), 9


@functools.cache
def model() -> Decoder:
    return confident.decoder(CONFIG, head=50)


def prompts(side: str = "right") -> Prompts:
    tokens_BL = np.random.default_rng(0).integers(0, TINY.vocab_size, (3, 12))
    place_L = np.arange(12) if side == "right" else np.arange(12)[::-1]
    return Prompts.masked(tokens_BL, place_L < np.array(LENGTHS)[:, None])


def test_padding_on_either_side_gives_the_same_kind_of_batch():
    for side in ("left", "right"):
        batch = prompts(side)
        assert batch.length_B.tolist() == list(LENGTHS)
        assert (batch.tokens_BL[1, 3:] == 0).all()
    with pytest.raises(UserError, match="at least one token"):
        Prompts.ragged([[1], []])


@pytest.mark.parametrize("value", [0.0, -1e9])
def test_greedy_tokens_are_those_of_the_full_pass(value):
    """Prompts in two chunks; with every token routed the buffers grow while tokens are made."""
    route, batch, count = Threshold(model().thresholds(value)), prompts("left"), COUNT
    generator = Generator(model(), route, chunk=8)
    made_BN = np.stack(list(generator.stream(batch, count)), axis=1)
    assert made_BN.shape == (3, count)
    full_BL = np.zeros((3, 12 + count), np.int32)
    for b, n in enumerate(LENGTHS):
        full_BL[b, : n + count] = [*batch.tokens_BL[b, :n], *made_BN[b]]
    logits, _ = run(model(), full_BL, route)
    for b, n in enumerate(LENGTHS):
        assert np.array_equal(jnp.argmax(logits[b, n - 1 : n - 1 + count], -1), made_BN[b])
    assert len({tuple(row) for row in made_BN}) == 3
    if value:
        with pytest.raises(UserError, match="given 15 tokens of a sequence, more than the 14 it"):
            list(Generator(model(), route, chunk=8, max_routed=14).stream(batch, count))


def test_a_text_that_ended_changes_no_other():
    @dataclasses.dataclass
    class Letters(ByteTokenizer):
        end_of_text = 255

        def decode(self, ids):
            return "".join(chr(97 + token) for token in ids)

    batch, generator = prompts(), Generator(model(), chunk=8)

    def make(*stops: Stop | None) -> list[Text]:
        texts = [Text(Letters(), stop) for stop in stops]
        pieces = list(generate(generator, batch, texts, COUNT))
        assert ["".join(piece) for piece in zip(*pieces, strict=True)] == [t.text for t in texts]
        return texts

    whole = make(None, None, None)
    assert [text.finished for text in whole] == ["length"] * 3
    stop = whole[0].text[3:5]
    texts = make(Stop(stop), None, Stop(whole[2].text[0]))
    assert texts[0].text == whole[0].text[: whole[0].text.find(stop)]
    assert texts[1].text == whole[1].text
    assert texts[2].text == "" and texts[2].finished == "stop"


def drawn(ids: list[list[int]], rows: int, name_B: np.ndarray) -> list[list[int]]:
    """Tokens drawn for prompts, so many of them at a time."""
    generator, made = Generator(model(), chunk=8), []
    for first in range(0, len(ids), rows):
        part = slice(first, first + rows)
        texts = [Text(ByteTokenizer()) for _ in ids[part]]
        sampling = Sampling(temperature=1.0)
        for _ in generate_padded(
            generator, ids[part], texts, rows, COUNT, sampling, 5, name_B[part]
        ):
            pass
        made += [text.ids for text in texts]
    return made


def test_draws_depend_on_the_prompt_and_its_repetition_not_on_its_place_or_batch():
    texts = ["a prompt", "b", "a prompt", "a longer prompt than those"]
    ids = [[token % TINY.vocab_size for token in text.encode()] for text in texts]
    together = drawn(ids, 8, names(texts))
    assert together[0] != together[2]  # a second sample of the same prompt
    order = [3, 0, 1, 2]
    moved = drawn([ids[i] for i in order], 3, names([texts[i] for i in order]))
    assert moved == [together[i] for i in order]


def test_logits_that_are_not_finite_end_with_one_line_and_no_token():
    broken = confident.decoder(CONFIG, head=50)
    broken.head[...] = broken.head[...].at[0, 3].set(jnp.nan)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_k=3)):
        with pytest.raises(UserError, match="logits are not finite") as refused:
            next(Generator(broken, chunk=8).stream(prompts(), 1, sampling))
        assert "\n" not in str(refused.value)


def test_a_sequence_that_needs_no_more_tokens_may_have_any_logits():
    """Its state means nothing from then on."""
    steady = Generator(model(), chunk=8)
    stream = steady.stream(prompts(), COUNT)
    first_B = next(stream)
    steady._step = lambda m, r, cache, token_B, *rest: (cache, np.array([-1, 1, 2], np.int32))
    assert (first_B >= 0).all()
    # The second tokens were made before it stopped, the third ones are from the step above.
    stream.send(np.array([True, False, False]))
    assert stream.send(np.array([True, False, False])).tolist() == [-1, 1, 2]
    with pytest.raises(UserError, match="not finite"):
        steady._step = lambda m, r, cache, token_B, *rest: (cache, np.array([0, -1, 2], np.int32))
        for _ in range(3):
            stream.send(np.array([True, False, False]))
