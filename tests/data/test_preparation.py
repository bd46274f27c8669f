"""Prepared directories: every token once, the same held-out set, and what breaks on the way."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import BYTES, END, corpus, prepared
from tests.experiments.commands import ROOT, run_command
from tests.training import small
from xmod_jax import claims, records
from xmod_jax.config import Compute, DataConfig
from xmod_jax.data import documents, pipeline, preparation, sources
from xmod_jax.data.preparation import prepare
from xmod_jax.data.shards import Manifest
from xmod_jax.errors import UserError
from xmod_jax.training import loop


@pytest.fixture
def small_units(monkeypatch) -> None:
    """Every file is a unit of work, as large files are."""
    monkeypatch.setattr(preparation, "_UNIT_BYTES", 1)


def split(ids: np.ndarray) -> list[str]:
    """Documents between end-of-text tokens."""
    ends = np.flatnonzero(ids == END)
    return [bytes(ids[a + 1 : b].tolist()).decode() for a, b in itertools.pairwise(ends)]


def test_every_document_is_in_one_split_in_order(directory, tmp_path):
    texts = corpus(tmp_path)
    dataset = sources.open_prepared(directory, "data")
    train = split(dataset.train[0 : len(dataset.train)])
    heldout = split(dataset.heldout[0 : len(dataset.heldout)])
    held = [t for t in texts if documents.is_heldout(documents.digest(t), 0.2)]
    assert train == [text for text in texts if text not in set(held)]
    assert heldout == sorted(held, key=documents.digest)
    manifest = Manifest.read(directory)
    assert manifest.tokens("train") == len(dataset.train) - 1
    counted = sum(source["documents"] for source in manifest.sources)
    assert counted == len(texts) == len(train) + len(heldout)


def test_units_workers_and_file_bounds_change_no_token(directory, tmp_path, small_units):
    corpus(tmp_path / "texts")
    found = documents.find([str(tmp_path / "texts")], None)
    manifest = prepare(found, tmp_path / "out", BYTES, workers=2)
    assert len(manifest.train) == 3
    one, three = (sources.open_prepared(path, "d") for path in (directory, tmp_path / "out"))
    for ours, theirs in ((one.train, three.train), (one.heldout, three.heldout)):
        np.testing.assert_array_equal(ours[0 : len(ours)], theirs[0 : len(theirs)])


def test_a_finished_directory_with_a_damaged_shard_is_not_called_prepared(tmp_path):
    corpus(tmp_path / "texts")
    found = documents.find([str(tmp_path / "texts")], None)
    whole = prepare(found, tmp_path / "out", BYTES, workers=1)
    assert prepare(found, tmp_path / "out", BYTES, workers=1) == whole
    shard = tmp_path / "out" / whole.train[0].file
    shard.write_bytes(shard.read_bytes()[:500])
    with pytest.raises(UserError, match="cut or replaced; delete the folder and prepare again"):
        prepare(found, tmp_path / "out", BYTES, workers=1)


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_every_token_is_a_target_once_an_epoch_over_all_processes(directory, process_count):
    dataset = sources.open_prepared(directory, "data")
    targets = len(dataset.train) - 1
    L = 48
    windows = -(-targets // L)
    assert targets % L  # the last window is filled up
    steps = windows // 8 * 8 // 8
    held: list[np.ndarray] = []
    for process in range(process_count):
        batches = pipeline.train_iterator(dataset, L, 8, 0, process, process_count)
        held += [next(batches) for _ in range(steps)]
    rest = pipeline.train_iterator(dataset, L, 8, 0)
    last = [next(rest) for _ in range(steps + 1)][-1][: windows - 8 * steps]
    seen = np.concatenate([*held, last])
    whole = dataset.train[0 : len(dataset.train)].astype(np.int32)
    filled = np.concatenate([whole, np.full(windows * L - targets, END)])
    expected = np.stack([filled[i * L : i * L + L + 1] for i in range(windows)])
    order = lambda rows: rows[np.lexsort(rows.T[::-1])]
    np.testing.assert_array_equal(order(seen), order(expected))


@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_resuming_from_disk_at_any_process_count_goes_on_in_order(directory, stretches, data):
    dataset = sources.open_prepared(directory, "data")
    whole = pipeline.train_iterator(dataset, 33, 4, 5)
    state = None
    for stretch in stretches:
        count = data.draw(st.sampled_from([1, 2, 4]))
        parts = []
        for process in range(count):
            iterator = pipeline.train_iterator(dataset, 33, 4, 5, process, count)
            if state:
                iterator.set_state(json.loads(state))
            parts.append(np.stack([next(iterator) for _ in range(stretch)]))
        state = json.dumps(iterator.get_state())
        expected = np.stack([next(whole) for _ in range(stretch)])
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
    assert state is not None and len(state) < 200


def test_a_mixture_draws_by_weight_and_resumes(directory):
    dataset = sources.open_prepared(directory, "data")
    mixture = sources.Mixture((dataset, dataset_of(7)), (0.75, 0.25))
    batches = pipeline.train_iterator(mixture, 16, 8, 0)
    rows = np.concatenate([next(batches) for _ in range(50)])
    assert np.mean(np.all(rows == 7, axis=1)) == pytest.approx(0.25, abs=0.01)
    again = pipeline.train_iterator(mixture, 16, 8, 0)
    again.set_state(json.loads(json.dumps(batches.get_state())))
    np.testing.assert_array_equal(next(again), next(batches))
    held = np.concatenate(list(pipeline.eval_batches(mixture, 16, 4, 40)))
    assert np.mean(np.all(held == 7, axis=1)) == pytest.approx(0.25, abs=0.01)


def dataset_of(token: int) -> sources.Dataset:
    ids = np.full(5000, token, np.uint16)
    return sources.Dataset(ids, ids, 257, "constant", "hash")


@pytest.mark.parametrize("L", [16, 48, 256])
def test_context_length_and_batch_size_change_no_heldout_token(directory, L):
    dataset = sources.open_prepared(directory, "data")
    whole = dataset.heldout[0 : len(dataset.heldout)]
    for batch_size in (1, 5):
        rows = np.concatenate(list(pipeline.eval_batches(dataset, L, batch_size, 10**6)))
        np.testing.assert_array_equal(rows[:, 1:].ravel(), whole[1 : len(rows) * L + 1])


def test_until_a_unit_is_finished_other_settings_may_take_the_folder(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes(b"good\nbad \xff\nmore\n" * 50)
    found = documents.find([str(tmp_path / "texts")], None)
    output = tmp_path / "out"
    strict = preparation.Settings("bytes", reading=documents.Reading(unit="line"))
    mending = dataclasses.replace(
        strict, reading=documents.Reading(unit="line", replace_invalid=True)
    )
    with pytest.raises(UserError, match="--replace_invalid"):
        prepare(found, output, strict, 1)
    (output / "train-00007.arrayrecord").touch()  # as of a unit that died before its note
    manifest = prepare(found, output, mending, 1)
    assert manifest.sources[0]["invalid"] == 50 and len(list(output.glob("train-*"))) == 1
    with pytest.raises(UserError, match="other reading"):
        prepare(found, output, strict, 1)


def test_a_second_process_waits_for_the_first_and_uses_what_it_made(tmp_path):
    corpus(tmp_path / "texts")
    found = documents.find([str(tmp_path / "texts")], None)
    output = tmp_path / "out"
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with claims.claim(output):
            second = pool.submit(prepare, found, output, BYTES, 1)
            assert not concurrent.futures.wait([second], timeout=1).done
        made = second.result(timeout=120)
    assert made == prepare(found, output, BYTES, 1)


def test_without_held_out_documents_it_warns_and_training_is_refused_at_once(tmp_path):
    (tmp_path / "book.txt").write_text("line\n" * 2000)
    flags = [f"--input={tmp_path / 'book.txt'}", "--tokenizer=bytes", "--heldout_share=0"]
    done = run_command("prepare_data", *flags, f"--output={tmp_path / 'out'}")
    assert done.returncode == 0 and "no document is held out" in done.stderr
    config = dataclasses.replace(small.run(), data=DataConfig(str(tmp_path / "out")))
    with pytest.raises(UserError, match="held-out data has"):
        loop.train(config, tmp_path / "run", lambda _: None)
    assert not (tmp_path / "run").exists()


def test_an_output_within_the_input_is_refused_and_nothing_made(tmp_path):
    corpus(tmp_path / "texts")
    before = sorted((tmp_path / "texts").iterdir())
    for output in ("texts", "texts/out", "texts/deep/../out"):
        done = run_command(
            "prepare_data", f"--input={tmp_path}/texts", f"--output={tmp_path}/{output}"
        )
        assert done.returncode == 2 and "lies within --input" in done.stderr, done.stderr
    assert sorted((tmp_path / "texts").iterdir()) == before


def test_the_command_prepares_once_and_verifies(tmp_path):
    corpus(tmp_path / "texts")
    flags = [f"--input={tmp_path / 'texts'}", f"--output={tmp_path / 'out'}", "--documents=line"]
    done = run_command("prepare_data", *flags, "--tokenizer=gpt2")
    assert done.returncode == 0, done.stderr
    assert "to train on" in done.stdout and "(gpt2)" in done.stdout
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    again = run_command("prepare_data", *flags, "--tokenizer=gpt2")
    assert again.returncode == 0 and again.stdout == done.stdout
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    other = run_command("prepare_data", *flags, "--tokenizer=bytes")
    assert other.returncode == 2 and "holds a preparation of other tokenizer" in other.stderr
    whole = run_command("prepare_data", f"--output={tmp_path / 'out'}", "--verify")
    assert whole.returncode == 0 and "is whole" in whole.stdout


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--output is missing"),
        (["--output={}/out"], "--input is missing"),
        (["--output={}/out", "--input={}/none"], "no such file or folder"),
        (["--output={}", "--input={}/texts"], "holds other files"),
        (["--output={}/file", "--input={}/texts"], "is a file"),
        (["--output={}/out", "--input={}/texts/0.txt"], "no document to train on (0 held out)"),
        (["--output={}/out", "--input={}/texts", "--tokenizer=bpe"], "should be one of"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path, flags, reason):
    corpus(tmp_path / "texts")
    (tmp_path / "texts" / "0.txt").write_text("")
    (tmp_path / "file").touch()
    done = run_command("prepare_data", *(flag.format(tmp_path) for flag in flags))
    assert done.returncode == 2, done.stderr
    assert reason in done.stderr and "Traceback" not in done.stderr


_KILLED = """
import os, pathlib, signal, sys
from xmod_jax.data import documents, preparation
preparation._UNIT_BYTES = 1
at, texts, output = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
calls = 0
def die_at(function):
    def wrapper(*args):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return wrapper
