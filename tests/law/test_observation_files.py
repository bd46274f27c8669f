import contextlib
import math
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.law.grid import paper_rows
from xmod_jax.errors import UserError
from xmod_jax.law.observation_files import read_csv, to_csv
from xmod_jax.law.observations import HEADER, observe

HEAD = ",".join(HEADER)
DENSE = "556M,2048,5e8,5e8,1,,1e20,1e10,2.9"
SPARSE = "556M,2048,5e8,2e9,8,1,1e20,1e10,2.7"
VALUES = ("556M", 2048, 5e8, 2e9, 8, 1, 1e20, 1e10, 2.7)


def _read(tmp_path, *lines):
    path = tmp_path / "observations.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_csv(path)


def _refusal(action):
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _values(row):
    return tuple(getattr(row, name) for name in HEADER)


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
        (
            [HEAD, DENSE, SPARSE.replace(",2.7", "")],
            ["line 3: 8 cells, where the header has 9 columns"],
        ),
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


@pytest.mark.parametrize("stride", ["", "0", "-1", "NaN", "-", "n/a", "1e400"])
def test_whatever_stands_for_A_in_a_dense_row_is_passed_over(tmp_path, stride):
    rows = _read(tmp_path, HEAD, DENSE.replace(",1,,", f",1,{stride},"), SPARSE)
    assert rows[0].dense and observe(rows)[0].delta == pytest.approx(-0.2)
    assert read_csv(_written(tmp_path, to_csv(rows).encode())) == rows


def _written(tmp_path, content):
    path = tmp_path / "written.csv"
    path.write_bytes(content)
    return path


def _with(separator, *lines):
    return "\n".join(line.replace(",", separator) for line in lines)


EUROPEAN = "556M;2.048;500.000.000;2.000.000.000;8;1;1,0E+20;1,0E+10;2,7"
AMERICAN = '556M,"2,048","500,000,000","2,000,000,000",8,1,1e20,"10,000,000,000.0",2.7'
TEXTS = {
    "semicolons": _with(";", HEAD, SPARSE),
    "tabs": _with("\t", HEAD, SPARSE),
    "bars": _with(" | ", HEAD, SPARSE),
    "aligned": _with("   ", HEAD, SPARSE),
    "upper case": f"{HEAD.upper()}\n{SPARSE}",
    "lower case": f"{HEAD.lower()}\n{SPARSE}",
    "blank lines": f"\n  \n{HEAD}\n\n{SPARSE}\n\n",
    "mark": f"\ufeff{HEAD}\n{SPARSE}",
    "quotes": "\n".join(
        ",".join(f'"{cell}"' for cell in line.split(",")) for line in (HEAD, SPARSE)
    ),
    "line ends": f"{HEAD}\r\n{SPARSE}\r\n",
    "old line ends": f"{HEAD}\r{SPARSE}\r",
    "comments": f"# ours\n{HEAD}\n# a comment, with commas\n{SPARSE}",
    "commented header": f"# ours\n# {HEAD}\n{SPARSE}",
    "separator named": _with(";", "sep=,", HEAD, SPARSE),
    "empty columns": f"{HEAD},,\n{SPARSE},,\n,,,,,,,,,,\n",
    "more empty cells than columns": f"{HEAD}\n{SPARSE},,",
    "header twice": f"{HEAD}\n{SPARSE}\n{HEAD}",
    "Markdown": "\n".join(
        f"| {line.replace(',', ' | ')} |" for line in (HEAD, ",".join(["---"] * 9), SPARSE)
    ),
    "decimal commas": _with(";", HEAD) + "\n" + EUROPEAN,
    "quoted decimal comma": f"{HEAD}\n" + SPARSE.replace("2.7", '"2,700"'),
    "thousands": f"{HEAD}\n{AMERICAN}",
    "spaced thousands": f"{HEAD}\n"
    + SPARSE.replace("2048", "2\u202f048").replace("5e8", "500 000 000"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_spreadsheets_make_of_a_table_is_read(tmp_path, name):
    (row,) = read_csv(_written(tmp_path, TEXTS[name].encode()))
    assert _values(row) == VALUES


def test_spreadsheets_unicode_text_is_read(tmp_path):
    text = _with("\t", HEAD, SPARSE)
    (row,) = read_csv(_written(tmp_path, text.encode("utf-16")))
    assert _values(row) == VALUES


def test_lines_are_named_as_the_file_counts_them(tmp_path):
    message = _refusal(lambda: _read(tmp_path, "# ours", "", HEAD, "", SPARSE, "# more", "x,1"))
    assert "line 7: 2 cells" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "missing columns"),
        (b"\x00\x01\xff\xfe" * 50, "not a CSV in UTF-8"),
        (HEAD.encode("utf-16-le"), "not a CSV in UTF-8"),
        (HEAD.encode("utf-32"), "not a CSV in UTF-8"),
        (b"\xff\xfe" + b"a", "not a CSV in UTF-8"),
        ("mod\u00e8le".encode("latin-1"), "not a CSV in UTF-8 (line 1"),
        (b"PK\x03\x04\x14\x00\x06", "not a CSV in UTF-8"),
        (b"x" * 200_000, "line 1: not a CSV"),
        (b'{"a": [1, 2]}', "missing columns"),
        (b"###\n# \n", "missing columns"),
        (b";;;\n", "missing columns"),
        (b"x;b;c\n1;2;3", "with commas between columns it reads 'x;b;c'"),
        (_with(";", HEAD.replace(",loss", "")).encode(), "with semicolons between columns it"),
        (f"{HEAD}\n{HEAD}".encode(), "no observations"),
        (f"{HEAD},LOSS\n{SPARSE},2".encode(), "column loss stands there twice"),
        (f"{HEAD}\n{SPARSE.replace('2048', '9' * 400)}".encode(), "line 2: L is inf"),
        (f"{HEAD}\n{SPARSE.replace('2.7', '1e400')}".encode(), "line 2: loss is inf"),
        (f"{HEAD}\n{SPARSE.replace('5e8', '556M')}".encode(), "'556M' (write it out"),
        (f"{HEAD}\n{SPARSE.replace('2.7', '2,7')}".encode(), "a decimal comma?"),
        (f'{HEAD}\n{SPARSE}\n"556M'.encode(), "line 3: not a CSV"),
        (f"{HEAD}\n{SPARSE.replace('2.7', '-2.7')}".encode(), "line 2: loss must be positive"),
        (f"{HEAD}\n{SPARSE.replace('2e9', '1,2.3')}".encode(), "more cells"),
        (
            f"{HEAD}\n{SPARSE.replace('2e9', '1,2.3,4')}".replace("1,2.3,4", '"1,2.3,4"').encode(),
            "n_total is not",
        ),
    ],
)
def test_files_that_are_no_table_are_told_in_one_line(tmp_path, content, words):
    path = _written(tmp_path, content)
    message = _refusal(lambda: read_csv(path))
    assert words in message and str(path) in message and len(message) < 1000


