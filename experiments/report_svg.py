"""Figures as parts of a page: inline SVG whose colours follow the reader's light or dark mode."""

from __future__ import annotations

import colorsys
import io
import re

import matplotlib
from matplotlib.figure import Figure

from experiments import figure_files

_TAG = re.compile(r"<[^>]*>")
_HEX = re.compile(r"#([0-9a-f]{6})\b")
_LIGHT_PAPER, _DARK_PAPER, _DARK_INK = "ffffff", "1b1e24", "e4e7eb"


class Palette:
    """The colours that the figures of one page use, each a CSS variable of both modes."""

    def __init__(self) -> None:
        self._colors: dict[str, str] = {}

    def variable(self, color: str) -> str:
        """The CSS expression for a colour of six lower-case hexadecimal digits."""
        self._colors[color] = dark(color)
        return f"var(--f-{color})"

    def css(self) -> str:
        """The variables: light ones, and their dark ones under ``prefers-color-scheme``."""
        light = "".join(f"--f-{color}:#{color};" for color in sorted(self._colors))
        night = "".join(f"--f-{color}:#{self._colors[color]};" for color in sorted(self._colors))
        return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{night}}}}}"


def dark(color: str) -> str:
    """What stands for a colour on dark paper: the same hue, light enough to be read.

    Black becomes the dark mode's ink and white its paper; a lighter colour stays the lighter one.
    """
    if color == _LIGHT_PAPER:
        return _DARK_PAPER
    if color == "000000":
        return _DARK_INK
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (0, 2, 4))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    # Grey is for grids and references, which should stay behind the data.
    lightness = 0.6 + 0.28 * lightness if saturation else 0.45 + 0.3 * lightness
    lighter = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "".join(f"{round(255 * channel):02x}" for channel in lighter)


def inline(figure: Figure, name: str, title: str, palette: Palette) -> str:
    """A figure as an ``<svg>`` element.

    It refers to nothing outside itself, its text is text in the page's own fonts, and its ids begin
    with `name`, so that many of them live in one page. The same figure gives the same text.

    Args:
      figure: any figure; its colours may be any, see `dark`.
      name: unique in the page, fit for an id.
      title: what a screen reader says; escaped already.
      palette: takes note of the colours.
    """
    out = io.StringIO()
    settings = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name})
    with settings, figure_files.any_text():
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    # Its rule for `*` would reach the whole page; the page has it for figures alone.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    # In tags alone: a run may be called anything.
    text = _TAG.sub(lambda tag: _page_tag(tag[0], name, palette), text)
    # Size comes from the page; the view box keeps the proportions.
    text = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", text, count=1)
    opening = f'<svg role="img" aria-label="{title}"'
    # The title is what a browser shows where the pointer rests.
    return re.sub(
        r"<svg([^>]*)>", lambda tag: f"{opening}{tag[1]}><title>{title}</title>", text, count=1
    )


def _page_tag(tag: str, name: str, palette: Palette) -> str:
    """A tag with ids of its own, in the page's font, its colours as variables."""
    tag = re.sub(r"\bid=\"([^\"]+)\"", rf'id="{name}-\1"', tag)
    tag = re.sub(r"(url\(#|href=\"#)", rf"\1{name}-", tag)
    tag = re.sub(r"font(-family)?: ([^;\"]*?)('DejaVu Sans'[^;\"]*)", _page_font, tag)
    return _HEX.sub(lambda match: palette.variable(match[1]), tag)


def _page_font(match: re.Match[str]) -> str:
    return f"font{match[1] or ''}: {match[2]}var(--sans)"
