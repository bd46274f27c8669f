"""Gives the fields of a configuration the types that their annotations name."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import numbers
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any


def settle(owner: Any) -> None:
    """Brings every field of a frozen dataclass to its annotated type; call it when one is made.

    Values that are equal are then written alike: 1 and 1.0 as a float, ``"mod"`` and `Update.MOD`
    as an enumeration, 8.0 and numpy's 8 as an integer. What a configuration is known by depends on
    what it says, not on how it was spelled.

    Raises:
      ValueError: a value of another type, a float that is not finite; names class and field.
    """
    for name, kind in _annotations(typing.cast(Any, type(owner))).items():
        value = getattr(owner, name)
        settled = _settled(kind, value, f"{type(owner).__name__}.{name}")
        if settled is not value:
            object.__setattr__(owner, name, settled)


@functools.cache
def _annotations(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _settled(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, types.UnionType):
        present = next(option for option in typing.get_args(kind) if option is not types.NoneType)
        return None if value is None else _settled(present, value, where)
    if typing.get_origin(kind) is tuple:
        entry = typing.get_args(kind)[0]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{where} must be a sequence, got {value!r}")
        return tuple(_settled(entry, part, where) for part in value)
    if issubclass(kind, enum.Enum):
        return kind(value)
    if kind is float or kind is int:
        return _number(kind, value, where)
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {_ARTICLE.get(kind, kind.__name__)}, got {value!r}")
    return value


_IS_NUMBER: Callable[[Any], bool] = lambda value: isinstance(value, numbers.Real)
_ARTICLE = {str: "text", bool: "true or false"}


def _number(kind: type, value: Any, where: str) -> Any:
    """The number as a plain `kind`; a negative zero is zero."""
    if type(value) is kind and kind is int:
        return value
    # True passes for an integer in Python.
    if type(value) is bool or not _IS_NUMBER(value):
        raise ValueError(f"{where} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{where} is too large a number") from error
    if not math.isfinite(number):
        raise ValueError(f"{where} must be a finite number, got {value}")
    if kind is float:
        return number + 0.0
    if not number.is_integer():
        raise ValueError(f"{where} must be a whole number, got {value}")
    return int(value)