def test_a_folder_and_a_file_without_end_are_refused(tmp_path):
    assert "Is a directory" in _refusal(lambda: read_csv(tmp_path))
    assert "not a table" in _refusal(lambda: read_csv(pathlib.Path("/dev/zero")))


IMPOSSIBLE = {
    "billions of parameters": (SPARSE.replace("5e8", "0.5"), "n_act is 0.5: looks like billions"),
    "millions of parameters": (SPARSE.replace("5e8", "500"), "n_act is 500: looks like millions"),
    "L in thousands": (SPARSE.replace("2048", "2"), "K = 8 is above L = 2"),
    "L in thousands of another kind": (SPARSE.replace("2048", "2.048"), "not a whole number"),
    "PFLOP": (SPARSE.replace("1e20", "1e5"), "looks like PFLOP"),
    "units of 1e18": (SPARSE.replace("1e20", "100"), "looks like units of 1e18"),
    "billions of tokens": (
        SPARSE.replace("1e10", "10"),
        "less than one context of 2048: looks like",
    ),
    "millions of tokens": (SPARSE.replace("1e10", "1e4"), "tokens is 10000, 2e+07 FLOPs for"),
    "all in their own units": ("556M,2048,.5,2,8,1,100,10,2.7", "n_act is 0.5: looks like"),
    "n_total and n_act exchanged": (SPARSE.replace("5e8,2e9", "2e9,5e8"), "exchanged?"),
    "n_total in other units": (SPARSE.replace("2e9", "2e12"), "n_total 2e+12 is over 3*K"),
    "K and A exchanged": (SPARSE.replace(",8,1,", ",1,8,"), "are K and A exchanged?"),
    "flops and tokens exchanged": (
        "556M,2048,5e8,2e9,8,1,8e10,1e20,2.7",
        "flops is 8e+10 and tokens 1e+20: are they exchanged?",
    ),
    "share of tokens": (SPARSE.replace(",8,", ",0.125,"), "K must be at least 1"),
    "tiny stride": (SPARSE.replace(",8,1,", ",8,1e-9,"), "A = 1e-09 with K = 8"),
    "huge stride": (SPARSE.replace(",8,1,", ",8,1e9,"), "A = 1e+09 with K = 8"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_numbers_that_no_training_has_are_refused_by_what_they_look_like(tmp_path, name):
    line, words = IMPOSSIBLE[name]
    message = _refusal(lambda: _read(tmp_path, HEAD, DENSE, line))
    assert f"line 3: {words}" in message or ("line 3: " in message and words in message)


def test_a_file_of_one_fault_names_a_few_lines_and_counts_the_others(tmp_path):
    message = _refusal(lambda: _read(tmp_path, HEAD, *[SPARSE.replace("1e20", "1e5")] * 100))
    assert len(message) < 800 and "line 2: flops is" in message and "more" in message


def test_large_and_small_trainings_pass(tmp_path):
    lines = [
        "mini,32,139000,300000,4,1,3e9,2e5,2.5",
        "mini,32,139000,139000,1,1,3e9,2e5,2.6",
        "wide,64,2e7,3e7,2,0.5,4e11,2e5,6.0",  # mostly embedding
        "long,1048576,2e8,3e9,16,5,1.4e22,5e10,2.1",  # mostly attention
        "trained,4096,1e12,1e13,16,5,9e25,1.5e13,1.6",
    ]
    assert len(_read(tmp_path, HEAD, *lines)) == 5
    assert math.isclose(_read(tmp_path, HEAD, *lines)[-1].n_act, 1e12)


CELLS = st.one_of(
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "nan",
            "1e400",
            "1e-400",
            "9" * 30,
            "2,7",
            "1.234,5",
            "1",
            "8",
            "2e9",
            '"',
            "#",
        ]
    ),
    st.floats().map(repr),
    st.text(max_size=6),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(CELLS, max_size=11), max_size=4), st.sampled_from(",;\t| "), st.booleans())
def test_whatever_stands_in_a_file_gives_rows_or_one_line(tmp_path_factory, cells, mark, header):
    lines = [_with(mark, HEAD, DENSE, SPARSE)] if header else []
    text = "\n".join([*lines, *(mark.join(line) for line in cells)])
    path = tmp_path_factory.getbasetemp() / "drawn.csv"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with contextlib.suppress(UserError):
        observe(read_csv(path), extrapolate=True)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200))
def test_whatever_bytes_are_rows_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "drawn.csv"
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_csv(path)
