"""Prints what an experiment consists of: layers, parameters, FLOPs, tokens and steps of each run.

    python -m experiments.describe --experiment=main_556m --scale=paper --format=csv

FLOPs are the paper's count (forward, full attention); ``train_flops`` is phi times the tokens of
whole steps.
"""

from __future__ import annotations

import sys

from absl import flags

from experiments import cli, description, selection, tables

_FORMAT = flags.DEFINE_enum("format", "table", ["table", "csv"], "how to print")
flags.adopt_module_key_flags(selection)


def main() -> int:
    """Prints the table or the CSV."""
    experiment = selection.selected(default_scale="paper")
    if _FORMAT.value == "csv":
        sys.stdout.write(description.to_csv(experiment))
    else:
        rows = [description.table_row(run) for run in experiment.runs]
        print(tables.text_table(description.TABLE_HEADER, rows))
    for line in experiment.skipped:
        print(f"skipped {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)
