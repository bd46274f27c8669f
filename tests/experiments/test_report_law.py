"""The law's section: errors, intervals and withheld groups, from whatever a law.json records."""

import dataclasses
import html
import re

import pytest

from experiments import report_law
from experiments.report_page import Page
from tests.law.sweep_directories import MINI_LAW
from xmod_jax.law.terms import Draws, LawFile

WITHHELD = {
    "L": {
        "rmse": 0.0123,
        "mae": 0.01,
        "groups": [
            {"value": 32.0, "rows": 4, "rmse": 0.0123, "mean_error": -0.002},
            {"value": 256.0, "refused": "one distinct L"},
        ],
    },
    "n_act": {"rmse": None, "mae": None, "groups": [{"value": 914135040.0, "refused": "too few"}]},
    "beyond": {"rows": 5, "rmse": 0.02, "mae": 0.015},
}


def _law(**changes):
    ranges = {"L": (32.0, 256.0), "n_act": (161643008.0, 914135040.0)}
    return LawFile(MINI_LAW, 0.98765, 0.00876, 0.0061, 8, ranges, **changes)


def _text(tmp_path, law):
    law.save(tmp_path / "law.json")
    page = Page("t", "i")
    report_law.section(page, tmp_path / "law.json", [])
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page.html())))


def test_held_out_errors_and_intervals_are_shown(tmp_path):
    laws = tuple(dataclasses.replace(MINI_LAW, e=e) for e in (0.01, 0.02, 0.03))
    text = _text(tmp_path, _law(validated=WITHHELD, bootstrap=Draws(laws, 0, 0.9, 0.008, 13)))
    for part in (
        "L = 32 4 0.0123 -0.0020",
        "L = 256, not predicted: one distinct L - - -",
        "every L 4 0.0123",
        "N_act = 914M, not predicted: too few",
        "beyond the range 5 0.0200",
        "RMSE on withheld ones, nats L: 0.0123; beyond: 0.0200",
        "90% interval, low 0.011",
        "90% interval, high 0.029",
        "90%, from 3 draws over 13 sweeps; one training lies 0.008 nats around the law",
        "L 32 to 256; N_act 162M to 914M",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    "validated",
    [
        {},
        {"L": None},
        {"L": 3},
        {"L": {"groups": "none", "rmse": "low"}},
        {"L": {"groups": [1, {"value": None, "rows": "x", "rmse": None}]}},
        {"L": {"rmse": 1e-9, "groups": [{"value": 1e30, "rows": 4, "rmse": 1e30}]}},
    ],
)
def test_what_was_not_recorded_is_said_in_words(tmp_path, validated):
    law = dataclasses.replace(_law(validated=validated), rmse=None, mae=None, r2_delta=None)
    text = _text(tmp_path, law)
    assert "RMSE on them, nats not recorded" in text and "none were drawn" in text
    assert not re.search(r"\bNone\b|\bnan\b|\d[eE]\+", text)
    if not validated:
        assert "No group was withheld" in text
