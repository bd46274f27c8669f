"""Text tables and short numbers for terminals, and whole numbers from them."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def short(value: float) -> str:
    """A count in three digits: ``"543M"``, ``"2.64B"``, ``"512"``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999.5 of a unit and more would round to 1000 of it.
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


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
