"""`python -m experiments.exchange`: a folder becomes a run that is used, and goes back."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from tests.exchange import folders
from tests.experiments.commands import ROOT, run_command
from tests.training import small
from xmod_jax import records
from xmod_jax.records import RunRecord, Status

_run = functools.partial(run_command, "exchange")


@pytest.mark.slow
def test_a_folder_becomes_a_run_and_a_folder_again(tmp_path):
    folders.make(tmp_path / "theirs", folders.CONFIG | {"vocab_size": 300}, shards=2)
    run, back = tmp_path / "run", tmp_path / "back"
    done = _run(f"--checkpoint={run}", f"--import_hf={tmp_path / 'theirs'}")
    assert done.returncode == 0, done.stderr
    assert "the checkpoint has 300 token ids, --data=embedded 257" in done.stderr
    record = RunRecord.load(run)
    assert record.status is Status.UNFINISHED and record.config.start is not None
    assert record.config.start.directory == str(tmp_path / "theirs")

    said = run_command(
        "generate", f"--checkpoint={run}", "--prompt=a", "--max_tokens=5", "--format=json"
    )
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["tokens"] <= 5

    done = _run(f"--checkpoint={run}", f"--export_hf={back}", "--max_shard_gb=1e-5")
    assert done.returncode == 0, done.stderr
    assert (back / "model.safetensors.index.json").exists()
    again = _run(f"--checkpoint={tmp_path / 'again'}", f"--import_hf={back}")
    assert again.returncode == 0, again.stderr
    start = RunRecord.load(tmp_path / "again").config.start
    assert start is not None and start.hash == record.config.start.hash
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "run", "back", "again"}


@pytest.mark.slow
def test_a_checkpoint_of_qwen_gets_its_ids_and_tokenizer_back(tmp_path):
    config = folders.CONFIG | {"vocab_size": 300, "bos_token_id": 280, "eos_token_id": [281, 282]}
    folders.make(tmp_path / "theirs", config)
    files = {
        "tokenizer.json": b'{"version":  "1.0"}',
        "merges.txt": b"#version: 0.2",
        "generation_config.json": b'{"eos_token_id": [281, 282], "top_k": 20}',
    }
    for name, content in files.items():
        (tmp_path / "theirs" / name).write_bytes(content)
    run, back = tmp_path / "run", tmp_path / "back"
    done = _run(f"--checkpoint={run}", f"--import_hf={tmp_path / 'theirs'}")
    assert done.returncode == 0, done.stderr
    assert "own tokenizer (merges.txt) is not read" in done.stderr
    done = _run(f"--checkpoint={run}", f"--export_hf={back}")
    assert done.returncode == 0 and not done.stderr, done.stderr
    said = json.loads((back / "config.json").read_bytes())
    assert (said["bos_token_id"], said["eos_token_id"]) == (280, [281, 282])
    assert {name: (back / name).read_bytes() for name in files} == files


# Runs `exchange` with each of the argument lists on stdin; prints status and stderr of each.
_DRIVER = """
import contextlib, io, json, sys
from absl import flags
from experiments import cli, exchange

results = []
for arguments in json.load(sys.stdin):
    sys.argv = ["exchange", *arguments]
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            cli.run(exchange.main)
        except SystemExit as error:
            results.append([error.code, said.getvalue()])
