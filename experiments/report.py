"""Writes one self-contained HTML page about a sweep or several.

    python -m experiments.report --workdir=DIR[,DIR...] [--output=FILE.html] [--law=law.json]

Takes run and sweep directories, finished or not: what ran, results at matched FLOPs, figures, how
to rerun each run. Directories that differ in the seed are shown as mean and spread. A law.json and
the runs' diagnostics.json are shown where they stand. The page needs no network and no script.
"""

from __future__ import annotations

import pathlib

from absl import flags

from experiments import cli, report_content, report_data, report_law
from xmod_jax import storage
from xmod_jax.errors import UserError

_WORKDIR = flags.DEFINE_list("workdir", [], "run or sweep directories, comma-separated")
_OUTPUT = flags.DEFINE_string(
    "output", None, "the page (default: report.html in the first directory)"
)
_LAW = flags.DEFINE_string("law", None, "law.json to show (default: those in the directories)")


def main() -> None:
    """Reads, draws, writes the page."""
    if not _WORKDIR.value:
        raise UserError("--workdir is missing: give run or sweep directories, comma-separated")
    folders = [pathlib.Path(path) for path in _WORKDIR.value]
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else folders[0] / "report.html"
    sweeps = report_data.load(_WORKDIR.value)
    page = report_content.build(sweeps, report_law.find(folders, _LAW.value))
    # A path that is not UTF-8 is shown with question marks, so that the page is.
    storage.write_atomically(output, page.encode(errors="replace"))
    finished = sum(len(configuration.results) for s in sweeps for configuration in s.finished)
    started = sum(len(sweep.runs) for sweep in sweeps)
    told = f"{finished} of {started} runs finished" if finished else report_content.NOTHING
    print(f"wrote {output}: {told}")


if __name__ == "__main__":
    cli.run(main)
