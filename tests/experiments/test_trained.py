"""What was trained is used without the data it was trained on."""

import dataclasses

import pytest

from experiments import trained
from tests.training import small
from xmod_jax import records
from xmod_jax.config import DataConfig, SparseStart
from xmod_jax.data import vocabulary
from xmod_jax.errors import UserError
from xmod_jax.training import start
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import initial_state

GONE = DataConfig("/data/that/were/moved", "0123456789abcdef")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of GPT-2 tokens whose data are gone."""
    directory = tmp_path_factory.mktemp("sweep") / "dense"
    config = dataclasses.replace(small.run("dense"), data=GONE)
    records.prepare(directory, config)
    vocabulary.keep(directory, "gpt2")
    with Checkpoints(directory, config) as checkpoints:
        checkpoints.save(initial_state(config), {})
    return records.RunRecord.load(directory)


def test_model_and_tokenizer_come_from_the_run_directory(run):
    assert trained.tokenizer(run).decode([15496, 995]) == "Hello world"
    state = trained.load(run)
    assert int(state.step) == 0 and state.optimizer is None


def test_a_run_starts_from_another_whose_data_are_gone(run):
    with pytest.raises(UserError, match=r"trained on tokens of gpt2, .* has bytes"):
        start.find(run.directory, small.run("dense"), SparseStart.NEW)
    (run.directory / "tokenizer" / "tokenizer.json").write_text('{"name": "bytes"}')
    found = start.find(run.directory, small.run("dense"), SparseStart.NEW)
    assert (found.hash, found.step) == (run.hash, 0)


def test_a_run_of_an_earlier_version_asks_its_data_for_the_tokenizer(run, tmp_path):
    records.prepare(tmp_path, small.run("dense"))
    assert trained.tokenizer(records.RunRecord.load(tmp_path)).name == "bytes"
    records.prepare(tmp_path / "gone", run.config)
    with pytest.raises(UserError, match="no such data"):
        trained.tokenizer(records.RunRecord.load(tmp_path / "gone"))
