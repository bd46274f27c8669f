"""Text tables, how every table and figure writes a number, and whole numbers that are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

UNKNOWN = "-"  # a number that is not there, or not finite


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for row in (header, *rows):
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join((first, *others)).rstrip())
    return "\n".join(lines)


def short(value: float | None) -> str:
    """A count in three digits: ``"543M"``, ``"2.64B"``, ``"512"``, ``"1.88e18"``; else ``"-"``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999.5 of a unit and more would round to 1000 of it.
        if 0.9995 * size <= abs(value) < 999.5e12:
            return f"{value / size:.3g}{unit}"
    return number(value, 3)


def flops(value: float | None) -> str:
    """A number of FLOPs in three digits: ``"2.8e18"``, ``"9.04e9"``, ``"512"``; else ``"-"``."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return _power(f"{value:.2e}") if abs(value) >= 1e4 else number(value, 3)


def number(value: float | None, digits: int = 4) -> str:
    """Any number as people write it: ``"32768"``, ``"0.0123"``, ``"1.2e-5"``; else ``"-"``.

    Whole numbers below a million are written in full, others to `digits` digits.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 1e6 and (value == round(value) or abs(value) >= 10 ** (digits - 1)):
        return str(round(value))
    return _power(f"{value:.{digits}g}")


def fixed(value: float | None, digits: int = 4, sign: str = "") -> str:
    """A loss or a share with `digits` decimals: ``"2.6933"``, ``"+0.0123"``; else ``"-"``.

    Args:
      value: any number; one of six digits or more is written as `number` does.
      digits: decimals.
      sign: ``"+"`` writes the sign of positive numbers too.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) < 1e5:
        return f"{value:{sign}.{digits}f}"
    return (sign if value > 0 else "") + number(value, 6)


def _power(text: str) -> str:
    """``"2.80e+18"`` as ``"2.8e18"``."""
    mantissa, mark, exponent = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if mark else mantissa


def duration(seconds: float) -> str:
    """``"42s"``, ``"3m10s"``, ``"5h02m"``, ``"12d04h"``; ``"?"`` when not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for size, unit, part, small in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{small}"
    return f"{whole}s"


def whole(text: str, least: int, most: int) -> bool:
    """Whether a text is a whole number within bounds."""
    # Python makes no number of thousands of digits.
    return text.isdecimal() and len(text) < 100 and least <= int(text) <= most