print(json.dumps(results))
"""


def _said(cases: list[list[str]]) -> list[tuple[int, str]]:
    """Status and stderr of `exchange` with each list of arguments, all in one process."""
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER],
        input=json.dumps(cases),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _broken(folder, config=None, **files):
    """A folder with a configuration, no weights, and other files of one text each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(folders.CONFIG | (config or {})))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_whatever_is_typed_or_laid_in_a_folder_is_refused_in_one_line(tmp_path):
    index = "model__safetensors__index__json"
    dots = json.dumps({"weight_map": {"model.norm.weight": ".."}})
    folders.make(tmp_path / "many", folders.CONFIG | {"num_hidden_layers": 2})
    (tmp_path / "many/config.json").write_text(
        json.dumps(folders.CONFIG | {"num_hidden_layers": 10**9})
    )
    yarn = {"rope_parameters": {"type": "yarn", "factor": 4.0, "rope_theta": 1e4}}
    sparse = tmp_path / "sparse"
    records.prepare(sparse, small.run("A1K4"))
    (sparse / "checkpoints/1").mkdir(parents=True)
    damaged = tmp_path / "damaged"
    records.prepare(damaged, small.run("dense"))
    (damaged / "checkpoints/1").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    imports = {
        "nowhere": "nowhere: no such folder",
        "Qwen/Qwen3-0.6B": "nothing is downloaded",
        "tests/__init__.py": "a file: give the folder of a checkpoint",
        "tests": "config.json: no such file",
        "a" * 300: "File name too long",
        "nul\0byte": "holds a null character",
        str(sparse): "architecture None is not known",
        str(tmp_path / "many"): "num_hidden_layers is 1000000000, the tensors are those of 2",
        str(_broken(tmp_path / "dots", **{index: dots})): "does not name files of this folder",
        str(_broken(tmp_path / "list", **{index: "[]"})): "index.json: not a JSON object",
        str(_broken(tmp_path / "yarn", yarn)): "rotary embeddings of the type 'yarn'",
        str(_broken(tmp_path / "bin", pytorch_model__bin="x")): "pickled weights are not read",
        str(_broken(tmp_path / "cut", model__safetensors="x")): "damaged or cut",
        str(_broken(tmp_path / "lora", adapter_config__json="{}")): "an adapter",
    }
    run = f"--checkpoint={tmp_path / 'run'}"
    cases = [([run, f"--import_hf={folder}"], message) for folder, message in imports.items()]
    new = f"--export_hf={tmp_path / 'new'}"
    cases += [
        ([], "--checkpoint is missing"),
        ([run], "give one of --import_hf=FOLDER and --export_hf=FOLDER"),
        ([run, new, "--import_hf=x"], "give one of --import_hf=FOLDER and --export_hf=FOLDER"),
        (["--checkpoint=tests", "--import_hf=nowhere"], "tests is not empty"),
        ([f"--checkpoint={tmp_path / 'file'}", "--import_hf=nowhere"], "file is a file"),
        ([f"--checkpoint={tmp_path / 'file/run'}", "--import_hf=nowhere"], "file is a file"),
        (["--checkpoint=nowhere", new], "nowhere: not a run directory"),
        (["--checkpoint=tests", new], "tests: not a run directory"),
        ([f"--checkpoint={tmp_path / 'many'}", new], "config.json: no field 'config'"),
        ([f"--checkpoint={sparse}", new], "a model with sparse layers stays here"),
        ([f"--checkpoint={sparse}", "--export_hf=tests"], "tests is not empty"),
        ([f"--checkpoint={sparse}", f"--export_hf={tmp_path / 'file'}"], "file is a file"),
        ([f"--checkpoint={damaged}", new], "no checkpoint can be read"),
        ([run, "--import_hf=nowhere", "--dtype=float16"], "--dtype"),
        ([run, "--import_hf=nowhere", "--max_shard_gb=0"], "--max_shard_gb"),
        (
            [run, "--import_hf=nowhere", "--max_shard_gb=nan"],
            "--max_shard_gb=nan is not a finite number",
        ),
        ([run, "--import_hf=nowhere", "more"], "unexpected argument 'more'"),
    ]
    before = sorted(tmp_path.rglob("*"))
    told = _said([arguments for arguments, _ in cases])
    for (arguments, message), (status, said) in zip(cases, told, strict=True):
        assert message in said and len(said.splitlines()) == 1, (arguments, said)
        assert status == 2, arguments
    assert sorted(tmp_path.rglob("*")) == before
