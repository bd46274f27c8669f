"""Entry of every command: parses flags, runs `main`, tells a user's mistakes in one line.

A command module defines its absl flags and a `main` without arguments, and ends with

    if __name__ == "__main__":
        cli.run(main)
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import math
import os
import pathlib
import select
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from absl import flags
from absl import logging as absl_logging

from xmod_jax.claims import RunClaimed
from xmod_jax.errors import UserError
from xmod_jax.processes import REQUEUE, ProcessLost, end_with
from xmod_jax.training.preemption import Preempted

FAULT = 1  # of the program, with its traceback
MISTAKE = 2
INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
READER_GONE = 128 + 13  # the same for SIGPIPE

_ADVICE = {
    errno.ENOSPC: "free some space or choose another folder, then start again",
    errno.EDQUOT: "free some of your quota or choose another folder, then start again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or choose another folder",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a path that you may read and write",
    errno.EPERM: "choose a path that you may read and write",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "choose another path: a part of this one is a file, not a folder",
    errno.EISDIR: "choose another path: this one is a folder, not a file",
    errno.EEXIST: "choose another path: this one is taken",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "choose a path without a loop of links",
}
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Parses the command line's absl flags, calls `main` and exits with its status.

    Status: what `main` returns (None is 0); 2 with one line on stderr for a wrong flag or argument,
    a `UserError`, or a path that cannot be used or written; 75 when training was asked to leave and
    has saved, lost one of its processes, or met a run that another worker holds: another start may
    go on; any other that another process of the run ended with first; 130 after an interrupt; 141
    when the reader of the output has gone. ``--help`` prints the docstring and flags of main's
    module. Any other exception is a fault of the program and keeps its traceback.
    """
    # Python has no stream where the caller closed the descriptor.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path need not be UTF-8, and a terminal not know every character.
        sys.stdout.reconfigure(errors="backslashreplace")
    absl_logging.get_absl_logger().addFilter(_worth_logging)
    logging.getLogger("asyncio").addFilter(_worth_logging)
    sys.unraisablehook = _show_unraisable
    try:
        status = _status(main)
    except Exception:
        if not end_with(FAULT):
            raise
        traceback.print_exc()
        os._exit(FAULT)
    if status not in (0, REQUEUE) and end_with(status):
        # The interpreter's end would wait for the others, who have not got as far.
        os._exit(status)
    sys.exit(status)


def output_folder(path: str | pathlib.Path) -> pathlib.Path:
    """The folder of ``--output``: made, and found writable, before the long part of a command.

    Raises:
      UserError: it cannot be written to.
      OSError: it cannot be made.
    """
    folder = pathlib.Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: cannot be written to: choose another folder with --output=DIR")
    return folder


def check_output_file(given: str) -> None:
    """Refuses a file of ``--output`` that could not be written, before the long part of a command.

    Raises:
      UserError: it is a folder, or its folder is missing or cannot be written to.
    """
    path = pathlib.Path(given)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--output={path}: not a file in a folder that can be written to")


def abandon(lost: ProcessLost) -> NoReturn:
    """Ends the process at once: the interpreter's way out would wait for the one that is lost."""
    _say(str(lost))
    end_with(lost.status)
    os._exit(lost.status)


def _status(main: Callable[[], int | None]) -> int:
    try:
        status = _help(main) if _wants_help(sys.argv[1:]) else _parse_and_call(main)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except Preempted as leaving:
        _say(str(leaving))
        return REQUEUE
    except ProcessLost as lost:
        abandon(lost)
    except RunClaimed as claimed:
        _say(str(claimed))
        return REQUEUE
    except (UserError, flags.Error) as error:
        _say(f"error: {error}")
        return MISTAKE
    except BrokenPipeError:
        # A pipe to a worker process can break as well, and that is a fault to be seen.
        if not _reader_gone():
            raise
        return READER_GONE
    except Exception as error:
        line = _path_trouble(error) or _disk_full(error)
        if line is None:
            raise
        _say(f"error: {line}")
        return MISTAKE
    finally:
        _settle_output()


