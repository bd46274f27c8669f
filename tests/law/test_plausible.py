import dataclasses
import math

from tests.law.grid import paper_rows
from xmod_jax.law import plausible
from xmod_jax.law.observations import observe

ROWS = paper_rows(noise=0.008)
SPARSE = next(i for i, row in enumerate(ROWS) if not row.dense)
DENSE = next(i for i, row in enumerate(ROWS) if row.dense)


def _changed(index, **values):
    rows = list(ROWS)
    rows[index] = dataclasses.replace(rows[index], source="HERE", **values)
    return rows


def _losses(change):
    return [dataclasses.replace(row, loss=change(row.loss)) for row in ROWS]


def _only(warnings):
    (told,) = warnings
    return told


def test_nothing_is_unusual_about_the_papers_sweeps():
    assert [plausible.fault(row) for row in ROWS] == [None] * len(ROWS)
    assert plausible.warnings(ROWS) == [] == plausible.differences(observe(ROWS))


def test_perplexities_look_like_perplexities():
    told = _only(plausible.warnings(_losses(math.exp)))
    assert "looks like perplexity" in told and "the logarithm, 3" in told


def test_bits_per_byte_look_like_bits_per_byte():
    told = _only(plausible.warnings(_losses(lambda loss: loss / math.log(2) / 4.5)))
    assert "looks like bits per byte" in told


def test_losses_of_sparse_and_dense_rows_in_other_units_are_told():
    bits = [
        row if row.dense else dataclasses.replace(row, loss=row.loss / math.log(2)) for row in ROWS
    ]
    assert "in one unit?" in _only(plausible.differences(observe(bits)))


def test_a_loss_far_from_the_others_is_named():
    told = _only(plausible.warnings(_changed(SPARSE, loss=9.5)))
    assert "far from the others'" in told and "HERE (9.5)" in told


def test_context_lengths_in_thousands_are_told():
    told = _only(plausible.warnings(_changed(SPARSE, L=32, family="other")))
    assert "L looks like thousands" in told and "HERE (32)" in told


def test_a_dense_curve_that_rises_and_repeats_that_differ_are_told():
    later = next(i for i, row in enumerate(ROWS) if row.dense and row.flops > ROWS[DENSE].flops)
    told = _only(plausible.warnings(_changed(later, loss=ROWS[later].loss + 0.4)))
    assert "rises with compute" in told and "HERE" in told
    repeat = dataclasses.replace(ROWS[DENSE], loss=ROWS[DENSE].loss + 0.1, source="AGAIN")
    told = _only(plausible.warnings([*ROWS, repeat]))
    assert "their mean counts" in told and "AGAIN" in told and ROWS[DENSE].source in told


def test_sizes_other_than_the_dense_reference_s_are_told():
    row = ROWS[SPARSE]
    told = _only(plausible.warnings(_changed(SPARSE, n_act=row.n_act * 0.7)))
    assert "n_act is not that of the dense rows" in told and "HERE" in told


def test_strides_that_make_no_whole_number_of_layers_are_told():
    told = _only(plausible.warnings(_changed(SPARSE, A=1.2, K=3)))
    assert "A*K is no whole number" in told and "HERE (A 1.2, K 3)" in told
    assert plausible.warnings(_changed(SPARSE, A=0.333, K=12)) == []


def test_many_rows_are_counted():
    told = _only(
        plausible.warnings([dataclasses.replace(r, A=1.2, K=3) if not r.dense else r for r in ROWS])
    )
    assert "and 93 more" in told
