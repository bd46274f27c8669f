import math

import numpy as np
import pytest

from tests.law.grid import dense_loss, paper_rows, tokens_of
from xmod_jax.errors import UserError
from xmod_jax.law import observations as obs
from xmod_jax.law.observations import HEADER, Row, Table, observe, read_csv, to_csv

HEAD = ",".join(HEADER)
DENSE = "556M,2048,5e8,5e8,1,,1e20,1e10,2.9"
SPARSE = "556M,2048,5e8,2e9,8,1,1e20,1e10,2.7"


def _read(tmp_path, *lines):
    path = tmp_path / "observations.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_csv(path)


def _refusal(action):
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _row(loss=2.7, flops=1e20, k=8.0, source="row", L=2048, n_total=2e9, tokens=1e10):
    return Row("556M", L, 5e8, n_total, k, 1, flops, tokens, loss, source)


def test_csv_round_trip_keeps_every_bit(tmp_path):
    rows = paper_rows(noise=0.008)
    (tmp_path / "a.csv").write_text(to_csv(rows))
    again = read_csv(tmp_path / "a.csv")
    assert [(r.family, r.L, r.n_act, r.n_total, r.K, r.A, r.flops, r.loss) for r in again] == [
        (r.family, r.L, r.n_act, r.n_total, r.K, r.A, r.flops, r.loss) for r in rows
    ]


def test_csv_columns_in_any_order_with_others_between(tmp_path):
    text = "loss, note,K,A,L,flops,tokens,family,n_act,n_total"
    rows = _read(tmp_path, "\ufeff" + text, '2.7,"a, b",8,1,2048,1e20,1e10,556M,5e8,2e9', "")
    assert rows[0].loss == 2.7 and rows[0].family == "556M" and rows[0].source == "line 2"


def test_dense_rows_need_no_A(tmp_path):
    rows = _read(tmp_path, HEAD, DENSE, SPARSE)
    assert rows[0].dense and rows[0].A == 1
    assert observe(rows)[0].delta == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], ["missing columns", "family"]),
        ([HEAD.replace(",loss", ""), SPARSE], ["missing column loss", HEAD]),
        ([f"{HEAD},loss", f"{SPARSE},3"], ["column loss", "twice"]),
        ([HEAD, f"{SPARSE},5"], ["line 2", "more cells than columns"]),
        ([HEAD], ["no observations"]),
        ([HEAD, DENSE, SPARSE.replace("2.7", "nan")], ["line 3: loss is nan"]),
        ([HEAD, DENSE, SPARSE.replace("2.7", "inf")], ["line 3: loss is inf"]),
        ([HEAD, DENSE, SPARSE.replace("2.7", "two")], ["line 3: loss is not a number: 'two'"]),
        ([HEAD, DENSE, SPARSE.replace(",2.7", "")], ["line 3: loss is not a number: ''"]),
        ([HEAD, DENSE, SPARSE.replace("2048", "-1")], ["line 3: L must be positive"]),
        ([HEAD, DENSE, SPARSE.replace("1e20", "0")], ["line 3: flops must be positive"]),
        ([HEAD, DENSE, SPARSE.replace("2.7", "1e200")], ["line 3: loss is 1e+200"]),
        ([HEAD, DENSE, SPARSE.replace("2048", "1e-90")], ["line 3: L is 1e-90"]),
        ([HEAD, DENSE, SPARSE.replace("1e20", "1e99")], ["line 3: flops is 1e+99"]),
        ([HEAD, DENSE, SPARSE.replace("2e9", "2e8")], ["line 3: n_total", "below n_act"]),
        ([HEAD, DENSE, SPARSE.replace(",8,", ",0.5,")], ["line 3: K must be at least 1"]),
        ([HEAD, DENSE, SPARSE.replace(",8,1,", ",8,,")], ["line 3: A is not a number"]),
        ([HEAD, SPARSE.replace("556M", " ")], ["line 2: family is empty"]),
        ([HEAD, *[SPARSE.replace("2.7", "nan")] * 20], ["line 2", "line 9", "and 12 more"]),
        ([HEAD, '"556M,2048'], ["not a CSV"]),
    ],
)
def test_faulty_csv_is_refused_naming_the_lines(tmp_path, lines, words):
    message = _refusal(lambda: _read(tmp_path, *lines))
    for word in words:
        assert word in message


