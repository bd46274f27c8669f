"""Whether the numbers of a table can be trainings, and what they look like where they cannot.

Mostly they are in other units: parameters in billions, FLOPs in PFLOP, L in thousands. The law
fits such numbers as well as others, and its designs are absurd. `fault` finds what cannot be,
`warnings` what is no training that we know of.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from xmod_jax.law.observations import Observation, Row, dense_curves, dense_places

_THOUSANDS = {1: "thousands", 2: "millions", 3: "billions", 4: "trillions"}
_FLOPS = {1: "kFLOP", 2: "MFLOP", 3: "GFLOP", 4: "TFLOP", 5: "PFLOP", 6: "units of 1e18"}

# FLOPs of a training for every parameter and token: 2 forward, 6 with the backward pass. Attention
# adds L over a few times the width; parameters of the embedding take none.
_USUAL = 6.0
_LEAST_WORK, _MOST_WORK, _ATTENTION = 1e-3, 200.0, 1 / 20
_FEWEST_PARAMETERS = 1000
_LARGE_MODEL, _SHORT_FOR_IT = 1e7, 256  # parameters; tokens of a context
_SHORT = 16  # tokens of a context
_HIGH_LOSS, _LOW_LOSS = 6.0, 1.2  # nats a token
_OTHER_LOSS = 2.0  # ratio of a loss to the median of all
_OTHER_SIZE = 0.2  # relative difference of n_act between a sparse row and its dense reference
_LARGE_DIFFERENCE = 0.6  # nats between sparse and dense
_ROUNDED = 0.02  # relative error of an A*K that was rounded
_DEEPEST = 1000  # layers
_NOISE = 0.05  # nats between repeats, or by which a dense curve may rise


def fault(row: Row) -> str | None:
    """What makes a row of sound numbers impossible, and what it looks like; or None."""
    work = row.flops / row.n_act / row.tokens
    if row.n_act < _FEWEST_PARAMETERS:
        return _looks("n_act", row.n_act, "parameters", work)
    if not float(row.L).is_integer():
        return f"L is {row.L:g}, not a whole number of tokens: in thousands? write tokens"
    if row.tokens < row.L:
        return _looks("tokens", row.tokens, "tokens", work, f", less than one context of {row.L:g}")
    if work > _MOST_WORK + _ATTENTION * row.L:
        return _looks("tokens", row.tokens, "tokens", work, _work(work))
    if work < _LEAST_WORK:
        other = row.tokens / row.n_act / row.flops
        if row.flops > row.L and 0.1 < other < _MOST_WORK:
            return f"flops is {row.flops:g} and tokens {row.tokens:g}: are they exchanged?"
        power = round(math.log(_USUAL / work, 1000))
        unit = _FLOPS.get(power, "another unit")
        return f"flops is {row.flops:g}{_work(work)}: looks like {unit}; write FLOPs"
    if row.dense:
        if row.n_total > 1.5 * row.n_act:
            return (
                f"K is 1, but n_total {row.n_total:g} is above n_act {row.n_act:g}: a dense row "
                "has no other parameters (are K and A exchanged?)"
            )
        return None
    if row.K > row.L:
        return (
            f"K = {row.K:g} is above L = {row.L:g}: no token would be routed "
            "(L in thousands? write tokens)"
        )
    if row.A * row.K < 1 or row.A > _DEEPEST:
        return f"A = {row.A:g} with K = {row.K:g}: no hierarchy has A*K sparse layers a stage"
    if row.n_total > 3 * row.K * row.n_act:
        return (
            f"n_total {row.n_total:g} is over 3*K times n_act {row.n_act:g}, and no hierarchy of "
            "that K has over K times: are both in parameters?"
        )
    return None


def _work(work: float) -> str:
    return f", {work:.2g} FLOPs for a parameter and token, where a training takes about 6"


def _looks(name: str, value: float, unit: str, work: float, why: str = "") -> str:
    """Names the unit in which a value that is too small would be a usual one."""
    guess = _THOUSANDS.get(round(math.log(work / _USUAL, 1000)), "millions or billions")
    return f"{name} is {value:g}{why}: looks like {guess}; write {unit}, as 5.56e8"


def warnings(rows: Sequence[Row]) -> list[str]:
    """What is unusual about the rows of a table, a sentence each, naming the rows."""
    return [
        *_short_contexts(rows),
        *_losses(rows),
        *_dense(rows),
        *_sizes(rows),
        *_hierarchies(rows),
    ]


def _short_contexts(rows: Sequence[Row]) -> list[str]:
    def short(row: Row) -> bool:
        return row.L < _SHORT or (row.n_act >= _LARGE_MODEL and row.L < _SHORT_FOR_IT)

    found = _names(rows, short, lambda row: f"{row.L:g}")
    return [f"L looks like thousands of tokens; it is {found}: write tokens"] if found else []


def _losses(rows: Sequence[Row]) -> list[str]:
    middle = statistics.median(row.loss for row in rows)
    told = []
    if middle > _HIGH_LOSS:
        told.append(
            f"losses are around {middle:.3g}: looks like perplexity; write nats a token (the "
            f"logarithm, {math.log(middle):.3g})"
        )
    if middle < _LOW_LOSS:
        told.append(
            f"losses are around {middle:.3g}: looks like bits per byte; write nats a token "
            "(unless the tokens are bytes)"
        )

    def far(row: Row) -> bool:
        return not middle / _OTHER_LOSS <= row.loss <= middle * _OTHER_LOSS

    if found := _names(rows, far, lambda row: f"{row.loss:g}"):
        told.append(f"losses far from the others' (around {middle:.3g}): {found}")
    return told


def _dense(rows: Sequence[Row]) -> list[str]:
    """Repeats of the dense curve that differ, and curves that rise."""
    told = []
    for repeats in dense_places(rows):
        losses = [row.loss for row in repeats]
        if max(losses) - min(losses) > _NOISE:
            names = ", ".join(f"{row.source} ({row.loss:g})" for row in repeats)
            told.append(f"dense losses at one compute differ; their mean counts: {names}")
    for curve in dense_curves(rows).values():
        for less, more in itertools.pairwise(curve):
            if more.loss > less.loss + _NOISE:
                told.append(
                    f"the dense loss rises with compute, from {less.loss:g} ({less.source}) to "
                    f"{more.loss:g} ({more.source})"
                )
    return told


def _sizes(rows: Sequence[Row]) -> list[str]:
    sizes = {key: [row.n_act for row in curve] for key, curve in dense_curves(rows).items()}

    def other(row: Row) -> bool:
        near = sizes.get((row.family, row.L))
        if row.dense or not near:
            return False
        return not min(near) * (1 - _OTHER_SIZE) <= row.n_act <= max(near) * (1 + _OTHER_SIZE)

    found = _names(rows, other, lambda row: f"{row.n_act:g}")
    return [f"n_act is not that of the dense rows of the same family: {found}"] if found else []


def _hierarchies(rows: Sequence[Row]) -> list[str]:
    def broken(row: Row) -> bool:
        layers = row.A * row.K
        return not row.dense and abs(layers - round(layers)) > _ROUNDED * layers

    found = _names(rows, broken, lambda row: f"A {row.A:g}, K {row.K:g}")
    return [f"A*K is no whole number of sparse layers: {found}"] if found else []


def differences(observations: Sequence[Observation]) -> list[str]:
    """What is unusual about the differences to dense, a sentence each."""
    middle = statistics.median(observation.delta for observation in observations)
    if abs(middle) <= _LARGE_DIFFERENCE:
        return []
    return [
        f"losses differ from dense at equal FLOPs by around {middle:+.3g} nats, the published ones "
        "by under 0.3: are those of dense and sparse rows in one unit?"
    ]


def _names(
    rows: Iterable[Row], chosen: Callable[[Row], bool], value: Callable[[Row], str], shown: int = 8
) -> str:
    """The rows chosen with a value of each, the first few of them; empty for none."""
    names = [f"{row.source} ({value(row)})" for row in rows if chosen(row)]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
