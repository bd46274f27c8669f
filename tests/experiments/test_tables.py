"""Numbers as people write them, and tables whose columns are aligned."""

import dataclasses
import math

import pytest

from experiments import law_tables, tables
from tests.law.grid import paper_rows
from xmod_jax.law.fit import Fit, Quality
from xmod_jax.law.observations import Table, observe
from xmod_jax.law.terms import Draws, Law


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (999.6, "1k"),
        (2048, "2.05k"),
        (543328256, "543M"),
        (2.64e9, "2.64B"),
        (9.994e14, "999T"),
        (9.996e14, "1e15"),
        (1.88e18, "1.88e18"),
        (-2.64e9, "-2.64B"),
        (0.00001234, "1.23e-5"),
        (None, "-"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_counts_are_short(value, text):
    assert tables.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.8e18, "2.8e18"),
        (9.04e9, "9.04e9"),
        (1e20, "1e20"),
        (9.999e9, "1e10"),
        (12_345.0, "1.23e4"),
        (512, "512"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_flops_are_written_with_a_bare_power(value, text):
    assert tables.flops(value) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (32768.0, 4, "32768"),
        (32767.6, 4, "32768"),
        (105.21108, 6, "105.211"),
        (0.0123456, 4, "0.01235"),
        (0.1, 4, "0.1"),
        (0.5, 6, "0.5"),
        (1e6, 4, "1e6"),
        (-1.5e-7, 4, "-1.5e-7"),
        (1234567.0, 3, "1.23e6"),
        (-0.0, 4, "0"),
        (None, 4, "-"),
        (-math.inf, 4, "-"),
    ],
)
def test_numbers_have_neither_padding_nor_a_signed_power(value, digits, text):
    assert tables.number(value, digits) == text


@pytest.mark.parametrize(
    ("value", "sign", "text"),
    [
        (0.01234, "+", "+0.0123"),
        (-2.0, "+", "-2.0000"),
        (2.69333, "", "2.6933"),
        (1.5e30, "+", "+1.5e30"),
        (-1.5e30, "", "-1.5e30"),
        (None, "+", "-"),
        (math.nan, "", "-"),
    ],
)
def test_losses_have_four_decimals(value, sign, text):
    assert tables.fixed(value, sign=sign) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.6, "1m00s"), (190, "3m10s"), (3599.7, "1h00m"), (9e5, "10d10h")],
)
def test_durations(seconds, text):
    assert tables.duration(seconds) == text


def test_text_table_aligns_columns():
    assert tables.text_table(("a", "b"), [("long", "1"), ("x", "222")]) == (
        "a       b\nlong    1\nx     222"
    )


def test_tables_of_a_fit_write_sizes_and_coefficients_as_people_do():
    table = Table.of(observe(paper_rows()))
    law = dataclasses.replace(Law.paper(), w=1.5e7)
    fitted = Fit(law, None, Quality(0.9, 0.01, 0.01), True, ())
    texts = [
        law_tables.coefficients(fitted, len(table)),
        law_tables.residuals(fitted, table),
        law_tables.beyond(table, table.delta),
        law_tables.intervals(fitted, Draws((law, law), 0, 0.9, 0.01, 13)),
    ]
    assert not any("e+" in text for text in texts)
    assert ["w", "1.5e7", "105.211"] in [line.split() for line in texts[0].splitlines()]
    assert "n_act=914M" in texts[1] and "L=32768" in texts[1] and "914M" in texts[2]