preparation.ShardWriter.add = die_at(preparation.ShardWriter.add)
preparation.ShardWriter.close = die_at(preparation.ShardWriter.close)
preparation.heldout_files.write = die_at(preparation.heldout_files.write)
preparation.storage.write_json = die_at(preparation.storage.write_json)
preparation.shutil.rmtree = die_at(preparation.shutil.rmtree)
settings = preparation.Settings(
    "bytes", heldout_share=0.2, reading=documents.Reading(unit="line"))
preparation.prepare(documents.find([texts], None), output, settings, 1)
"""


def test_killed_anywhere_it_goes_on_without_repeating_finished_files(directory, tmp_path):
    texts, output = tmp_path / "texts", tmp_path / "out"
    corpus(texts)
    noted: set[pathlib.Path] = set()
    kills = 0
    for at in (2, 3, 4, 5, 6, 7, 3, 2, 1, 2, 10**6):
        written = {path: path.stat().st_mtime_ns for path in output.glob("train-*")}
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, str(at), str(texts), str(output)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        kills += done.returncode == -signal.SIGKILL
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        for note in noted:
            shard = output / f"train-{note.stem}.arrayrecord"
            assert shard.stat().st_mtime_ns == written[shard]
        noted = set((output / "units").glob("*.json"))
    assert kills >= 5
    one, two = (sources.open_prepared(path, "d") for path in (directory, output))
    assert Manifest.read(output).tokens("train") == Manifest.read(directory).tokens("train")
    for ours, theirs in ((one.train, two.train), (one.heldout, two.heldout)):
        np.testing.assert_array_equal(ours[0 : len(ours)], theirs[0 : len(theirs)])
    assert not list(output.rglob("*.tmp")) and not (output / "units").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path):
    corpus(tmp_path / "texts", files=2, lines=20_000)
    command = [
        sys.executable,
        "-m",
        "experiments.prepare_data",
        f"--input={tmp_path / 'texts'}",
        f"--output={tmp_path / 'out'}",
        "--tokenizer=bytes",
        "--documents=line",
    ]
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 400; exec "$@"', "-", *command]
    full = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 2, full.stderr
    assert len(full.stderr.strip().splitlines()) == 1 and "train-00000" in full.stderr
    assert not list((tmp_path / "out").glob("*train-*"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_TFDS = """
