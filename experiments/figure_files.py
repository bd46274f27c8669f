"""Figures as files: both formats, each whole or not there at all."""

from __future__ import annotations

import contextlib
import io
import pathlib
import warnings
from collections.abc import Iterator

import matplotlib
from matplotlib.figure import Figure

from xmod_jax import storage


@contextlib.contextmanager
def any_text() -> Iterator[None]:
    """While figures are drawn: a sign that Matplotlib's font lacks is a box, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def save(figure: Figure, folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes ``NAME.png`` and ``NAME.svg``; returns the path of the PNG.

    The same figure gives the same bytes.

    Raises:
      OSError: the disk; a figure that was there stays as it was.
    """
    with matplotlib.rc_context({"svg.hashsalt": "xmod_jax"}):
        for ending, metadata in (("svg", {"Date": None}), ("png", None)):
            content = io.BytesIO()
            with any_text():
                figure.savefig(content, format=ending, dpi=160, metadata=metadata)
            path = folder / f"{name}.{ending}"
            storage.write_atomically(path, content.getvalue())
    return path
