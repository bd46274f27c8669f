"""What tasks ask of the model: options read or refused, all requests checked, outcomes counted."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import pytest

from experiments.harness_requests import Outcomes, Wish, check
from xmod_jax.errors import UserError
from xmod_jax.inference.sampling import Sampling

LENGTH = 24


class Request(NamedTuple):
    """What is read of the harness's instances."""

    args: tuple[Any, ...]
    request_type: str = "loglikelihood"
    doc_id: int = 7


class Task(NamedTuple):
    """What is read of the harness's tasks."""

    task_name: str
    instances: list[Request]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams=4 is not known"),
        ({"guidance": 1.5}, "guidance=1.5 is not known"),
        ({"max_gen_toks": LENGTH}, "window of 24 leaves no room"),
        ({"max_new_tokens": 10**9}, "window of 24 leaves no room"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 is less than 1"),
        ({"max_gen_toks": "many"}, "max_gen_toks='many' is not a whole number"),
        ({"max_gen_toks": 3.5}, "max_gen_toks=3.5 is not a whole number"),
        ({"max_gen_toks": math.inf}, "max_gen_toks=inf is not a whole number"),
        ({"max_gen_toks": True}, "max_gen_toks=True is not a whole number"),
        ({"do_sample": True, "temperature": -1.0}, "temperature must be at least 0"),
        ({"temperature": math.nan, "do_sample": True}, "temperature must be at least 0"),
        ({"temperature": "hot"}, "temperature='hot' is not a number"),
        ({"do_sample": "false"}, "do_sample='false' is neither"),
        ({"do_sample": True, "top_p": 0}, "top_p must be above 0"),
        ({"do_sample": False, "top_k": -1}, "top_k must be at least 0"),
        ({"until": [1, 2]}, "until=\\[1, 2\\] is neither a text"),
        ({"until": {"a": "b"}}, "until={'a': 'b'} is neither a text"),
        ("until: a", "is no mapping"),
        (None, "is no mapping"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Wish.read(options, LENGTH)


def test_options_are_read_as_the_harness_means_them():
    plain = Wish.read({"until": "stop", "num_beams": 1}, LENGTH)
    assert plain.stop.strings == ("stop",) and plain.sampling == Sampling()
    assert plain.max_tokens == LENGTH // 2 and Wish.read({}, 4096).max_tokens == 256
    assert Wish.read({"until": ["", "a"], "max_gen_toks": "8"}, LENGTH).stop.strings == ("a",)
    assert Wish.read({"temperature": 0.7}, LENGTH).sampling == Sampling(0.7)
    assert Wish.read({"temperature": 0.7, "do_sample": False}, LENGTH).sampling == Sampling()
    assert Wish.read({"do_sample": True, "top_k": 3.0}, LENGTH).sampling == Sampling(1.0, 3)
    assert Wish.read({"until": None, "max_gen_toks": None}, LENGTH).stop.strings == ()


def test_all_requests_of_all_tasks_are_looked_at():
    fine = Task("fine", [Request(("a", "b")), Request(("a", {"until": []}), "generate_until")])
    check([fine], LENGTH)
    greedy = Task("greedy", [Request(("a", {"max_gen_toks": 99}), "generate_until")])
    with pytest.raises(UserError, match="task greedy, question 7: it asks for 99 tokens"):
        check([fine, greedy], LENGTH)
    odd = Task("odd", [Request(("a", "\ud800"))])
    with pytest.raises(UserError, match="task odd, question 7: not UTF-8 text"):
        check([fine, odd], LENGTH)


def test_outcomes_are_counted_by_task_and_kind():
    outcomes = Outcomes(LENGTH)
    outcomes.add("quiet", context_cut=False)
    for cut in (True, True, False):
        outcomes.add("loud", context_cut=cut, joined=not cut)
    outcomes.add(None, empty=True)
    first, second, third = outcomes.lines()
    assert first.startswith("loud: 2 of 3 requests: the window of 24 tokens does not hold")
    assert second.startswith("loud: 1 of 3 requests: the tokenizer joins")
    assert third.startswith("no task: 1 of 1 requests: the continuation is empty")
    found = json.loads(json.dumps(outcomes.record()))
    assert found["quiet"] == {
        "requests": 1,
        "context_cut": 0,
        "text_in_parts": 0,
        "joined": 0,
        "shifted": 0,
        "empty": 0,
    }
    assert found["loud"]["context_cut"] == 2 and found["loud"]["joined"] == 1
