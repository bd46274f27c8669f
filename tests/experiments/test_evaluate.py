"""lm-evaluation-harness over a run: offline tasks, scores of the model, refusals in one line."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness_requests import Wish
from tests.experiments.commands import refusal, run_command
from tests.experiments.many import run_many
from tests.inference import confident
from tests.training import small
from xmod_jax import records
from xmod_jax.config import ModelConfig, Routing
from xmod_jax.data.tokenizer import ByteTokenizer, Gpt2Tokenizer
from xmod_jax.hierarchy import Hierarchy, StageGroup
from xmod_jax.inference.generate import Generator, Prompts
from xmod_jax.inference.scoring import windows
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
END_2 = Gpt2Tokenizer.end_of_text


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


def test_flags_and_folders_of_any_kind_end_in_one_line(tmp_path):
    records.prepare(tmp_path / "run", small.run())
    (tmp_path / "run" / records.CHECKPOINTS / "0").mkdir(parents=True)
    (tmp_path / "file").write_text("no folder")
    run, task = f"--checkpoint={tmp_path / 'run'}", "--tasks=a"
    cases = [
        (["--checkpoint="], "checkpoint"),
        ([f"--checkpoint={tmp_path}", task], "not a run directory"),
        ([run, "--tasks=a,,b"], "empty part"),
        ([run, task, "--limit=0"], "limit"),
        ([run, task, "--batch_size=0"], "batch_size"),
        ([run, task, "--max_length=1"], "max_length"),
        ([run, task, "--num_fewshot=-1"], "num_fewshot"),
        ([run, task, "--threshold=mine"], "threshold"),
        ([run, task, "--log_samples"], "--log_samples needs --output"),
        ([run, task, "--vocabulary=nowhere"], "nowhere/vocab.bpe: no such file"),
        ([run, task, f"--include_path={tmp_path / 'file'}"], "no such folder"),
    ]
    told = run_many("evaluate", [arguments for arguments, _ in cases])
    for said, (arguments, text) in zip(told, cases, strict=True):
        assert said.status == 2 and text in said.last, (arguments, said)
        assert len(said.stderr.strip().splitlines()) == 1, said


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
        # An empty continuation is the end of the text.
        tail = encode(context[len(kept) :] + continuation).tolist() or [END]
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


def _gpt2() -> Any:
    """The adapter around a tiny model of GPT-2's vocabulary."""
    from experiments.harness import XmodLM

    backbone = dataclasses.replace(small.BACKBONE, vocab_size=Gpt2Tokenizer.vocab_size)
    wide = confident.decoder(dataclasses.replace(CONFIG, backbone=backbone), head=20)
    return XmodLM.of(wide, Threshold(wide.thresholds()), Gpt2Tokenizer(), LENGTH, 8)


def test_a_continuation_that_joins_its_context_is_scored_by_its_own_tokens():
    lm = _gpt2()
    assert len(lm.tok_encode("Ans")) > len(lm.tok_encode("Answer"))
    pairs = [("Ans", "wer"), ("Ans", "wer it"), ("Ans", " wer"), ("Ans", ""), ("Ans", "wering")]
    # Of the last the harness leaves P(ing | Ans), which is kept and told.
    assert lm._encode_pair(*pairs[-1])[1] == lm.tok_encode("Answering")[2:]
    scores = [score for score, _ in lm.loglikelihood([Request(pair) for pair in pairs])]
    assert all(np.isfinite(scores)) and max(scores) < 0
    apart = [END_2, *lm.tok_encode("Ans"), *lm.tok_encode("wer")]
    states, _ = lm._scorer._model(jnp.array([apart[:-1]], jnp.int32), lm._scorer._route)
    log_p_LV = jax.nn.log_softmax(lm._scorer._model.logits(states)[0])
    wer = lm.tok_encode("wer")
    rows = log_p_LV[-len(wer) :]
    expected = sum(float(row[token]) for row, token in zip(rows, wer, strict=True))
    np.testing.assert_allclose(scores[0], expected, rtol=1e-4)
    found = lm.get_model_info()["outcomes"]["no task"]
    assert found["requests"] == 5
    assert (found["joined"], found["empty"], found["shifted"]) == (2, 1, 1)


