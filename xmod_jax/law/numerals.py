"""Numbers as people and spreadsheets write them: decimal commas, separators of thousands."""

from __future__ import annotations

import re
from collections.abc import Iterable

# A space, thin or not, or an apostrophe between groups of three digits.
_GROUP_MARK = re.compile(r"(?<=\d)[ \u00a0\u2009\u202f'\u2019](?=\d{3}(?!\d))")
_GROUPED = {
    mark: re.compile(rf"[+-]?[1-9]\d{{0,2}}(\{mark}\d{{3}})+", re.ASCII) for mark in (",", ".")
}


def number(text: str, whole: bool, decimal_commas: bool = False) -> float:
    """The value of a cell.

    Args:
      text: the cell.
      whole: whether it counts something, so that ``2,048`` is 2048; of a loss it is 2.048.
      decimal_commas: whether the table writes decimals with a comma, so that ``2.048`` of what
        counts is 2048 too.

    Raises:
      ValueError: it is no number.
    """
    text = _GROUP_MARK.sub("", text.strip())
    comma, point = text.rfind(","), text.rfind(".")
    if comma >= 0 and point >= 0:
        decimal, group = (",", ".") if comma > point else (".", ",")
        before, _, after = text.rpartition(decimal)
        if not _GROUPED[group].fullmatch(before):
            raise ValueError(f"not a number: {text!r}")
        return float(f"{before.replace(group, '')}.{after}")
    for mark in (",", "."):
        grouped = _GROUPED[mark].fullmatch(text) is not None
        if grouped and (text.count(mark) > 1 or (whole and (mark == "," or decimal_commas))):
            return float(text.replace(mark, ""))
    return float(text.replace(",", ".")) if text.count(",") == 1 else float(text)


def decimal_commas(cells: Iterable[str]) -> bool:
    """Whether the numbers of a table have decimal commas and no decimal points, beyond doubt."""
    marks = {mark for cell in cells if (mark := _decimal_mark(cell.strip()))}
    return marks == {","}


def _decimal_mark(text: str) -> str | None:
    """The mark that stands before decimals; None where there is none, or it may part thousands."""
    comma, point = text.rfind(","), text.rfind(".")
    if comma >= 0 and point >= 0:
        return "," if comma > point else "."
    mark = "," if comma >= 0 else "."
    if text.count(mark) != 1 or _GROUPED[mark].fullmatch(text):
        return None
    return mark
