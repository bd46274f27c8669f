"""Experiments, and the commands that run them: ``python -m experiments.NAME`` from the checkout."""

import importlib.util
import sys

# Before any module needs more: mostly the environment was not entered.
if sys.version_info < (3, 11) or importlib.util.find_spec("absl") is None:
    sys.stderr.write(
        "error: this is not the environment of the checkout: start commands by launch/local.sh, "
        "which makes it, as in launch/local.sh python -m experiments.describe\n"
    )
    sys.exit(2)
