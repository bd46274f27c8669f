"""The embedded corpus: English text that every CPython carries, read from the standard library.

About 4.7 MB on CPython 3.11 (4.5 MB on 3.12 and 3.13, 4.3 MB without tkinter and idlelib):

- 0.4 MB, a document a topic: the language reference in `pydoc_data.topics`;
- 1.9 MB, a document a module: the docstrings under their signatures, and the comments;
- 2.4 MB, a document a module: the whole source, code included, of modules that are mostly prose.
  Their docstrings and comments alone (1.1 MB) would leave the corpus below 4 MB.

Source files are read, never imported: importing runs code, and some modules exist on one platform
only. They are scanned with regular expressions because parsing all of them with `ast` takes about
ten seconds, ten times as long.
"""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
import sysconfig
from collections.abc import Iterator
from pydoc_data import topics
from typing import NamedTuple

from xmod_jax.errors import UserError

# A module of which at least this share is prose is taken whole.
MOSTLY_PROSE = 0.4
# Tests are absent from many installations, as distributions package them apart.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"}

_DOCSTRING = r"""[rRuU]?(?P<quotes>\"{3}|'{3})(?P<doc>.*?)(?P=quotes)"""
_PARENTHESES = r"\([^()]*(?:\([^()]*\)[^()]*)*\)"
_MODULE_DOCSTRING = re.compile(r"(?:\s|\#[^\n]*\n)*" + _DOCSTRING, re.DOTALL)
# Triple quotes count only right after a signature: elsewhere they hold data as often as prose, and
# a closing pair must not be taken for an opening one.
_ENTRY = re.compile(
    r"^(?P<comment>(?:[ \t]*\#[^\n]*\n)+)"
    rf"|^[ \t]*(?P<signature>(?:async\ +def|def|class)\ +\w+\ *(?:{_PARENTHESES})?[^\n:()]*)"
    rf":[ \t]*(?:\#[^\n]*)?\n\s*{_DOCSTRING}",
    re.MULTILINE | re.DOTALL,
)
_COMMENT_MARK = re.compile(r"^[ \t]*#+ ?", re.MULTILINE)
_WORDS = re.compile(r"(?:[A-Za-z]{2,}\W+){3}")  # three words in a row tell prose from rulers


class Document(NamedTuple):
    """A text and the name it is sorted by."""

    name: str
    text: str


def documents() -> list[Document]:
    """The corpus, sorted by name; the same on every call with the same Python installation.

    Raises:
      UserError: the installation has no library sources (it is stripped, or packed in an archive).
    """
    found = list(_topics(topics.topics))
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = [
        Document(path.relative_to(root).as_posix(), path.read_text("utf-8", errors="replace"))
        for path in _source_files(root)
    ]
    if not sources:
        raise UserError(
            f"no embedded data: {root} has no library sources; use an installation of Python that "
            "has them, or other data"
        )
    found += _module_documents(sorted(sources))
    return sorted(found)


def _topics(texts: dict[str, str]) -> Iterator[Document]:
    """Topics that no longer topic repeats, or both splits might hold the same text. A repetition
    differs in the underline of its heading, so the first two lines do not count."""
    for name, text in texts.items():
        body = text.split("\n", 2)[-1].strip()
        if not any(body in other and len(text) < len(other) for other in texts.values()):
            yield Document(f"topics/{name}", text)


def _source_files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Source files of standard-library modules; `sys` knows which these are, so files that a
    distribution or a build adds stay out."""
    for path in folder.glob("*"):
        if path.stem not in sys.stdlib_module_names or path.stem in _SKIPPED_FOLDERS:
            continue
        if path.suffix == ".py":
            yield path
        elif path.is_dir():
            yield from (
                inner
                for inner in path.rglob("*.py")
                if _SKIPPED_FOLDERS.isdisjoint(inner.relative_to(folder).parts)
            )


def _module_documents(sources: list[Document]) -> Iterator[Document]:
    seen: set[str] = set()
    for name, source in sources:
        entries = [entry for entry in _prose(source) if entry not in seen]
        seen.update(entries)  # licences and shared docstrings count once, or they would leak
        text = "\n\n".join(entries)
        yield Document(name, source if len(text) >= MOSTLY_PROSE * len(source) else text)


def _prose(source: str) -> Iterator[str]:
    """Docstrings and comments of a module in source order, without marks and indentation."""
    head = _MODULE_DOCSTRING.match(source)
    if head:
        yield inspect.cleandoc(head["doc"]).rstrip()
    for entry in _ENTRY.finditer(source, head.end() if head else 0):
        if entry["comment"]:
            comment = _COMMENT_MARK.sub("", entry["comment"]).strip()
            if _WORDS.search(comment):
                yield comment
        else:
            signature, doc = " ".join(entry["signature"].split()), inspect.cleandoc(entry["doc"])
            yield f"{signature}:\n{doc}".rstrip()
