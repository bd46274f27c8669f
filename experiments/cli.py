"""Entry of every command: parses flags, runs `main`, tells a user's mistakes in one line.

A command module defines its absl flags and a `main` without arguments, and ends with

    if __name__ == "__main__":
        cli.run(main)
"""

from __future__ import annotations

import contextlib
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

from experiments import environment, troubles
from xmod_jax import storage
from xmod_jax.claims import RunClaimed
from xmod_jax.errors import UserError
from xmod_jax.processes import REQUEUE, ProcessLost, end_with
from xmod_jax.training.preemption import Preempted

FAULT = 1  # of the program, with its traceback
MISTAKE = 2
INTERRUPTED = 128 + 2  # as a shell reports a process that SIGINT ended
READER_GONE = 128 + 13  # the same for SIGPIPE

_ASKED = "error: a number is not finite, which JAX_DEBUG_NANS or JAX_DEBUG_INFS asks to stop at"
_OURS = "this is a fault of the program: please report it, with the lines above and the command"
# Flags of text that may be empty, and those that are no paths.
_TEXTS = ("prompt", "stop")
_NO_PATHS = (*_TEXTS, "coordinator")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Parses the command line's absl flags, calls `main` and exits with its status.

    Status: what `main` returns (None is 0); 2 with one line on stderr for a wrong flag or argument,
    a `UserError`, or what the machine does not give (`troubles`); 75 when training was asked to
    leave and has saved, lost one of its processes, or met a run that another worker holds: another
    start may go on; any other that another process of the run ended with first; 130 after an
    interrupt; 141 when the reader of the output has gone. ``--help`` prints the docstring and flags
    of main's module. Any other exception is a fault of the program: status 1, its traceback, and
    whom to tell.
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
    status = _status(main)
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
        environment.settle()
        status = _help(main) if _wants_help(sys.argv[1:]) else _parse_and_call(main)
        sys.stdout.flush()
        return status
    except BaseException as error:
        return _tell(error)
    finally:
        _settle_output()


def _tell(error: BaseException) -> int:
    """Says what ended a command; the status to leave with."""
    match error:
        case SystemExit():
            raise error
        case KeyboardInterrupt():
            _say("interrupted")
            return INTERRUPTED
        case Preempted() | RunClaimed():
            _say(str(error))
            return REQUEUE
        case ProcessLost():
            abandon(error)
        case UserError() | flags.Error():
            repeated = _repeated()
            _say(f"error: {error}" + (f" ({repeated})" if repeated else ""))
            return MISTAKE
        # A pipe to a worker process can break as well, and that is a fault to be seen.
        case BrokenPipeError() if _reader_gone():
            return READER_GONE
    if line := troubles.line(error):
        _say(f"error: {line}")
        return MISTAKE
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    _say(_ASKED if isinstance(error, FloatingPointError) else _OURS)
    return FAULT


def _before_run(kind: type[BaseException], error: BaseException, trace: Any) -> NoReturn:
    """In place of Python's traceback for what ends a command while its modules are loaded."""
    status = _tell(error)
    _settle_output()
    sys.exit(status)


def _parse_and_call(main: Callable[[], int | None]) -> int:
    # Without this, absl stops at the first plain argument and calls later flags missing.
    flags.FLAGS.set_gnu_getopt(True)
    for flag in map(flags.FLAGS.__getitem__, flags.FLAGS):
        if flag.present:  # from an earlier command of this process
            flag.unparse()
    extra = flags.FLAGS(sys.argv)[1:]
    if extra:
        raise UserError(
            f"unexpected argument {extra[0]!r}: write flags as --name=value (--help lists them)"
        )
    for name in flags.FLAGS:
        _check_value(name, flags.FLAGS[name])
    status = main() or 0
    if repeated := _repeated():
        _say(f"warning: {repeated}")
    return status


def _repeated() -> str:
    """Which flags were given several times, of which one value alone was taken."""
    several = [
        f"--{name} was given {flag.present} times, {flag.value!r} was taken"
        for name, flag in ((name, flags.FLAGS[name]) for name in flags.FLAGS)
        if flag.present > 1 and not isinstance(flag, flags.MultiFlag)
    ]
    return "; ".join(several)


def _check_value(name: str, flag: flags.Flag) -> None:
    """Refuses values that no command can mean, and paths that are no local ones.

    That are NaN and infinity, which no bound of a flag stops, empty values (an unset variable of a
    shell), lists with an empty part, as in ``a,,b``, and the character that no text or path holds.
    """
    value: Any = flag.value
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"--{name}={value} is not a finite number")
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str) for part in parts):
        return
    given = f"--{name}={','.join(parts)}"
    if any("\0" in part for part in parts):
        raise UserError(f"{given!r} holds a null character")
    if name in _TEXTS or not flag.present:
        return
    if not "".join(parts).strip() and len(parts) < 2:
        raise UserError(f"{given} is empty: give a value, or leave the flag out")
    if not all(map(str.strip, parts)):
        raise UserError(f"{given} has an empty part: remove a comma")
    if name not in _NO_PATHS:
        _check_encoding(given)
        local = [_local_paths(part, f"--{name}=") for part in parts]
        flag.value = local if isinstance(value, list) else local[0]


def _check_encoding(given: str) -> None:
    try:
        os.fsencode(given)
    except UnicodeEncodeError as error:
        told = f"in {error.encoding}, the encoding of file names here"
        raise UserError(f"{given!r} cannot be written {told}: choose other characters") from error


def _local_paths(value: str, told: str) -> str:
    """A value of which every part between commas is no address; a ``file:///`` one as its path."""
    return ",".join(storage.local_path(part, told) for part in value.split(","))


def _say(message: str) -> None:
    """Prints a message to stderr as one line, whatever line breaks it has; nobody may listen."""
    with contextlib.suppress(OSError):
        print(" ".join(message.split()), file=sys.stderr, flush=True)


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
    return error is None or troubles.disk_full(error) is None


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


if str(getattr(sys.modules["__main__"].__spec__, "name", "")).startswith("experiments."):
    # The modules that a command loads next read the environment, and can be interrupted.
    sys.excepthook = _before_run
    environment.settle()
