"""Figures as files: both formats, each whole or not there at all."""

from __future__ import annotations

import io
import pathlib

import matplotlib
from matplotlib.figure import Figure

from xmod_jax import storage


def save(figure: Figure, folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes ``NAME.png`` and ``NAME.svg``; returns the path of the PNG.

    The same figure gives the same bytes.

    Raises:
      OSError: the disk; a figure that was there stays as it was.
    """
    with matplotlib.rc_context({"svg.hashsalt": "xmod_jax"}):
        for ending, metadata in (("svg", {"Date": None}), ("png", None)):
            content = io.BytesIO()
            figure.savefig(content, format=ending, dpi=160, metadata=metadata)
            path = folder / f"{name}.{ending}"
            storage.write_atomically(path, content.getvalue())
    return path
