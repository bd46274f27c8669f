from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import prepared
from xmod_jax.config import BYTE_VOCABULARY, DataConfig
from xmod_jax.data import documents, embedded, sources
from xmod_jax.data.tokenizer import ByteTokenizer
from xmod_jax.errors import UserError

END = 256


def in_memory(ids: sources.Tokens) -> np.ndarray:
    assert isinstance(ids, np.ndarray)
    return ids


def embedded_data() -> sources.Dataset:
    dataset = sources.load(DataConfig())
    assert isinstance(dataset, sources.Dataset)
    return dataset


def unpack(ids: sources.Tokens) -> list[bytes]:
    """The documents between the end-of-text tokens."""
    ids = in_memory(ids)
    ends = np.flatnonzero(ids == END)
    return [bytes(ids[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


@settings(deadline=None)
@given(st.lists(st.text(max_size=8), max_size=8))
def test_documents_are_packed_between_end_of_text_tokens(texts):
    ids = sources.pack(texts, ByteTokenizer())
    assert unpack(ids) == [text.encode() for text in texts]
    assert len(ids) == (sum(len(text.encode()) + 1 for text in texts) + 1 if texts else 0)


@settings(deadline=None)
@given(st.lists(st.text(max_size=3), max_size=8))
def test_every_document_is_in_one_split_once(texts):
    dataset = sources.from_texts("texts", texts, ByteTokenizer())
    train, heldout = unpack(dataset.train), unpack(dataset.heldout)
    assert sorted(train + heldout) == sorted({text.encode() for text in texts if text})


def test_split_of_a_document_does_not_depend_on_the_others():
    texts = [f"document {i}" for i in range(400)]
    few = sources.from_texts("few", texts[::3], ByteTokenizer())
    many = sources.from_texts("many", reversed(texts), ByteTokenizer())
    assert set(unpack(few.heldout)) <= set(unpack(many.heldout))
    assert set(unpack(few.train)) <= set(unpack(many.train))
    np.testing.assert_array_equal(
        many.heldout, sources.from_texts("same", texts, ByteTokenizer()).heldout
    )


def test_about_a_twentieth_is_held_out():
    share = np.mean(
        [documents.is_heldout(documents.digest(f"document {i}"), 0.05) for i in range(20_000)]
    )
    assert share == pytest.approx(0.05, abs=0.005)


def test_hash_tells_contents_and_splits_apart():
    def fingerprint(*texts: str) -> str:
        return sources.from_texts("name", texts, ByteTokenizer()).hash

    assert fingerprint("one", "two") == fingerprint("one", "two")
    assert len({fingerprint(*texts) for texts in (["one"], ["two"], ["one", "two"], [])}) == 4


def test_embedded_data_is_loaded_once_and_quickly():
    sources._open.cache_clear()
    start = time.process_time()
    dataset = sources.load(DataConfig())
    assert time.process_time() - start < 6  # 0.8 s measured
    assert sources.load(DataConfig("embedded")) is dataset


def test_embedded_data_holds_every_document_in_one_split():
    dataset = embedded_data()
    train, heldout = unpack(dataset.train), unpack(dataset.heldout)
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == {text.encode() for _, text in embedded.documents() if text}
    assert 0.02 < len(dataset.heldout) / (len(dataset.train) + len(dataset.heldout)) < 0.12


def test_embedded_data_fits_its_vocabulary_and_cannot_be_changed():
    dataset = embedded_data()
    assert dataset.vocab_size == BYTE_VOCABULARY
    for ids in map(in_memory, (dataset.train, dataset.heldout)):
        assert ids.dtype == np.uint16
        assert ids.max() == dataset.vocab_size - 1
        with pytest.raises(ValueError):
            ids[0] = 0


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("nowhere", "--data=nowhere: no such data; it is embedded, tfds:NAME, or a directory"),
        ("embedded=2,nowhere=1", "--data=nowhere: no such data"),
        ("embedded,embedded=1", "'embedded' is not NAME=WEIGHT"),
        ("embedded=0", "'embedded=0' is not NAME=WEIGHT with a positive weight"),
        ("embedded=nan", "is not NAME=WEIGHT"),
    ],
)
def test_a_source_that_cannot_be_had_is_refused_in_one_line(source, reason):
    with pytest.raises(UserError) as error:
        sources.load(DataConfig(source))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_one_data_set_is_one_however_it_is_spelled(tmp_path, monkeypatch):
    folder = prepared(tmp_path).rename(tmp_path / "run=1,lr=0.1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    spellings = ["run=1,lr=0.1", "run=1,lr=0.1/", "./run=1,lr=0.1", str(folder), "link", "link=3"]
    known = {sources.identified(DataConfig(spelling)) for spelling in spellings}
    assert len({data.hash for data in known}) == 1
    assert {data.source for data in known} == set(spellings)
    assert all(sources.load(data).hash == data.hash for data in known)


def test_data_that_are_not_there_have_no_known_content():
    for source in ("nowhere", "embedded=1,nowhere=2", "tfds:never_prepared"):
        assert sources.identified(DataConfig(source)) == DataConfig(source)
    assert sources.identified(DataConfig()).hash == embedded_data().hash


def test_other_content_than_the_run_knows_is_refused():
    with pytest.raises(UserError, match=r"other content by now .* than the run was made for"):
        sources.load(DataConfig("embedded", "0123456789abcdef"))


def test_a_text_file_as_data_is_told_to_be_prepared(tmp_path):
    (tmp_path / "my text.txt").write_text("text")
    with pytest.raises(UserError) as error:
        sources.check(DataConfig(str(tmp_path / "my text.txt")))
    assert "a file, not a prepared directory" in str(error.value)
    assert f"--input='{tmp_path}/my text.txt' --output=FOLDER" in str(error.value)


def test_a_mixture_weighs_its_parts_and_is_none_of_them():
    mixture = sources.load(DataConfig("embedded=3,embedded=1"))
    assert isinstance(mixture, sources.Mixture)
    assert mixture.weights == (0.75, 0.25)
    other = sources.load(DataConfig("embedded=1,embedded=1"))
    assert len({mixture.hash, other.hash, embedded_data().hash}) == 3


def test_equal_shares_are_one_mixture_however_they_are_spelled():
    shares = ["embedded=1,embedded=2", "embedded=0.35,embedded=0.7", "embedded=3e-1,embedded=.6"]
    assert len({sources.load(DataConfig(source)).hash for source in shares}) == 1
