"""What makes two runs the same training.

A run is known by what is computed: the model, the recipe, the content of the data, the weights that
it starts from. How it is executed, watched and saved (`Execution`), what it is called and where its
data lie are recorded, but are no part of it: such a run resumes with other values, and counts once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from xmod_jax.config import RunConfig, to_dict


def identity(config: RunConfig) -> dict[str, Any]:
    """What a run computes, as JSON values.

    Data that nobody has looked at (`DataConfig.hash` is empty) are known by their name.
    """
    data, start, moe = config.data, config.start, config.model.moe
    parts = {
        "model": to_dict(config.model),
        "train": to_dict(config.train),
        "data": {"hash": data.hash} if data.hash else {"source": data.source},
    }
    if start is not None:
        parts["start"] = to_dict(dataclasses.replace(start, directory=""))
    if moe is not None and moe.balance:
        parts["execution"] = {"accumulation": config.execution.accumulation}
    return parts


def config_hash(config: RunConfig) -> str:
    """Hash of `identity`: 16 hexadecimal digits, equal for runs that are the same training."""
    return _hash(identity(config))


def first_hash(values: Mapping[str, Any]) -> str:
    """The hash that the first format of run directories gave a run, from its configuration there.

    Raises:
      KeyError: a part is missing.
    """
    parts = [values["model"], values["train"], values["data"]]
    if start := values.get("start"):
        parts.append(start | {"directory": ""})
    return _hash(parts)


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def seedless_hash(config: RunConfig) -> str:
    """`config_hash` of the run with seed 0: equal for runs that differ in their seed alone."""
    return config_hash(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)))


def difference(theirs: RunConfig, ours: RunConfig) -> str | None:
    """The first thing in which two runs differ as trainings, or None.

    For instance ``"train.seed is 1 there, 0 here"``. Where the data of either were not looked at
    their content is not compared.
    """
    there, here = identity(theirs), identity(ours)
    if not (theirs.data.hash and ours.data.hash):
        del there["data"], here["data"]
    elif there["data"] != here["data"]:
        return (
            f"other data: {theirs.data.source} with the content {theirs.data.hash} there, "
            f"{ours.data.source} with {ours.data.hash} here"
        )
    return first_difference(there, here)


def first_difference(theirs: Any, ours: Any, where: str = "") -> str | None:
    """The first field that differs between two JSON values, or None."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        pairs = [(str(k), theirs.get(k), ours.get(k)) for k in sorted({*theirs, *ours})]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(str(i), *pair) for i, pair in enumerate(zip(theirs, ours, strict=True))]
    elif theirs != ours:
        return f"{where} is {json.dumps(theirs)} there, {json.dumps(ours)} here"
    else:
        return None
    differences = (first_difference(a, b, f"{where}.{key}".lstrip(".")) for key, a, b in pairs)
    return next(filter(None, differences), None)
