"""lm-evaluation-harness over a run: offline tasks, scores of the model, refusals in one line."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.experiments.commands import refusal, run_command
from tests.inference import confident
from tests.training import small
from xmod_jax import records
from xmod_jax.config import ModelConfig, Routing
from xmod_jax.data.tokenizer import ByteTokenizer
from xmod_jax.errors import UserError
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.inference.generate import Generator, Prompts
from xmod_jax.inference.text import Stop, Text, generate
from xmod_jax.model import Decoder, Threshold
from xmod_jax.training.checkpoint import Checkpoints
from xmod_jax.training.step import initial_state

_run = functools.partial(run_command, "evaluate")
LENGTH = 24
CONFIG = ModelConfig(
    small.BACKBONE, Hierarchy(1, (StageGroup(1, 2),), sparsity=2), Routing(router_init_std=0.5)
)
END = ByteTokenizer.end_of_text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--checkpoint is missing"),
        (("--checkpoint=x",), "--tasks is missing"),
        (("--checkpoint=nowhere", "--tasks=a"), "nowhere: not a run directory"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    assert message in refusal("evaluate", *arguments)


lm_eval = pytest.importorskip("lm_eval", reason="needs the packages of requirements-hf.lock")


class Request(NamedTuple):
    """What the adapter reads of the harness's instances."""

    args: tuple[Any, ...]


@functools.cache
def model() -> Decoder:
    return confident.decoder(CONFIG, head=20)


@functools.cache
def adapter(batch_size: int) -> Any:
    from experiments.harness import XmodLM

    route = Threshold(model().thresholds())
    return XmodLM.of(model(), route, ByteTokenizer(), LENGTH, batch_size)


def _log_p(ids: list[int]) -> np.ndarray:
    """Log-probabilities [L, V] behind each token, by the model itself."""
    states, _ = model()(jnp.array([ids], jnp.int32), Threshold(model().thresholds()))
    return np.asarray(jax.nn.log_softmax(model().logits(states)[0]), np.float64)


def _score(context: list[int], continuation: list[int]) -> float:
    """Of a continuation that fits: the text's last tokens run at once."""
    ids = [*context, *continuation][-(LENGTH + 1) :]
    rows = _log_p(ids[:-1])[-len(continuation) :] if continuation else np.zeros((0, 257))
    return float(sum(row[token] for row, token in zip(rows, continuation, strict=True)))


PAIRS = [
    ("Two and two ", "are four"),
    ("", "no context"),
    ("x", ""),
    ("", ""),
    ("   ", "blank"),
    ("a context that is longer than the window of the model", " short"),
    ("naïve ", "naïveté"),
]


@pytest.mark.slow
def test_loglikelihoods_are_those_of_the_model_in_every_batch_and_order():
    encode = ByteTokenizer().encode
    expected = {}
    for context, continuation in PAIRS:
        kept = context.rstrip()  # blanks at the end belong to the continuation
        tail = encode(context[len(kept) :] + continuation).tolist()
        expected[context, continuation] = _score([END, *encode(kept).tolist()], tail)
    for batch_size in (1, 2, 8):
        order = np.random.default_rng(batch_size).permutation(len(PAIRS))
        asked = [Request(PAIRS[index]) for index in order]
        for request, (score, _) in zip(
            asked, adapter(batch_size).loglikelihood(asked), strict=True
        ):
            np.testing.assert_allclose(score, expected[request.args], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_text_longer_than_the_window_is_scored_whole_by_both_calls():
    text = "a text of more than two windows, every token of it scored once"
    ids = ByteTokenizer().encode(text).tolist()
    total, done = 0.0, 0
    while done < len(ids):
        end = min(len(ids), done + LENGTH)
        first = [END, *ids][max(0, end - LENGTH) : end]
        rows = _log_p(first)[-(end - done) :]
        total += sum(row[token] for row, token in zip(rows, ids[done:end], strict=True))
        done = end
    (rolling,) = adapter(2).loglikelihood_rolling([Request((text,))])
    ((as_continuation, _),) = adapter(2).loglikelihood([Request(("", text))])
    np.testing.assert_allclose([rolling, as_continuation], total, rtol=1e-4)


def _alone(context: str, most: int, stop: Stop) -> str:
    """A greedy text by the generator, one prompt at a time."""
    generator = Generator(model(), Threshold(model().thresholds()))
    ids = [END, *ByteTokenizer().encode(context).tolist()][-(LENGTH - most) :]
    text = Text(ByteTokenizer(), stop)
    for _ in generate(generator, Prompts.ragged([ids]), [text], most):
        pass
    return text.text


@pytest.mark.slow
def test_generated_texts_obey_their_own_stop_strings_in_every_batch_and_order():
    contexts = ["Two", "", "a context that is longer than the window", "b"]
    free = {context: _alone(context, 8, Stop()) for context in contexts}
    stops = {context: text[3:4] for context, text in free.items() if len(text) > 3}
    asked = [Request((context, {"until": ["\0"], "max_gen_toks": 8})) for context in contexts]
    asked += [Request((c, {"until": stop, "max_gen_toks": 8})) for c, stop in stops.items()]
    asked += [Request((c, {"until": ["", stop], "max_new_tokens": 8})) for c, stop in stops.items()]
    expected = [*free.values(), *[free[c].split(stop)[0] for c, stop in [*stops.items()] * 2]]
    assert stops
    for batch_size in (1, 3, 16):
        order = np.random.default_rng(batch_size).permutation(len(asked))
        made = adapter(batch_size).generate_until([asked[index] for index in order])
        assert made == [expected[index] for index in order]


@pytest.mark.slow
def test_draws_depend_on_the_request_and_its_repetition_alone():
    options = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 6, "until": []}
    asked = [Request((context, options)) for context in ("a", "b", "a", "c")]
    made = adapter(4).generate_until(asked)
    assert made[0] != made[2]
    assert adapter(1).generate_until(asked[::-1])[::-1] == [made[2], made[1], made[0], made[3]]