import sys
import tensorflow_datasets as tfds
class TinyTexts(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}))
    def _split_generators(self, manager):
        return {"train": self._generate_examples()}
    def _generate_examples(self):
        for i in range(300):
            yield i, {"text": f"document {i} with ünicode"}
def build():
    TinyTexts(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""


def test_a_tfds_data_set_is_prepared_at_first_use_without_tensorflow(tmp_path, monkeypatch):
    package = tmp_path / "package" / "tiny_texts"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny_texts_dataset_builder.py").write_text(_TFDS)
    built = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tiny_texts.tiny_texts_dataset_builder import build; build()",
            str(tmp_path / "tfds"),
        ],
        cwd=tmp_path / "package",
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv(sources.PREPARED, str(tmp_path / "cache"))
    script = (
        "import sys; from xmod_jax.config import DataConfig; from xmod_jax.data import sources;"
        "d = sources.load(DataConfig('tfds:tiny_texts'));"
        "print(d.hash, len(d.train), 'tensorflow' in sys.modules)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert runs[0] == runs[1] and runs[0][2] == "False"
    dataset = sources.load(DataConfig("tfds:tiny_texts"))
    assert isinstance(dataset, sources.Dataset)
    texts = split(dataset.train[0 : len(dataset.train)])
    texts += split(dataset.heldout[0 : len(dataset.heldout)])
    assert sorted(texts) == sorted(f"document {i} with ünicode" for i in range(300))
    with pytest.raises(UserError, match=r"TFDS no_such\[train\]"):
        sources.load(DataConfig("tfds:no_such"))


@pytest.mark.slow
@pytest.mark.timed
def test_preparing_and_reading_are_fast(capsys):
    """At least 0.7 of raw tiktoken on the same cores; reading 20 times what mini training eats."""
    from experiments.suites import data as suite
    from experiments.suites import models, timing

    texts = suite.python_sources()
    assert sum(map(len, texts)) > 10_000_000
    setting = models.Setting((), (), 256, 4, 128, Compute.FLOAT32, timing.Rounds(3, 600), (), False)
    rate = {row["model"]: row["tokens/s"] for row in suite.measured(texts, setting)}
    ratio = rate[suite.PREPARE] / rate[suite.RAW]
    with capsys.disabled():
        print(f"\npreparing {rate[suite.PREPARE]:,.0f} tokens/s, {ratio:.2f} of raw tiktoken")
        print(f"reading {rate[suite.READ]:,.0f} tokens/s")
    assert ratio >= 0.7
    assert rate[suite.READ] >= 20 * 6000  # mini training takes 2 to 6 thousand tokens/s


@pytest.mark.slow
def test_a_run_on_a_prepared_directory_resumes_to_the_same_curve(tmp_path):
    config = dataclasses.replace(small.run(), data=DataConfig(str(prepared(tmp_path))))

    def stop(progress: loop.Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    curves = []
    for name, stops in (("whole", []), ("resumed", [stop])):
        for progress in stops:
            with pytest.raises(KeyboardInterrupt):
                loop.train(config, tmp_path / name, progress)
        loop.train(config, tmp_path / name, lambda _: None)
        lines = records.read_lines(tmp_path / name / records.TRAIN)
        curves.append([(line["step"], line["loss"]) for line in lines])
    assert len(curves[0]) == config.train.steps and curves[0] == curves[1]


def test_training_on_data_that_is_not_prepared_touches_nothing(tmp_path):
    flags = ["--experiment=k_sweep_2k", "--scale=mini", "--run=dense", "--data=nowhere"]
    wrong = run_command("train", *flags, f"--workdir={tmp_path / 'other'}")
    assert wrong.returncode == 2 and "prepare_data --input=FILES" in wrong.stderr
    assert not (tmp_path / "other").exists()
