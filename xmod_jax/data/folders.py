"""Which files of a user's inputs are data, and of which kind.

A file is judged by its bytes before its name. Nothing is mixed in silently: what is no data is
refused, or left out by name in a warning.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from xmod_jax.data import formats, streams
from xmod_jax.errors import UserError

PARQUET, TEXT, JSONL = "parquet", "text", "jsonl"
_NAMES = {PARQUET: "parquet", TEXT: "plain text", JSONL: "JSON lines"}

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
# Read as they stand, with all their marks, which is seldom meant.
_MARKED = (".csv", ".tsv", ".html", ".htm", ".xml", ".yaml", ".yml", ".rtf", ".ipynb")
# What stands beside the data: a hub's card, a licence, what a library notes of its files.
_CARD = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing)(\.[a-z]+)?"
    r"|dataset_infos?\.json|dataset_dict\.json|state\.json",
    re.IGNORECASE,
)
# What Spark and Delta Lake leave beside their parquet files; no reader takes it for data.
_LEFT_BY_SPARK = re.compile(r"_SUCCESS|_metadata|_common_metadata|_(committed|started)_\w+")
_PASSED_BY = ("_temporary", "_delta_log", "_spark_metadata", "__pycache__", "__MACOSX")
# Names of files and folders that hold what models are measured on, beside what they train on.
_TRAINING = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_MEASURING = re.compile(r"(?<![a-z])(test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
_WEB_PAGE = (b"<!doctype html", b"<html")
_BY_HAND = "take it away, name the files one by one, or choose one kind by --source"


@dataclasses.dataclass(frozen=True)
class _Look:
    """A file that was looked at.

    Attributes:
      path: the file.
      kind: PARQUET, TEXT or JSONL, None for what is not read.
      why: why it is not read.
      doubt: why it is perhaps not meant to be read as plain text.
    """

    path: pathlib.Path
    kind: str | None
    why: str = ""
    doubt: str = ""


def choose(
    inputs: Sequence[str], kind: str | None, warn: Callable[[str], None]
) -> list[tuple[pathlib.Path, str]]:
    """The files that `inputs` name, each once, with their kinds.

    Args:
      inputs: files, and folders, of which all files below are meant, by name.
      kind: PARQUET, TEXT or JSONL; None: what the files are.
      warn: is told what is left out or may be a mistake.

    Raises:
      UserError: an input is missing, is not of a kind that is read, or a folder holds several; a
        broken link or a folder that cannot be read below it.
    """
    chosen: list[_Look] = []
    for given in inputs:
        path = pathlib.Path(given)
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if path.is_dir():
            chosen += _of_folder(path, kind, warn)
        elif path.is_file():
            chosen.append(_as_kind(_look(path), kind))
        else:
            raise UserError(f"{path}: not a file, and can be read but once: write it to a file")
    chosen = _once(chosen, warn)
    _tell_twins(chosen, warn)
    _tell_splits(chosen, warn)
    if kind is None:
        _tell_doubts(chosen, warn)
    return [(look.path, look.kind) for look in chosen if look.kind]


def _look(path: pathlib.Path) -> _Look:
    """Looks at a file's first bytes, and at its name."""
    try:
        head = streams.head(str(path))
    except UserError as error:
        return _Look(path, None, str(error))
    name = streams.unpacked_name(str(path))
    with path.open("rb") as file:
        packed = formats.packing(file.read(18))
    if formats.is_parquet(head) and not packed:
        return _Look(path, PARQUET)
    if formats.is_parquet(head) or formats.packing(head):
        return _Look(path, None, f"{path}: packed by {packed} for no use: unpack it")
    why = formats.foreign(head)
    if name.endswith(".parquet"):
        why = why or ("text" if head else "empty: it was cut, get it again")
        return _Look(path, None, f"{path}: not parquet, as its name says, but {why}")
    if why:
        return _Look(path, None, f"{path}: {why}")
    if name.endswith(_JSON_ENDINGS):
        return _Look(path, JSONL)
    return _Look(path, TEXT, doubt=_doubt(name, head))


