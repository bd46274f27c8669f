"""`python -m experiments.design`: the answer as table and JSON, and mistakes in one line."""

import dataclasses
import functools
import json

import pytest

from tests.experiments.commands import refusal, run_command
from tests.law.grid import paper_rows
from xmod_jax.law import bootstrap, fit
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.stage import Search
from xmod_jax.law.terms import LawFile

ASKED = ("--train_flops=1e20", "--context=16384", "--n_act=556M")


_run = functools.partial(run_command, "design", timeout=120)


@pytest.fixture(scope="module")
def law(tmp_path_factory):
    table = Table.of(observe(paper_rows(noise=0.008, seed=1)))
    found = fit.fit(table, Search(starts=1))
    quality = dataclasses.asdict(found.quality)
    draws = bootstrap.draw(table, found, 10)
    path = tmp_path_factory.mktemp("law") / "law.json"
    LawFile(
        found.law, **quality, n_observations=101, ranges=fit.ranges(table), bootstrap=draws
    ).save(path)
    return path


def test_json_with_the_published_law():
    done = _run("--law=paper", *ASKED, "--A=1", "--format=json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["K"], answer["A"], answer["interval"]) == (16, 1, None)
    assert answer["delta"] == pytest.approx(-0.1177, abs=1e-4)
    assert answer["total_params"] == pytest.approx(3.374e9, rel=1e-3)
    assert {"phi_ratio", "tokens", "memory", "asymptotic", "warnings"} <= set(answer)
    assert {choice["K"] for choice in answer["near_optimal"]} >= {12, 16, 20}


def test_json_with_a_fitted_law_has_intervals(law):
    done = _run(f"--law={law}", *ASKED, "--format=json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["interval"][0] <= answer["delta"] <= answer["interval"][1]
    assert len(answer["K_interval"]) == len(answer["A_interval"]) == 2


def test_table_for_people(law):
    done = _run(f"--law={law}", *ASKED, "--K=8", "--max_params=2B", "--max_depth=120")
    assert done.returncode == 0, done.stderr
    for text in ("A1K8", "90% intervals", "within 0.005 nats", "GB optimizer state", "N_act^"):
        assert text in done.stdout


@pytest.mark.parametrize("flops", ["1e40", "2.8e12"])
def test_a_compute_far_from_the_fitted_one_is_told_at_the_end(flops):
    done = _run("--law=paper", f"--train_flops={flops}", "--context=512", "--n_act=165M")
    assert done.returncode == 0, done.stderr
    *_, count = (line for line in done.stdout.splitlines() if line.endswith(" warnings:"))
    last = done.stdout[done.stdout.index(count) :].strip().splitlines()
    assert len(last) == int(count.split()[0]) + 1
    told = (
        f"warning: train_flops = {float(flops):.4g} lies outside the fitted range 3e+19 to 1.5e+20"
    )
    assert any(line.startswith(told) for line in last)


def test_mistakes_are_one_line_and_status_2(tmp_path):
    (tmp_path / "law.json").write_text("{}")
    for arguments, words in (
        (("--law=paper", "--train_flops=1e20", "--context=2048"), "give either --n_act"),
        ((f"--law={tmp_path / 'law.json'}", *ASKED), "missing e, u"),
        (("--law=paper", *ASKED, "--max_params=1M"), "smallest"),
        (("--law=paper", *ASKED, "--max_params="), "--max_params= is empty"),
        (("--law=", *ASKED), "--law= is empty"),
        ((f"--law={tmp_path}", *ASKED), "folder"),
    ):
        assert words in refusal("design", *arguments)
