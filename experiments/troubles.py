"""Errors that are no fault of the program, each in one line: paths, disks, memory, devices."""

from __future__ import annotations

import errno
import os
import re
import traceback

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
_ANOTHER_PATH = "choose another path, or ask who looks after this file system"
# Of the machine rather than of a path; mostly without one.
_MACHINE = {
    errno.EIO: "a disk or its connection fails: look at the system's log",
    errno.ESTALE: "a network file system went away: start again",
    errno.ENOLCK: "the file system has no locks left: choose another one",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has too many open files",
    errno.ENOMEM: "the machine has no memory left: stop what else runs there",
    errno.EAGAIN: "raise the limit on processes (ulimit -u), or stop some",
}
_NO_DEVICE = re.compile(r"Unable to initialize backend|Unknown backend")
_PLATFORMS = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_DEFAULT_DEVICE", "JAX_NUM_CPU_DEVICES")
_LIBRARIES = ("GRAIN_", "JAX_", "MPL", "NUMEXPR_", "ORBAX_", "TFDS_", "TQDM_")  # of their variables
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def line(error: BaseException) -> str | None:
    """What to tell of an error of the user's environment; None for a fault of the program."""
    for found in (_path, disk_full, _machine, _memory, _devices, _setting):
        if told := found(error):
            return told
    return None


def _path(error: BaseException) -> str | None:
    """A path that cannot be used."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return None
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "output"
    advice = _ADVICE.get(error.errno) or _MACHINE.get(error.errno) or _ANOTHER_PATH
    return f"{where}: {os.strerror(error.errno)}: {advice}"


def disk_full(error: BaseException) -> str | None:
    """A disk that takes no more.

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


def _machine(error: BaseException) -> str | None:
    """A limit or a failure of the machine; what the standard library tells in words of its own."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        # What is ours is missing by our fault alone.
        ours = error.name.partition(".")[0] in ("xmod_jax", "experiments")
        return None if ours else f"{error}: start commands by launch/local.sh, which installs it"
    if isinstance(error, RuntimeError) and "determine home directory" in str(error):
        return "the user has no home folder: set HOME to one that can be written to"
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in _MACHINE:
        return f"{os.strerror(error.errno)}: {_MACHINE[error.errno]}"
    if error.strerror != os.strerror(error.errno) and not isinstance(error, BrokenPipeError):
        return error.strerror
    return None


def _memory(error: BaseException) -> str | None:
    advice = "take a smaller batch or model, or a machine with more"
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}: {advice}"
    if type(error).__name__ == "JaxRuntimeError" and str(error).startswith("RESOURCE_EXHAUSTED"):
        return f"{str(error).splitlines()[0]}: {advice}"
    return None


def _devices(error: BaseException) -> str | None:
    """Devices that JAX does not find."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    told = str(error).partition("\n")[0]
    looked = any(os.path.basename(file) == "xla_bridge.py" for file in files[-3:])
    if (isinstance(error, AssertionError) and looked) or _NO_DEVICE.match(told):
        asked = [f"{n}={os.environ[n]}" for n in _PLATFORMS if os.environ.get(n)]
        found = f"JAX finds no device{' for ' if asked else ''}{' '.join(asked)}"
        advice = "unset that to take what is there" if asked else "see the lines above"
        return f"{found}{f': {told}' if told else ''}: {advice}"
    return None


def _setting(error: BaseException) -> str | None:
    """An environment variable that a library cannot read; its message quotes the value."""
    if not isinstance(error, ValueError):
        return None
    for name, value in os.environ.items():
        quoted = (f"'{value}'", f'"{value}"')
        if name.startswith(_LIBRARIES) and any(each in str(error) for each in quoted):
            return f"{name}={value}: {error}: mend or unset it"
    return None