def _doubt(name: str, head: bytes) -> str:
    ending = pathlib.PurePath(name).suffix
    if ending in _MARKED:
        return f"{ending} is read as plain text, with all its marks"
    if head.lstrip().lower().startswith(_WEB_PAGE):
        return "looks like a web page, perhaps a server's message in place of the data"
    line, end, _ = head.partition(b"\n")
    if b"\r" in head and not end:
        return "has carriage returns for line ends, and is one long line so"
    if line.startswith(b"{") and (end or len(head) < formats.HEAD):
        try:
            if isinstance(json.loads(line), dict):
                return "read as plain text, looks like JSON lines (--source=jsonl reads those)"
        except (ValueError, RecursionError):
            pass
    return ""


def _as_kind(look: _Look, kind: str | None) -> _Look:
    """A file named by itself, or one of a folder, as the kind that the user says.

    Raises:
      UserError: it cannot be that.
    """
    if look.kind is None:
        raise UserError(look.why)
    if kind is not None and look.kind != kind and PARQUET in (look.kind, kind):
        raise UserError(
            f"{look.path}: {_NAMES[look.kind]}, not {_NAMES[kind]}: leave --source out, or give "
            "other files"
        )
    return dataclasses.replace(look, kind=kind or look.kind)


def _of_folder(folder: pathlib.Path, kind: str | None, warn: Callable[[str], None]) -> list[_Look]:
    """The data of a folder: files of one kind, and warnings of what is left out."""
    looks = [_look(path) for path in sorted(_files(folder, set()))]
    cards = {look for look in looks if look.path.parent == folder and _is_card(look.path)}
    data = [look for look in looks if look not in cards] or looks
    if not data:
        raise UserError(f"{folder}: no {kind or 'data'} files in it")
    mine = data if kind is None else _of_kind(folder, data, kind)
    for look in mine:
        if look.kind is None:
            raise UserError(f"{look.why}; {_BY_HAND}")
    _refuse_mixture(folder, mine, kind)
    if PARQUET in (kind, mine[0].kind):  # what begins so no parquet reader takes for data
        mine = [look for look in mine if not look.path.name.startswith("_")] or mine
    read = set(mine)
    left = [look.path for look in looks if look not in read]
    if left:
        what = _NAMES[kind or mine[0].kind or TEXT]
        warn(
            f"{folder}: {_counted(left)} left out, no {what} or none of the data: {_some(left)}; "
            "to read them, name them in --input"
        )
    return [_as_kind(look, kind) for look in mine]


def _is_card(path: pathlib.Path) -> bool:
    return _CARD.fullmatch(path.name) is not None


def _of_kind(folder: pathlib.Path, data: list[_Look], kind: str) -> list[_Look]:
    """Files of the kind that the user says, and files whose names say it while they are not.

    Where a folder has none, its text or JSON lines have other names.
    """
    mine = [look for look in data if kind in (look.kind, look.kind or _named(look.path))]
    if not mine and kind != PARQUET:
        mine = [look for look in data if look.kind != PARQUET]
    if not mine:
        raise UserError(f"{folder}: no {kind} files in it")
    return mine


def _named(path: pathlib.Path) -> str | None:
    """The kind that a file's name says, if any."""
    name = streams.unpacked_name(str(path))
    if name.endswith(_JSON_ENDINGS):
        return JSONL
    return {".parquet": PARQUET, ".txt": TEXT, ".md": TEXT}.get(pathlib.PurePath(name).suffix)


