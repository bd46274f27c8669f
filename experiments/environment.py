"""What commands take from the environment variables of libraries, and what they do not.

A run's numbers depend on some settings of JAX. Commands give these the values of `NUMBERS`, for
themselves and the processes they start, whatever the environment says. Every other setting is the
user's: it works, or is refused in one line. The library changes no setting of JAX: who imports
`xmod_jax` has the numbers of these commands under the settings of `NUMBERS`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys

from xmod_jax.errors import UserError

# By their environment variables; None is JAX's own default, which has no name in the environment.
NUMBERS: dict[str, str | None] = {
    "JAX_DEFAULT_MATMUL_PRECISION": None,
    "JAX_DEFAULT_PRNG_IMPL": "threefry2x32",
    "JAX_ENABLE_X64": "0",
    "JAX_HIGH_DYNAMIC_RANGE_GUMBEL": "0",
    "JAX_NUMPY_DTYPE_PROMOTION": "standard",
    "JAX_NUMPY_RANK_PROMOTION": "allow",
    "JAX_RANDOM_SEED_OFFSET": "0",
    "JAX_THREEFRY_PARTITIONABLE": "1",
}
_SWITCHES = {"on": "1", "true": "1", "yes": "1", "y": "1", "t": "1"} | dict.fromkeys(
    ("", "off", "false", "no", "n", "f"), "0"
)
# What no program of ours can work with, and why.
_REFUSED = dict.fromkeys(("JAX_NO_EXECUTION", "JAX_NO_TRACING"), "nothing can be computed so")
_REFUSED |= dict.fromkeys(
    (
        "JAX_TRANSFER_GUARD",
        "JAX_TRANSFER_GUARD_HOST_TO_DEVICE",
        "JAX_TRANSFER_GUARD_DEVICE_TO_HOST",
    ),
    "data come from the host and results go there",
)
_REFUSED["JAX_DEBUG_INFS"] = "the logit of what may not be drawn is infinite"
_REFUSED["JAX_SCAN3"] = "that experiment of JAX has no gradients"
_REFUSED |= {
    f"JAX_ERROR_CHECKING_BEHAVIOR_{what}": "that experiment of JAX has no loops over layers"
    for what in ("DIVIDE", "NAN", "OOB")
}
_HARMLESS = ("0", "allow", "log", "log_explicit", "ignore")
# Parts of the names of XLA's flags that trade exactness for speed.
_INEXACT = re.compile(r"--(\w*(?:fast_math|fast_min_max|excess_precision|tf32)\w*)(=\S+)?")
_COMPLAINT = re.compile(r"(?:flags|parse_flags_from_env)\.cc:\d+\] (.*)")
_PARSES_XLA_FLAGS = "from jaxlib import xla_client; xla_client.CompileOptions()"


def settle() -> None:
    """Gives JAX the settings of `NUMBERS` and looks at the others; to be called before it starts.

    Tells on stderr what is not taken over, and which flags of XLA change numbers.

    Raises:
      UserError: the environment asks for what no command can work with.
    """
    for name, value in NUMBERS.items():
        _set(name, value)
    os.environ["MPLBACKEND"] = "agg"  # figures are files: nothing is shown
    # Where there is no home folder it tells of its cache in three lines.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    for name, reason in _REFUSED.items():
        value = os.environ.get(name, "0")
        if _plain(value) not in _HARMLESS:
            raise UserError(f"{name}={value}: {reason}: unset it")
    if flags := os.environ.get("XLA_FLAGS"):
        _check_xla(flags)


def use_cpu(count: int) -> None:
    """Gives JAX that many CPU devices and no other, whatever the environment says."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_platform_name", "")
    jax.config.update("jax_default_device", None)
    jax.config.update("jax_num_cpu_devices", count)


def _set(name: str, value: str | None) -> None:
    asked = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    jax = sys.modules.get("jax")
    if jax is not None and name.lower() in jax.config.values:  # not every version has all of them
        switch = isinstance(jax.config.values[name.lower()], bool)
        jax.config.update(name.lower(), value == "1" if switch else _typed(value))
    if asked is not None and _plain(asked) != _plain(value or "default"):
        told = value or "the default"
        print(f"{name}={asked} is not taken over: runs are made with {told}", file=sys.stderr)


def _typed(value: str | None) -> str | int | None:
    return int(value) if value and value.isdecimal() else value


def _plain(value: str) -> str:
    value = value.strip().lower()
    return _SWITCHES.get(value, value)


@functools.cache  # it takes a process
def _check_xla(flags: str) -> None:
    """Refuses what XLA cannot read, at which it would abort; tells of flags that are inexact."""
    done = subprocess.run(
        [sys.executable, "-c", _PARSES_XLA_FLAGS], capture_output=True, text=True, check=False
    )
    # Anything else that went wrong is told by what needs XLA.
    if done.returncode and (found := _COMPLAINT.search(done.stderr)):
        raise UserError(f"XLA_FLAGS={flags}: {found[1].strip()}: mend or unset it")
    for name, value in _INEXACT.findall(flags):
        if not value or _plain(value.removeprefix("=")) != "0":
            print(f"XLA_FLAGS: --{name}{value} changes the numbers of a run", file=sys.stderr)
