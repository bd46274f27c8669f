"""A tokenizer travels with what it made."""

import pytest

from tests.data.corpora import prepared
from xmod_jax.config import DataConfig
from xmod_jax.data import documents, sources, tokenizer, vocabulary
from xmod_jax.data.preparation import Settings, prepare
from xmod_jax.errors import UserError

TEXT = "Naïve tokenization, 123 times"


def test_the_vocabulary_is_kept_and_read_without_the_package(tmp_path, monkeypatch):
    wanted = tokenizer.get_tokenizer("gpt2").encode(TEXT)
    vocabulary.keep(tmp_path, "gpt2")
    monkeypatch.setattr(tokenizer, "packaged_vocabulary", lambda: tmp_path / "uninstalled")
    assert vocabulary.kept_name(tmp_path) == "gpt2"
    found = vocabulary.kept(tmp_path, "gpt2")
    assert found.encode(TEXT).tolist() == wanted.tolist()


def test_a_prepared_folder_gives_its_vocabulary_to_the_runs(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(f"line {i} of text" for i in range(99)))
    settings = Settings("gpt2", heldout_share=0.2, reading=documents.Reading(unit="line"))
    output = tmp_path / "out"
    prepare(documents.find([str(tmp_path / "texts")], None), output, settings, workers=1)
    dataset = sources.load(DataConfig(str(output)))
    assert dataset.vocabulary == output / "tokenizer"
    monkeypatch.setattr(vocabulary, "packaged_vocabulary", lambda: None)
    vocabulary.keep(tmp_path / "run", dataset.tokenizer, dataset.vocabulary)
    assert vocabulary.folder_of(tmp_path / "run", "gpt2") == tmp_path / "run" / "tokenizer"


def test_bytes_need_no_files(tmp_path):
    output = prepared(tmp_path)
    assert vocabulary.kept_name(output) == "bytes"
    assert vocabulary.folder_of(output, "bytes") is None
    assert vocabulary.kept(output, "bytes").decode(b"text") == "text"


def test_what_was_kept_is_never_replaced_and_a_folder_without_any_says_so(tmp_path):
    assert vocabulary.kept_name(tmp_path) is None
    vocabulary.keep(tmp_path, "bytes")
    vocabulary.keep(tmp_path, "gpt2")
    assert vocabulary.kept_name(tmp_path) == "bytes"
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize("text", ['{"name": "klingon"}', "{}", "[]", "\0", '{"name": 3}'])
def test_a_damaged_note_is_one_line(text, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        vocabulary.kept_name(tmp_path)
