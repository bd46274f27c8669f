"""Flags that choose an experiment.

A command imports this module and calls `selected`; `flags.adopt_module_key_flags(selection)` lists
the flags in its ``--help``.
"""

from __future__ import annotations

import sys

from absl import flags

from experiments import registry
from experiments.auto_scale import auto_scale, local_devices
from experiments.registry import Experiment
from experiments.scales import SCALES
from xmod_jax.config import MAX_SEED, DataConfig
from xmod_jax.data import sources
from xmod_jax.errors import UserError

AUTO = "auto"

_EXPERIMENT = flags.DEFINE_string("experiment", None, "name of the experiment")
_SCALE = flags.DEFINE_string(
    "scale",
    None,
    "mini (two CPU cores), paper (as published), or auto: paper where accelerators are present, "
    "the runs fit them and their data is prepared, else mini. Without the flag: auto, and paper in "
    "describe and plan; several processes need it",
)
_SEED = flags.DEFINE_integer(
    "seed",
    None,
    "seed of parameters and data order (the experiment's own when not given)",
    lower_bound=0,
    upper_bound=MAX_SEED,
)
_DATA = flags.DEFINE_string(
    "data",
    None,
    "embedded, a directory made by prepare_data, tfds:NAME[@gpt2], or several as NAME=WEIGHT,... "
    "(the scale's own when not given)",
)
_KEEP = flags.DEFINE_bool(
    "keep_products",
    None,
    "give the backward pass the layers' products of the forward pass instead of forming them again:"
    " faster, for several times the memory of activations (plan says how much)",
)


_BUDGET = flags.DEFINE_float(
    "budget",
    1.0,
    "factor of the scale's training compute: every run takes as many times its steps",
    lower_bound=1e-6,
    upper_bound=1e6,
)


def selected(
    default_scale: str = AUTO, looks: bool = True, checks_data: bool = True, seeds: int = 1
) -> Experiment:
    """The experiment that the flags choose; an automatic scale is told on stderr with its reason.

    Args:
      default_scale: where the flag is not given.
      looks: whether an automatic scale may look at the devices, after which processes can no
        longer meet and no other devices be described.
      checks_data: whether --data must be there; what one of several processes does not find is told
        once they have met, so that the others hear of it.
      seeds: how many seeds each run has.

    Raises:
      UserError: no experiment given, it or its scale unknown or not to be found out, or --data not
        there.
    """
    if _DATA.value and checks_data:
        sources.check(DataConfig(_DATA.value))
    if not _EXPERIMENT.value:
        raise UserError(f"--experiment is missing; known: {', '.join(registry.names())}")
    scale = _SCALE.value or default_scale
    if scale not in (AUTO, *SCALES):
        raise UserError(f"unknown --scale={scale}; known: {', '.join((AUTO, *SCALES))}")
    if scale == AUTO and not looks:
        raise UserError("--scale=paper or --scale=mini must be given here: auto looks at devices")
    if scale == AUTO:
        paper = registry.get(_EXPERIMENT.value, "paper").override(None, _DATA.value, _KEEP.value)
        scale, reason = auto_scale(paper, local_devices())
        print(f"--scale=auto chose {scale}: {reason}", file=sys.stderr)
    experiment = registry.get(_EXPERIMENT.value, scale)
    return experiment.override(_SEED.value, _DATA.value, _KEEP.value, _BUDGET.value, seeds)
