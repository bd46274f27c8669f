"""Recommends K and A for a training compute, a context length and a model size.

    python -m experiments.design --law=paper --train_flops=1e20 --context=32768 --n_act=556M
    python -m experiments.design --law=law.json --train_flops=1e20 --context=2048 --n_act=700M --A=1
    python -m experiments.design --law=law.json --train_flops=1e13 --context=256 \\
        --backbone=64,16,4,2,192,257 --active_depth=10 --prefix=2

FLOPs are the paper's count (forward). The loss gain (Delta) is against the dense model of equal
active depth at equal FLOPs. Intervals come from the draws that `experiments.fit --bootstrap` leaves
in law.json; the published law has none. A warning tells of compute, L, N_act, K or A outside the
range that the law was fitted on. Unless --extrapolate is given, A stays in the fitted range, and
for A > 1 also K, where the law knows no optimum in K.
"""

from __future__ import annotations

import json
import pathlib

from absl import flags

from experiments import cli, law_tables
from xmod_jax.errors import UserError
from xmod_jax.law import design as designing
from xmod_jax.law import feasible
from xmod_jax.law.terms import LawFile

_LAW = flags.DEFINE_string("law", None, "a law.json, or paper: the published law", required=True)
_FLOPS = flags.DEFINE_float("train_flops", None, "C, training compute", required=True)
_CONTEXT = flags.DEFINE_integer("context", None, "L, tokens", required=True)
_N_ACT = flags.DEFINE_string(
    "n_act",
    None,
    "Size of the dense model of equal active depth, embedding and head included: a backbone of the "
    "paper (165M, 298M, 556M, 936M, 1.65B), or a number (700M, 7e8) met by scaling the nearest.",
)
_BACKBONE = flags.DEFINE_list(
    "backbone",
    [],
    "Instead of --n_act: width, head dimension, heads, KV heads, FFN width[, vocabulary].",
)
_A = flags.DEFINE_float("A", None, "anchor stride; default: the best")
_K = flags.DEFINE_integer("K", None, "token sparsity; default: the best", lower_bound=2)
_MAX_PARAMS = flags.DEFINE_string("max_params", None, "largest total parameters, e.g. 10B")
_MAX_DEPTH = flags.DEFINE_integer("max_depth", None, "largest number of layers", lower_bound=1)
_DEPTH = flags.DEFINE_integer(
    "active_depth",
    28,
    "layers that a token passes",
    lower_bound=1,
    upper_bound=feasible.DEEPEST,
)
_PREFIX = flags.DEFINE_integer("prefix", 4, "N0, dense layers at the start", lower_bound=0)
_EXTRAPOLATE = flags.DEFINE_bool("extrapolate", False, "search K and A beyond the fitted ranges")
_FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "how to print")


def main() -> None:
    """Prints the recommendation."""
    if not _LAW.value:
        raise UserError("--law= is empty: give a law.json, or paper")
    law = LawFile.paper() if _LAW.value == "paper" else LawFile.load(pathlib.Path(_LAW.value))
    found = designing.design(law, _request())
    answer = designing.record(found, law)
    if _FORMAT.value == "json":
        print(json.dumps(answer, indent=1, allow_nan=False))
    else:
        print(law_tables.design(answer))


def _request() -> feasible.Request:
    if bool(_N_ACT.value) == bool(_BACKBONE.value):
        raise UserError("give either --n_act=SIZE or --backbone=D,E,H,G,F[,V]")
    if _N_ACT.value:
        backbone = feasible.backbone_of_size(_N_ACT.value, _DEPTH.value)
    else:
        backbone = feasible.backbone_of_sizes(_BACKBONE.value)
    return feasible.Request(
        train_flops=_FLOPS.value,
        context=_CONTEXT.value,
        backbone=backbone,
        active_depth=_DEPTH.value,
        prefix=_PREFIX.value,
        stride=_A.value,
        sparsity=_K.value,
        max_params=None if _MAX_PARAMS.value is None else feasible.count(_MAX_PARAMS.value),
        max_depth=_MAX_DEPTH.value,
        extrapolate=_EXTRAPOLATE.value,
    )


if __name__ == "__main__":
    cli.run(main)
