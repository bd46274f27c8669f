"""Tables in text files as programs leave them: separators, comments, encodings, blank lines."""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Sequence

from xmod_jax.errors import UserError

_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
_LARGEST = 64 * 2**20  # bytes; no table of trainings has as many
_SHOWN = 200  # characters of a foreign header in a message


@dataclasses.dataclass(frozen=True)
class Record:
    """One line below the header.

    Attributes:
      line: its number in the file, from 1.
      cells: text by column, of the columns asked for; empty where the line ends before.
      fault: what is wrong with the line as a whole, or None.
    """

    line: int
    cells: dict[str, str]
    fault: str | None = None


def read(path: pathlib.Path, columns: Sequence[str]) -> list[Record]:
    """Reads a table with (at least) the given columns, in any order and case; others are ignored.

    The separator is whichever of comma, semicolon, tab, bar and spaces gives the header its
    columns. Lines that are blank, of dashes only or begin with ``#`` are passed over, and so is a
    header that stands there again, as in files joined end to end.

    Raises:
      UserError: a file that cannot be read or is no such table, in one line.
    """
    lines = _text(path).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    start = _find_header(lines, columns)
    header = _uncommented(lines[start]) if start < len(lines) else ""
    separator = max(_SEPARATORS, key=lambda each: len(_found(header, each, columns)))
    body = [line if not line.lstrip().startswith("#") else "" for line in lines[start + 1 :]]
    reader = csv.reader(
        [f"{line}\n" for line in (header, *body)],
        delimiter=separator,
        skipinitialspace=True,
        strict=True,
    )
    try:
        names = _names(path, next(reader, []), separator, columns)
        records = []
        for cells in reader:
            cells = [cell.strip() for cell in cells]
            repeated = [cell.casefold() for cell in cells] == [name.casefold() for name in names]
            # Nothing but lines and dashes stands below the header of a table in Markdown.
            if not repeated and set("".join(cells)) - set(":-+=|"):
                records.append(_record(start + reader.line_num, cells, names, columns))
    except csv.Error as error:
        line = start + reader.line_num
        raise UserError(
            f"{path}: line {line}: not a CSV with {_SEPARATORS[separator]} between columns: {error}"
        ) from error
    return records


def _text(path: pathlib.Path) -> str:
    """The file's text. UTF-16 is what spreadsheets call Unicode text; it begins with a mark."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        told = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{path}: cannot read observations: {told}") from error
    if len(content) > _LARGEST:
        raise UserError(f"{path}: over {_LARGEST >> 20} MB: not a table of trainings")
    marked = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    try:
        text = content.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}: not a CSV in UTF-8 (line {before}: {error.reason}): save or export it as "
            "CSV in UTF-8"
        ) from error
    if "\0" in text:
        raise UserError(f"{path}: not a CSV in UTF-8 (null characters): export it as CSV in UTF-8")
    return text


def _find_header(lines: Sequence[str], columns: Sequence[str]) -> int:
    """Index of the header: the first line with content, or a comment that holds all columns."""
    for index, line in enumerate(lines):
        content = _uncommented(line)
        found = max(len(_found(content, separator, columns)) for separator in _SEPARATORS)
        if content != line and found < len(columns):
            continue
        # A spreadsheet's own first line, which names the separator.
        named = content.lower().startswith("sep=") and len(content.strip()) <= len("sep=,")
        if content.strip("".join(_SEPARATORS)) and not named:
            return index
    return len(lines)


def _uncommented(line: str) -> str:
    """A line without the ``#`` of a comment."""
    return line.lstrip("# \t") if line.lstrip().startswith("#") else line


def _found(header: str, separator: str, columns: Sequence[str]) -> set[str]:
    """The columns that a separator finds in a header; none where it cannot be parsed."""
    try:
        cells = next(csv.reader([header], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        return set()
    return {name.casefold() for name in columns} & {cell.strip().casefold() for cell in cells}


def _names(
    path: pathlib.Path, cells: Sequence[str], separator: str, columns: Sequence[str]
) -> list[str]:
    """The header's names, those of `columns` as they are written there."""
    known = {name.casefold(): name for name in columns}
    names = [known.get(cell.strip().casefold(), cell.strip()) for cell in cells]
    missing = [name for name in columns if name not in names]
    if missing:
        seen = ", ".join(filter(None, cells))[:_SHOWN]
        raise UserError(
            f"{path}: missing column{'s' * (len(missing) > 1)} {', '.join(missing)}; the header "
            f"is {','.join(columns)}"
            + (f"; with {_SEPARATORS[separator]} between columns it reads {seen!r}" if seen else "")
        )
    if twice := sorted({name for name in columns if names.count(name) > 1}):
        raise UserError(f"{path}: column {', '.join(twice)} stands there twice: keep one")
    return names


def _record(
    line: int, cells: Sequence[str], names: Sequence[str], columns: Sequence[str]
) -> Record:
    fault = None
    if any(cells[len(names) :]):
        fault = "more cells than columns (a decimal comma?)"
    elif len(cells) < 1 + max(names.index(name) for name in columns):
        fault = f"{len(cells)} cells, where the header has {len(names)} columns"
    given = dict(zip(names, cells, strict=False))
    return Record(line, {name: given.get(name, "") for name in columns}, fault)