def test_options_that_are_not_known_are_refused():
    from experiments.harness import Wish

    refused: list[tuple[dict[str, Any], str]] = [
        ({"num_beams": 4}, "num_beams=4 is not known"),
        ({"max_gen_toks": LENGTH}, "leaves no room"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be at least 0"),
    ]
    for options, message in refused:
        with pytest.raises(UserError, match=message):
            Wish.read(options, LENGTH)
    wish = Wish.read({"until": "stop", "temperature": 0.7, "num_beams": 1}, LENGTH)
    assert wish.stop.strings == ("stop",) and wish.sampling.temperature == 0


TASKS = {
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.json}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: byte_perplexity}]
""",
    "text": """
task: text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: "e", max_gen_toks: 4}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """A run with a checkpoint of its start, and a folder of tasks over a local file."""
    folder = tmp_path_factory.mktemp("evaluate")
    config = small.run()
    records.prepare(folder / "run", config)
    with Checkpoints(folder / "run", config) as checkpoints:
        checkpoints.save(initial_state(config), {})
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        (folder / f"tasks/{name}.yaml").write_text(text.replace("FOLDER", str(folder / "tasks")))
    questions = [
        {"question": f"Question {n}:", "choices": ["yes", "no", "maybe"], "answer": n % 3}
        for n in range(5)
    ]
    (folder / "tasks/choice.json").write_text("\n".join(map(json.dumps, questions)))
    return folder


@pytest.mark.slow
def test_tasks_of_all_three_kinds_run_offline(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    common = (f"--checkpoint={folder / 'run'}", f"--include_path={folder / 'tasks'}")
    done = _run(
        *common, "--tasks=choice,rolling,text", f"--output={folder / 'out'}", "--log_samples"
    )
    assert done.returncode == 0, done.stderr
    for name in ("choice", "rolling", "text"):
        assert name in done.stdout
    (path,) = (folder / "out").glob("*/results_*.json")
    found = json.loads(path.read_text())
    assert found["config"]["model"] == "xmod" and found["n-samples"]["choice"]["effective"] == 5
    from experiments.harness import XmodLM

    lm = XmodLM(str(folder / "run"), batch_size=2)
    (samples,) = (folder / "out").glob("*/samples_choice_*.jsonl")
    answers = json.loads(samples.read_text().splitlines()[0])["resps"]
    asked = [Request(("Question 0:", f" {choice}")) for choice in ("yes", "no", "maybe")]
    scores = [score for score, _ in lm.loglikelihood(asked)]
    np.testing.assert_allclose([float(entry[0][0]) for entry in answers], scores, rtol=1e-4)
    questions = [f"Question {n}:" for n in range(5)]
    total = sum(lm.loglikelihood_rolling([Request((question,)) for question in questions]))
    perplexity = np.exp(-total / sum(map(len, questions)))
    np.testing.assert_allclose(
        found["results"]["rolling"]["byte_perplexity,none"], perplexity, rtol=1e-4
    )
    (samples,) = (folder / "out").glob("*/samples_text_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    options = {"until": "e", "max_gen_toks": 4}
    assert answers == lm.generate_until([Request((question, options)) for question in questions])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("nosuchtask", "no task is called nosuchtask"),
        ("broken", "could not read"),
        ("absent", "data cannot be had"),
        ("binary", "cannot be run"),
        ("keyless", "cannot be run"),
        ("choice", "--num_fewshot=5: choice has 5 examples"),
    ],
)
def test_a_task_that_cannot_be_had_is_one_line(folder, tmp_path, monkeypatch, task, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    whole = TASKS["choice"].replace("FOLDER", str(folder / "tasks"))
    named = whole.replace("task: choice", f"task: {task}")
    (tmp_path / "choice.json").write_text((folder / "tasks/choice.json").read_text())
    (tmp_path / "binary.json").write_bytes(bytes(range(256)) * 40)
    text = {
        "broken": named + "metric_list: [",
        "keyless": named.replace("question", "nosuchkey"),
        "choice": whole,
        "nosuchtask": whole,
    }
    own = named.replace(str(folder / "tasks/choice.json"), str(tmp_path / f"{task}.json"))
    (tmp_path / "task.yaml").write_text(text.get(task, own))
    refused = _run(
        f"--checkpoint={folder / 'run'}",
        f"--include_path={tmp_path}",
        f"--tasks={task}",
        "--num_fewshot=5",
    )
    assert refused.returncode == 2, refused.stderr
    assert "Traceback" not in refused.stderr
    assert message in refused.stderr.strip().splitlines()[-1]
