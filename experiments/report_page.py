"""HTML of a report: page, tables, figures, commands. Every text that comes in is escaped here.

The page is one file without scripts that asks no server for anything. It reads at the width of a
phone: wide tables and commands scroll inside themselves, the first column stays in place, and
shadows at their edges show that there is more.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

from matplotlib.figure import Figure

from experiments.report_svg import Palette, inline

_CSS = """
:root{color-scheme:light dark;--paper:#f6f7f9;--card:#fff;--ink:#1a1d21;--soft:#5a626d;
--line:#d9dde3;--mark:#eef1f5;--shade:rgba(0,0,0,.28);--link:#1558b0;--bad:#a3200f;
--sans:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (prefers-color-scheme:dark){:root{--paper:#121419;--card:#1b1e24;--ink:#e4e7eb;
--soft:#a3abb6;--shade:rgba(255,255,255,.3);--line:#343a44;--mark:#242932;--link:#8ab8f5;--bad:#ff9b8c}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 var(--sans)}
main{max-width:82rem;margin:0 auto;padding:1.5rem clamp(.75rem,3vw,2rem) 4rem}
h1,h2,nav a{overflow-wrap:anywhere}
h1{font-size:clamp(1.45rem,4vw,2rem);line-height:1.2;margin:.25rem 0 .5rem}
h2{font-size:clamp(1.2rem,3vw,1.5rem);line-height:1.25;margin:0 0 .5rem}
h3{font-size:1.02rem;margin:1.75rem 0 .5rem}
p{margin:.4rem 0;max-width:70ch;overflow-wrap:anywhere}
a{color:var(--link)}
.soft{color:var(--soft);font-size:.9rem}
.bad{color:var(--bad)}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;list-style:none;padding:0;margin:.75rem 0}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:clamp(.9rem,2.5vw,1.75rem);margin:1.25rem 0}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.15rem 1rem;margin:.5rem 0;
font-size:.95rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.4rem;margin:.5rem 0;
-webkit-overflow-scrolling:touch;background:
linear-gradient(90deg,var(--card) 30%,transparent) left/3rem 100% no-repeat local,
linear-gradient(270deg,var(--card) 30%,transparent) right/3rem 100% no-repeat local,
radial-gradient(farthest-side at 0 50%,var(--shade),transparent) left/1rem 100% no-repeat scroll,
radial-gradient(farthest-side at 100% 50%,var(--shade),transparent) right/1rem 100% no-repeat
scroll}
.scroll:focus-visible,figure:focus-visible{outline:2px solid var(--link);outline-offset:1px}
.scrolls{display:none}
@media (max-width:75rem){.scrolls{display:block}}
table{border-collapse:separate;border-spacing:0;font-size:.86rem;width:100%;
font-variant-numeric:tabular-nums}
th,td{padding:.38rem .65rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tbody tr:last-child>*{border-bottom:0}
thead th{background:var(--mark);font-weight:600;vertical-align:bottom;white-space:normal}
tbody th{font-weight:600}
td.long,th.long{white-space:normal;overflow-wrap:anywhere;min-width:7rem}
tbody th{max-width:18rem;white-space:normal;overflow-wrap:anywhere}
th:first-child{position:sticky;left:0;text-align:left;background:var(--card);z-index:1;
border-right:1px solid var(--line)}
thead th:first-child{background:var(--mark)}
@media (max-width:40rem){th:first-child{min-width:6.5rem;max-width:9rem;white-space:normal;
overflow-wrap:break-word}}
.figures{display:grid;gap:1rem;margin:1.25rem 0;align-items:start;
grid-template-columns:repeat(auto-fill,minmax(min(100%,21rem),1fr))}
figure{margin:0;padding:.35rem;border:1px solid var(--line);border-radius:.4rem;min-width:0}
figure svg{display:block;width:100%;height:auto;max-width:34rem;margin:0 auto;fill:var(--ink)}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{color:var(--soft);font-size:.86rem;padding:.25rem .25rem 0}
pre{overflow-x:auto;background:var(--mark);border-radius:.4rem;padding:.6rem .8rem;margin:.5rem 0;
font:.84rem/1.6 var(--mono)}
code{font-family:var(--mono);font-size:.92em;overflow-wrap:anywhere}
pre code{font-size:1em;overflow-wrap:normal}
ul{padding-left:1.25rem}li{margin:.2rem 0;overflow-wrap:anywhere}
details{margin:.75rem 0}summary{cursor:pointer}
@media print{section{break-inside:avoid;border:0}.scroll{overflow:visible}}
"""


_NARROW = 5  # columns that fit a phone
_LONG = 20  # characters of a cell that stay on one line


def text(value: object) -> str:
    """Plain text, escaped."""
    return html.escape(str(value))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> str:
    """A table that scrolls inside its frame, the first column fixed; cells are plain text.

    `title` is what a screen reader says. Long cells are broken.
    """
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>' + "".join(map(_cell, others)) + "</tr>"
        for first, *others in rows
    )
    # Focusable, so that it can be scrolled from the keyboard.
    wide = len(header) > _NARROW
    hint = "Where it is wider than the window, this table scrolls sideways."
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        + (f'<p class="soft scrolls">{hint}</p>' if wide else "")
    )


def _cell(value: str) -> str:
    kind = ' class="long"' if len(value) > _LONG else ""
    return f"<td{kind}>{text(value)}</td>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, plain text."""
    return (
        "<dl>"
        + "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs)
        + "</dl>"
    )


def listing(items: Sequence[str], kind: str = "") -> str:
    """A list of plain texts."""
    return f'<ul class="{kind}">' + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>"


def commands(lines: Sequence[str]) -> str:
    """Command lines, one a line."""
    return "<pre><code>" + "\n".join(map(text, lines)) + "</code></pre>"


def paragraph(value: str, kind: str = "") -> str:
    """One paragraph of plain text."""
    return f'<p class="{kind}">{text(value)}</p>'


def heading(value: str) -> str:
    """The heading of a part of a section."""
    return f"<h3>{text(value)}</h3>"


def folded(summary: str, inner: str) -> str:
    """A part that opens on demand; `inner` is HTML."""
    return f"<details><summary>{text(summary)}</summary>{inner}</details>"


@dataclasses.dataclass
class Page:
    """Sections as they are added; `html` makes the file.

    Attributes:
      title: of the page.
      introduction: one sentence.
    """

    title: str
    introduction: str
    _sections: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    _palette: Palette = dataclasses.field(default_factory=Palette)
    _figures: int = 0

    def add(self, title: str, *parts: str) -> None:
        """Adds a section of HTML parts."""
        self._sections.append((title, "".join(parts)))

    def figure(self, drawn: Figure | None, caption: str) -> str:
        """A figure with its caption (plain text); nothing where there is none."""
        if drawn is None:
            return ""
        self._figures += 1
        name = f"f{self._figures}"
        svg = inline(drawn, name, text(caption), self._palette)
        # Focusable, so that the keyboard reaches the figure and its name is read.
        return (
            f'<figure tabindex="0" aria-labelledby="{name}-caption">{svg}'
            f'<figcaption id="{name}-caption">{text(caption)}</figcaption></figure>'
        )

    def html(self) -> str:
        """The whole page."""
        links = "".join(
            f'<li><a href="#s{index}">{text(title)}</a></li>'
            for index, (title, _) in enumerate(self._sections)
        )
        sections = "".join(
            f'<section id="s{index}"><h2>{text(title)}</h2>{inner}</section>\n'
            for index, (title, inner) in enumerate(self._sections)
        )
        navigation = f"<nav><ul>{links}</ul></nav>" if len(self._sections) > 1 else ""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            '<meta name="color-scheme" content="light dark">'
            f"<title>{text(self.title)}</title>"
            f"<style>{_CSS}{self._palette.css()}</style></head>\n"
            f"<body><main><h1>{text(self.title)}</h1>{paragraph(self.introduction, 'soft')}"
            f"{navigation}\n{sections}</main></body></html>\n"
        )


def figures(*drawn: str) -> str:
    """Figures side by side where there is room; nothing when all are empty."""
    inner = "".join(drawn)
    return f'<div class="figures">{inner}</div>' if inner else ""