def test_unreadable_csv_is_refused(tmp_path):
    assert "cannot read" in _refusal(lambda: read_csv(tmp_path / "none.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00family")
    assert "not a CSV" in _refusal(lambda: read_csv(tmp_path / "binary.csv"))


def test_dense_reference_is_linear_in_log_flops():
    dense = [_row(3.0, 1e19, 1), _row(2.8, 1e20, 1), _row(2.7, 1e21, 1)]
    observation = observe([_row(2.5, math.sqrt(1e19 * 1e20)), *dense])[0]
    assert observation.dense_loss == pytest.approx(2.9)
    assert observation.delta == pytest.approx(-0.4)
    assert observation.dense_tokens == pytest.approx(1e10)
    assert not observation.extrapolated


def test_dense_reference_is_of_the_same_family_and_context():
    for observation in observe(paper_rows()):
        row = observation.row
        assert observation.dense_loss == pytest.approx(dense_loss(row.family, row.L, 1e20))
        tokens = tokens_of(row.family, int(row.L), "dense", 1e20)
        assert observation.dense_tokens == pytest.approx(tokens)


def test_missing_dense_reference_names_the_rows():
    rows = [_row(source="a"), _row(source="b", L=4096), _row(k=1, source="c")]
    message = _refusal(lambda: observe(rows))
    assert "no dense reference" in message and "b (556M, L=4096)" in message
    assert "a (" not in message
    assert "every row has K = 1" in _refusal(lambda: observe([_row(k=1)]))


@pytest.mark.parametrize(("flops", "expected"), [(1e18, 3.2), (1e22, 2.6)])
def test_flops_outside_the_dense_curve_are_refused_or_marked(flops, expected):
    dense = [_row(3.0, 1e19, 1), _row(2.8, 1e20, 1), _row(2.7, 1e21, 1)]
    rows = [*dense, _row(2.5, flops, source="far"), _row(2.5, 5e19, source="near")]
    message = _refusal(lambda: observe(rows))
    assert "does not cover" in message and "far (" in message and "near" not in message
    marked, plain = observe(rows, extrapolate=True)
    assert marked.extrapolated and not plain.extrapolated
    assert marked.dense_loss == pytest.approx(expected)


def test_rounding_to_whole_steps_stays_within_a_dense_point():
    dense = _row(2.9, 1e20, 1)
    assert observe([dense, _row(flops=1.01e20)])[0].dense_loss == 2.9
    assert "does not cover" in _refusal(lambda: observe([dense, _row(flops=1.03e20)]))
    assert observe([dense, _row(flops=1.03e20)], tolerance=0.05)[0].dense_loss == 2.9
    assert observe([dense, _row(flops=2e20)], extrapolate=True)[0].extrapolated


def test_duplicates_are_refused_by_name():
    dense = _row(2.9, k=1, source="d")
    message = _refusal(lambda: observe([dense, _row(source="a"), _row(2.6, source="b")]))
    assert "duplicated" in message and "a = b" in message
    message = _refusal(lambda: observe([dense, _row(3.0, k=1, source="e"), _row()]))
    assert "d = e" in message
    observe([dense, _row(), _row(n_total=3e9), _row(tokens=2e10)])


def test_rows_from_elsewhere_are_checked_as_well():
    assert "bad: loss is nan" in _refusal(lambda: observe([_row(math.nan, source="bad")]))


def test_table_does_not_depend_on_the_order_of_rows():
    observations = observe(paper_rows(noise=0.01))
    one, other = Table.of(observations), Table.of(reversed(observations))
    assert all(np.array_equal(getattr(one, n), getattr(other, n)) for n in ("L", "K", "delta"))
    assert len(Table.of([])) == 0
    assert obs.FLOPS_TOLERANCE == 0.02