def _refuse_mixture(folder: pathlib.Path, data: list[_Look], kind: str | None) -> None:
    kinds: dict[str, list[pathlib.Path]] = {}
    for look in data:
        kinds.setdefault(look.kind or "", []).append(look.path)
    if kind is None and len(kinds) > 1:
        told = ", ".join(f"{_NAMES[k]} ({_some(paths)})" for k, paths in sorted(kinds.items()))
        raise UserError(f"{folder}: data of several kinds: {told}; choose one by --source")


def _files(folder: pathlib.Path, above: set[pathlib.Path]) -> Iterator[pathlib.Path]:
    """The files below a folder, through links, but for hidden ones and what programs leave.

    `above` are the folders on the way there, which a link may lead back to.
    """
    real = folder.resolve()
    if real in above:
        raise UserError(f"{folder}: a link to a folder that it is in: remove it")
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if entry.name not in _PASSED_BY:
                yield from _files(entry, above | {real})
        elif entry.is_file():
            if not _LEFT_BY_SPARK.fullmatch(entry.name):
                yield entry
        elif entry.is_symlink():
            raise UserError(f"{entry}: a broken link: mend or remove it")
        else:
            raise UserError(f"{entry}: neither a file nor a folder: remove it")


def _once(looks: Iterable[_Look], warn: Callable[[str], None]) -> list[_Look]:
    """Every file once, whatever path or link leads to it."""
    first: dict[object, _Look] = {}
    again: list[str] = []
    for look in looks:
        status = os.stat(look.path)
        # Some network file systems number no files.
        key = (status.st_dev, status.st_ino) if status.st_ino else look.path.resolve()
        if first.setdefault(key, look) is not look:
            again.append(f"{look.path} is {first[key].path}")
    if again:
        warn(f"{len(again)} given more than once and read once: {_some(again)}")
    return list(first.values())


def _tell_twins(looks: Iterable[_Look], warn: Callable[[str], None]) -> None:
    """Warns of files that stand beside what they seem to be packed from."""
    places: dict[tuple[pathlib.Path, str], list[pathlib.Path]] = {}
    for look in looks:
        place = look.path.parent, streams.unpacked_name(str(look.path))
        places.setdefault(place, []).append(look.path)
    twins = [paths for paths in places.values() if len(paths) > 1]
    if twins:
        told = [" and ".join(map(str, paths)) for paths in twins]
        warn(f"perhaps the same data twice, packed and unpacked; both are read: {_some(told)}")


def _tell_splits(looks: Iterable[_Look], warn: Callable[[str], None]) -> None:
    """Warns of what is named as data to measure on, where other files are named as to train on."""
    names = {look.path: f"{look.path.parent.name}/{look.path.name}" for look in looks}
    measuring = [path for path, name in names.items() if _MEASURING.search(name)]
    if measuring and any(_TRAINING.search(names[path]) for path in names.keys() - set(measuring)):
        warn(
            f"{_counted(measuring)} named as data to measure on, read as all others, mostly to "
            f"train on: {_some(measuring)}; to leave them out, name the others in --input"
        )


def _tell_doubts(looks: Iterable[_Look], warn: Callable[[str], None]) -> None:
    """Warns of text that is perhaps not meant to be read, or not so."""
    texts = [look for look in looks if look.kind == TEXT]
    doubts: dict[str, list[pathlib.Path]] = {}
    for look in texts:
        if look.doubt:
            doubts.setdefault(look.doubt, []).append(look.path)
    for doubt, paths in doubts.items():
        warn(f"{_counted(paths)} {doubt}: {_some(paths)}")
    endings = collections.Counter(
        pathlib.PurePath(streams.unpacked_name(str(look.path))).suffix for look in texts
    )
    if len(endings) > 1:
        told = ", ".join(f"{count} {ending or 'without'}" for ending, count in endings.items())
        warn(f"plain text of several endings is read: {told} (--source=text accepts them)")


def _counted(paths: Sequence[object]) -> str:
    return "1 file" if len(paths) == 1 else f"{len(paths)} files"


def _some(names: Sequence[object]) -> str:
    """The first names, and how many more."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + more
