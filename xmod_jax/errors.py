"""The error for what a user can put right: shown as one line, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake or a state of their machine, told in one line.

    The message says what is wrong, where (flag, file, line, value) and what to do about it.
    """
