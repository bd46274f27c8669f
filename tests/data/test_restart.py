"""Units of work: made again unless whole and of these settings; a text that cannot be tokenised."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.data.corpora import BYTES, corpus
from tests.experiments.commands import ROOT
from xmod_jax import claims
from xmod_jax.data import documents, preparation, shards, sources, tokenizer
from xmod_jax.data.preparation import prepare
from xmod_jax.errors import UserError


@pytest.fixture
def small_units(monkeypatch) -> None:
    """Every file is a unit of work, as large files are."""
    monkeypatch.setattr(preparation, "_UNIT_BYTES", 1)


def unfinished(tmp_path: pathlib.Path) -> tuple[tuple[documents.Source, ...], pathlib.Path]:
    """Sources, and a folder whose units are made but not merged."""
    corpus(tmp_path / "texts")
    found = documents.find([str(tmp_path / "texts")], None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "_UNIT_BYTES", 1)
        patch.setattr(preparation, "_finish", lambda *_: None)
        prepare(found, tmp_path / "out", BYTES, 1)
    return found, tmp_path / "out"


def _by_other_settings(unit: pathlib.Path) -> None:
    content = json.loads(unit.with_suffix(".json").read_text())
    unit.with_suffix(".json").write_text(json.dumps(content | {"made_by": "others"}))


@pytest.mark.parametrize(
    "damage",
    [
        _by_other_settings,
        lambda unit: unit.with_suffix(".json").write_text("{}"),
        lambda unit: unit.with_suffix(".json").write_bytes(b"\0\xff"),
        lambda unit: unit.with_suffix(".json").write_text('{"shard": {"file": 3}}'),
        lambda unit: unit.with_suffix(".heldout").unlink(),
        lambda unit: (unit.parents[1] / "train-00001.arrayrecord").unlink(),
        lambda unit: (unit.parents[1] / "train-00001.arrayrecord").write_bytes(b"cut"),
    ],
    ids=["others", "empty", "binary", "types", "no held-out", "no shard", "cut shard"],
)
def test_a_unit_that_is_not_whole_or_of_other_settings_is_made_again(
    tmp_path, directory, small_units, damage
):
    found, output = unfinished(tmp_path)
    kept = (output / "train-00000.arrayrecord").stat().st_mtime_ns
    damage(output / "units" / "00001")
    prepare(found, output, BYTES, 1)
    assert (output / "train-00000.arrayrecord").stat().st_mtime_ns == kept
    one, two = (sources.open_prepared(path, "d") for path in (directory, output))
    np.testing.assert_array_equal(one.train[0 : len(one.train)], two.train[0 : len(two.train)])


def test_a_unit_that_another_command_wrote_at_the_end_is_refused(
    tmp_path, small_units, monkeypatch
):
    found, output = unfinished(tmp_path)
    finish = preparation._finish

    def finish_late(*arguments):
        _by_other_settings(output / "units" / "00001")
        return finish(*arguments)

    monkeypatch.setattr(preparation, "_finish", finish_late)
    with pytest.raises(UserError, match=r"00001.json: not of this preparation"):
        prepare(found, output, BYTES, 1)
    assert not (output / "manifest.json").exists()


def test_a_second_process_with_other_settings_is_refused_at_once(tmp_path):
    found, output = unfinished(tmp_path)
    with claims.claim(output), pytest.raises(UserError, match="a preparation of other tokenizer"):
        prepare(found, output, dataclasses.replace(BYTES, tokenizer="gpt2"), 1)


def test_a_killed_command_leaves_no_worker_that_writes_into_the_next_one(tmp_path):
    texts, output = tmp_path / "texts", tmp_path / "out"
    corpus(texts, files=2, lines=40_000)
    script = _STOPPED.format(texts=str(texts), output=str(output))
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    found = documents.find([str(texts)], None)
    manifest = prepare(found, output, BYTES, 1)
    shards.verify(output, manifest)
    assert manifest.tokenizer == "bytes"
    assert sum(shard.documents for shard in (*manifest.train, *manifest.heldout)) == 80_000


# Kills itself as soon as its workers have told of a part: they are at work then.
_STOPPED = """
import os, signal
from tests.data.corpora import BYTES
import dataclasses, pathlib
from xmod_jax.data import documents, preparation
preparation._UNIT_BYTES = 1
settings = dataclasses.replace(BYTES, tokenizer="gpt2")
if __name__ == "__main__":
    preparation.prepare(documents.find(["{texts}"], None), pathlib.Path("{output}"), settings, 2,
                        lambda _: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_a_million_blanks_before_a_word_are_prepared(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = ({"text": "word" + " " * 1_100_000 + "word"}, *({"text": f"row {i}"} for i in range(9)))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = preparation.Settings("gpt2", heldout_share=0.0)
    manifest = prepare(documents.find([str(path)], None), tmp_path / "out", chosen, 1)
    assert manifest.tokens("train") == 1 + 1_099_999 + 1 + 9 * 2 + 10


def test_a_text_that_the_tokenizer_cannot_take_is_named_by_file_and_row(tmp_path, monkeypatch):
    def give_up(self, texts, threads):
        raise tokenizer.Untokenizable("gives up", texts.index("bad"))

    monkeypatch.setattr(tokenizer.ByteTokenizer, "encode_batch", give_up)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n{"text": ""}\n{"text": "bad"}\n')
    with pytest.raises(UserError, match=r"a.jsonl: line 4: gives up"):
        prepare(documents.find([str(path)], None), tmp_path / "out", BYTES, 1)