def _parse_and_call(main: Callable[[], int | None]) -> int:
    # Without this, absl stops at the first plain argument and calls later flags missing.
    flags.FLAGS.set_gnu_getopt(True)
    extra = flags.FLAGS(sys.argv)[1:]
    if extra:
        raise UserError(
            f"unexpected argument {extra[0]!r}: write flags as --name=value (--help lists them)"
        )
    _refuse_hollow()
    return main() or 0


def _refuse_hollow() -> None:
    """Refuses NaN, which no bound of a flag stops, and lists with an empty part, as in ``a,,b``."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        value: Any = flag.value
        if isinstance(value, float) and math.isnan(value):
            raise UserError(f"--{name}=nan is not a number")
        if isinstance(flag.parser, flags.ListParser) and "" in (value or ()):
            raise UserError(f"--{name}={','.join(value)} has an empty part: remove a comma")


def _say(message: str) -> None:
    """Prints a message to stderr as one line, whatever line breaks it has; nobody may listen."""
    with contextlib.suppress(OSError):
        print(" ".join(message.split()), file=sys.stderr, flush=True)


def _path_trouble(error: Exception) -> str | None:
    """One line for a path that cannot be used, None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _ADVICE or error.filename is None:
        return None
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "output"
    return f"{where}: {os.strerror(error.errno)}: {_ADVICE[error.errno]}"


def _disk_full(error: BaseException) -> str | None:
    """One line for a disk that takes no more, None for any other error.

    A failed write names no path, and libraries wrap it, some in their own type with only the text
    left; so the text is looked for, in the causes as well.
    """
    cause: BaseException | None = error
    while cause is not None:
        for code in _DISK_FULL:
            if os.strerror(code) in str(cause):
                return f"{cause}: {_ADVICE[code]}"
        cause = cause.__cause__ or cause.__context__
    return None


# Beginnings of Orbax's messages about what is as it shall be, or is told otherwise.
_BESIDE = ("Given directory is read only", "Failed to json parse Metadata file")


def _worth_logging(record: logging.LogRecord) -> bool:
    """False for what Orbax logs beside an error that reaches the main thread.

    That is one of its threads at a full disk, or the other reads of a damaged checkpoint. The main
    thread tells it in one line. A checkpoint that is opened to be read is no news either.
    """
    error = record.exc_info[1] if record.exc_info else None
    if record.name == "asyncio":
        return "was never retrieved" not in record.getMessage()
    if str(record.msg).startswith(_BESIDE):
        return False
    return error is None or _disk_full(error) is None


def _show_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """As Python does, but for reads of a damaged checkpoint beside the one that was told of.

    They end in TensorStore's threads, whose loop is closed by then, or in Orbax's coroutines.
    """
    frames = traceback.walk_tb(unraisable.exc_traceback)
    in_orbax = any("orbax" in frame.f_code.co_filename for frame, _ in frames)
    if not in_orbax and str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _reader_gone() -> bool:
    """Whether the other end of stdout or stderr is closed."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _settle_output() -> None:
    """Flushes; drops what cannot be written, else the interpreter complains as it exits."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _wants_help(arguments: list[str]) -> bool:
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(argument in ("--help", "-help", "-h", "--helpfull") for argument in before)


def _help(main: Callable[[], int | None]) -> int:
    module = sys.modules[main.__module__]
    spec = module.__spec__
    command = f"-m {spec.name}" if spec else sys.argv[0]
    print((module.__doc__ or "").strip())
    print(f"\nusage: python {command} --flag=value ...\n\nflags:")
    # absl files the flags of the module that Python runs under the program's path.
    owner = sys.argv[0] if main.__module__ == "__main__" else main.__module__
    for flag in sorted(flags.FLAGS.get_key_flags_for_module(owner), key=lambda flag: flag.name):
        print("\n".join(_flag_lines(flag)))
    return 0


def _flag_lines(flag: flags.Flag) -> Iterator[str]:
    name = f"--[no]{flag.name}" if flag.boolean else f"--{flag.name}"
    yield f"  {name}"
    default = f" (default: {flag.default_as_str})" if flag.default_as_str else ""
    yield from textwrap.wrap(
        f"{flag.help}{default}", 96, initial_indent="      ", subsequent_indent="      "
    )