def test_pairs_are_encoded_as_the_harness_does_where_that_leaves_a_token():
    from lm_eval.api.model import TemplateLM

    lm = _gpt2()
    ends = ["Ans", "Ans ", "Question: what?", "a  ", "\n\n", "naïve", "The", " x"]
    kept = 0
    for context in ends:
        for continuation in ["wer", " wer", "re", "\n", "", "1", "ïve", "  two"]:
            theirs = TemplateLM._encode_pair(lm, context, continuation)
            ours = lm._encode_pair(context, continuation)
            assert ours[1] and ours[0] == theirs[0]
            if theirs[1]:
                kept += 1
                assert ours == theirs
    assert kept > 40


def test_windows_of_a_whole_text_are_those_of_the_harness():
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for count in (1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH, 3 * LENGTH + 5):
        ids = list(range(count))
        theirs = map(make_disjoint_window, get_rolling_token_windows(ids, END, LENGTH, 1))
        ours = windows([END], ids, LENGTH)
        for (context, targets), window in zip(theirs, ours, strict=True):
            assert [*context, *targets] == list(window.tokens)
            assert len(targets) == window.scored


def test_tokens_are_drawn_where_the_harness_would():
    from lm_eval.models.utils import normalize_gen_kwargs

    for said in (None, True, False):
        for temperature in (None, 0.0, 0.7):
            options: dict[str, Any] = {"until": ["a"], "max_new_tokens": 5}
            options |= {} if said is None else {"do_sample": said}
            options |= {} if temperature is None else {"temperature": temperature}
            theirs, ours = normalize_gen_kwargs(options), Wish.read(options, LENGTH)
            draws = theirs["do_sample"] and theirs.get("temperature", 1.0) > 0
            assert draws == (ours.sampling.temperature > 0)
            assert theirs["max_gen_toks"] == ours.max_tokens == 5


def test_contexts_that_the_window_does_not_hold_are_counted_and_told(capsys):
    lm = adapter(4)
    before = lm.outcomes.record().get("no task", {"context_cut": 0})["context_cut"]
    fits = "x" * (LENGTH - 3)  # with the end-of-text token before it and four bytes behind
    lm.loglikelihood([Request((fits, "four")), Request((fits + "y", "four"))])
    assert lm.outcomes.record()["no task"]["context_cut"] == before + 1
    options = {"until": [], "max_gen_toks": 4}
    lm.generate_until([Request(("x" * n, options)) for n in (LENGTH - 4, LENGTH - 3)])
    assert lm.outcomes.record()["no task"]["context_cut"] == before + 2
    assert "window of 24 tokens does not hold the context" in capsys.readouterr().err


TASKS = {
    "long": """
task: long
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.json}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}} {{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
""",
    "greedy": """
task: greedy
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.json}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: "e", max_gen_toks: 99}
metric_list: [{metric: exact_match}]
""",
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
        *common, "--tasks=choice,rolling,text,long", f"--output={folder / 'out'}", "--log_samples"
    )
    assert done.returncode == 0, done.stderr
    assert "long: 15 of 15 requests: the window of 16 tokens does not hold" in done.stderr
    assert "30/30 windows, 00:00 left" in done.stderr
    for name in ("choice", "rolling", "text"):
        assert name in done.stdout
    (path,) = (folder / "out").glob("*/results_*.json")
    found = json.loads(path.read_text())
    assert found["config"]["model"] == "xmod" and found["n-samples"]["choice"]["effective"] == 5
    cut = {task: counts["context_cut"] for task, counts in found["config"]["outcomes"].items()}
    assert cut == {"choice": 0, "rolling": 0, "text": 0, "long": 15}
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


@pytest.mark.slow
def test_a_request_that_cannot_be_answered_ends_the_evaluation_before_the_first_runs(
    folder, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    refused = _run(
        f"--checkpoint={folder / 'run'}",
        f"--include_path={folder / 'tasks'}",
        "--tasks=choice,greedy",
    )
    assert refused.returncode == 2, refused.stderr
    assert "task greedy, question 0: it asks for 99 tokens" in refused.stderr.splitlines()[-1]
    assert "scoring" not in refused.stderr


@pytest.mark.slow
def test_results_that_cannot_be_written_are_said_so_and_shown(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    place = str(folder / "run").replace("/", "__")
    (folder / "taken").mkdir()
    (folder / "taken" / place).write_text("a file where the harness wants its folder")
    refused = _run(
        f"--checkpoint={folder / 'run'}",
        f"--include_path={folder / 'tasks'}",
        "--tasks=choice",
        f"--output={folder / 'taken'}",
    )
    assert refused.returncode == 2, refused.stderr
    assert "could not be written whole" in refused.stderr.splitlines()[-1]
    assert "choice" in refused.stdout
