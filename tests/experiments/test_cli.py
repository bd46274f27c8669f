"""What a user sees of any command: status, one line for a mistake, help."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest
from absl import flags, logging

from experiments import cli
from xmod_jax.errors import UserError

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_Result = tuple[object, str, str]
_Call = Callable[..., _Result]

_COMMAND = '''"""Counts to a number.

Second paragraph.
"""
from absl import flags
from experiments import cli

_COUNT = flags.DEFINE_integer("count", 3, "How far to count.")
_NAME = flags.DEFINE_string("name", None, "Whose count.", required=True)
_LOUD = flags.DEFINE_bool("loud", False, "Whether to shout.")

def main():
    for number in range(_COUNT.value):
        print(number, flush=_LOUD.value)
    if _NAME.value == "sleeper":
        print("ready", flush=True)
        import time
        time.sleep(60)

if __name__ == "__main__":
    cli.run(main)
'''


@pytest.fixture
def call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> _Call:
    """Runs a function as a command with its own flags, in an empty folder."""
    own = flags.FlagValues()
    flags.DEFINE_integer("count", 3, "How far to count.", lower_bound=1, flag_values=own)
    flags.DEFINE_string("name", None, "Whose count.", required=True, flag_values=own)
    flags.DEFINE_bool("loud", False, "Whether to shout.", flag_values=own)
    flags.DEFINE_float("share", 0.5, "Of it.", lower_bound=0.0, flag_values=own)
    flags.DEFINE_list("parts", [], "Its parts.", flag_values=own)
    flags.DEFINE_multi_string("each", [], "One of them.", flag_values=own)
    monkeypatch.setattr(flags, "FLAGS", own)
    monkeypatch.chdir(tmp_path)

    def _call(main: Callable[[], int | None], *arguments: str) -> _Result:
        monkeypatch.setattr(sys, "argv", ["command", *(arguments or ("--name=x",))])
        with pytest.raises(SystemExit) as end:
            cli.run(main)
        return end.value.code, *capfd.readouterr()

    return _call


def _raising(error: Exception) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


def _assert_one_line(result: _Result, *parts: str) -> None:
    status, _, err = result
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(("value", "status"), [(None, 0), (0, 0), (3, 3)])
def test_status_is_what_main_returns(call: _Call, value: int | None, status: int) -> None:
    assert call(lambda: value) == (status, "", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--name=x", "--cuont=4"), "cuont"),
        (("--name=x", "--count=many"), "many"),
        (("--name=x", "--count=0"), "--count=0"),
        (("--name=x", "--loud=maybe"), "maybe"),
        (("--count=4",), "--name"),
        (("--name=x", "stray"), "'stray'"),
        (("stray", "--name=x"), "'stray'"),
        (("--name=x", "--", "--count=4"), "'--count=4'"),
        (("--name=x", "--flagfile=absent"), "absent"),
    ],
)
def test_wrong_command_line_is_one_line(
    call: _Call, arguments: tuple[str, ...], named: str
) -> None:
    _assert_one_line(call(lambda: pytest.fail("main ran"), *arguments), named)


def test_user_error_is_one_line_even_with_line_breaks(call: _Call) -> None:
    error = UserError("run 'a' is unknown:\n  take 'b'")
    _assert_one_line(call(_raising(error)), "run 'a' is unknown: take 'b'")


@pytest.mark.parametrize(
    ("use", "parts"),
    [
        (pathlib.Path("absent/file").read_bytes, ("absent/file", "check the path")),
        (lambda: os.makedirs("/dev/null/inner"), ("/dev/null/inner", "a file, not a folder")),
        (pathlib.Path(".").read_bytes, (".", "a folder, not a file")),
        (pathlib.Path(".").mkdir, (".", "taken")),
        (pathlib.Path("x" * 5000).read_bytes, ("xxx", "shorter path")),
    ],
)
def test_unusable_path_is_one_line(
    call: _Call, use: Callable[[], Any], parts: tuple[str, ...]
) -> None:
    _assert_one_line(call(use), *parts)


def _os_error(code: int, *names: str) -> OSError:
    return OSError(code, os.strerror(code), *names)


def _wrapped() -> None:
    try:
        raise _os_error(errno.ENOSPC)
    except OSError:
        raise KeyError("wrapped") from None


@pytest.mark.parametrize(
    ("main", "parts"),
    [
        (_raising(_os_error(errno.EACCES, "secret")), ("secret", "read and write")),
        (_raising(_os_error(errno.EROFS, "fixed")), ("fixed", "can be written")),
        (_raising(_os_error(errno.ENOSPC, "there")), ("there", "free some space")),
        (_raising(_os_error(errno.ENOSPC)), ("free some space",)),
        (_raising(_os_error(errno.EDQUOT)), ("quota",)),
        (_raising(ValueError(f"LIB: a/0: {os.strerror(errno.ENOSPC)}")), ("a/0", "free some")),
        (_wrapped, ("free some space",)),
        (_raising(_os_error(errno.EIO)), ("Input/output error", "system's log")),
        (_raising(_os_error(errno.EMFILE)), ("ulimit -n",)),
        (_raising(_os_error(errno.EBUSY, "mounted")), ("mounted", "another path")),
        (_raising(FileNotFoundError(errno.ENOENT, "No usable temporary directory")), ("usable",)),
        (_raising(RuntimeError("Could not determine home directory.")), ("set HOME",)),
        (_raising(MemoryError()), ("out of memory",)),
        (_raising(ModuleNotFoundError("No module named 'rare'", name="rare")), ("local.sh",)),
        (_raising(RuntimeError("Unable to initialize backend 'tpu': x\ny")), ("no device", "tpu")),
    ],
)
def test_full_or_unwritable_disk_is_one_line(
    call: _Call, main: Callable[[], None], parts: tuple[str, ...]
) -> None:
    _assert_one_line(call(main), *parts)


def _mishandled() -> None:
    try:
        os.stat("absent")
    except OSError:
        raise KeyError("fault") from None


@pytest.mark.parametrize(
    "main",
    [
        _mishandled,
        _raising(ValueError("fault")),
        _raising(_os_error(errno.ENOENT)),
        _raising(BrokenPipeError(errno.EPIPE, "a worker's pipe")),
        _raising(ModuleNotFoundError("No module", name="experiments.lost")),
        _raising(AssertionError()),
    ],
)
def test_fault_of_the_program_keeps_its_traceback_and_asks_to_be_reported(
    call: _Call, main: Callable[[], None]
) -> None:
    status, out, err = call(main)
    assert (status, out) == (1, "")
    assert err.startswith("Traceback") or "\nTraceback" in err
    assert "please report it" in err.splitlines()[-1]


def test_a_nan_that_jax_was_asked_to_stop_at_is_no_fault_of_the_program(call: _Call) -> None:
    status, _, err = call(_raising(FloatingPointError("invalid value (nan) in mul")))
    assert status == 1 and "Traceback" in err
    assert "JAX_DEBUG_NANS" in err.splitlines()[-1] and "report" not in err


def test_checkpoint_threads_say_nothing_about_a_full_disk(
    call: _Call, caplog: pytest.LogCaptureFixture
) -> None:
    def main() -> None:
        for message in (os.strerror(errno.ENOSPC), "other trouble"):
            try:
                raise ValueError(message)
            except ValueError:
                logging.exception("a thread failed")

    logging.get_absl_logger().addHandler(caplog.handler)
    try:
        assert call(main)[0] == 0
    finally:
        logging.get_absl_logger().removeHandler(caplog.handler)
    assert "other trouble" in caplog.text
    assert os.strerror(errno.ENOSPC) not in caplog.text


def _start(folder: pathlib.Path, *arguments: str, out: int | IO[Any]) -> subprocess.Popen[str]:
    (folder / "command.py").write_text(_COMMAND)
    return subprocess.Popen(
        [sys.executable, "-m", "command", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        text=True,
        stdout=out,
        stderr=subprocess.PIPE,
    )


def test_help_shows_docstring_and_own_flags(tmp_path: pathlib.Path) -> None:
    process = _start(tmp_path, "--count=many", "--help", out=subprocess.PIPE)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("Counts to a number.\n\nSecond paragraph.\n")
    for part in ("python -m command", "--count", "How far to count. (default: '3')", "--[no]loud"):
        assert part in out
    assert "--verbosity" not in out


def test_a_number_that_is_none_is_one_line(call: _Call) -> None:
    for value in ("nan", "inf", "-inf", "1e400"):
        _assert_one_line(call(lambda: 0, "--name=x", f"--share={value}"), "--share=")


def test_a_flag_twice_is_told_of_at_the_end_or_beside_the_error(call: _Call) -> None:
    given = ["--name=x", "--count=3", "--name=y", "--loud", "--noloud"]
    status, _, err = call(lambda: 0, *given)
    assert status == 0 and err.count("\n") == 1 and "--count" not in err
    assert "--name was given 2 times, 'y' was taken" in err and "--loud was given 2 times" in err
    _assert_one_line(call(_raising(UserError("wrong")), *given), "wrong", "'y' was taken")


def test_a_flag_of_several_values_may_be_given_again(call: _Call) -> None:
    assert call(lambda: 0, "--name=x", "--each=a", "--each=b")[0] == 0


@pytest.mark.parametrize("empty", ["--name=", "--name= ", "--name=\t", "--parts=", "--each="])
def test_an_empty_value_is_one_line(call: _Call, empty: str) -> None:
    given = [] if "name" in empty else ["--name=x"]
    _assert_one_line(call(lambda: 0, *given, empty), "is empty")


def test_a_null_character_is_one_line(call: _Call) -> None:
    _assert_one_line(call(lambda: 0, "--name=a\0b"), "null character")
    _assert_one_line(call(lambda: 0, "--name=\ud800"), "characters")


@pytest.mark.parametrize(
    "flag",
    [
        *("--name=gs://bucket/x", "--name=s3://b", "--name=hdfs://host/x", "--name=GS://b/x"),
        *("--name=https://host/x", "--name=gs:/bucket", "--name=file://host/x"),
        *("--parts=here,gs://b/x", "--each=gs://b/x", "--name=a=1,gs://b/x=2"),
    ],
)
def test_an_address_in_place_of_a_path_is_one_line_and_makes_nothing(
    call: _Call, tmp_path: pathlib.Path, flag: str
) -> None:
    given = [] if "--name" in flag else ["--name=x"]
    _assert_one_line(call(lambda: 0, *given, flag), "no folder of this machine", flag[2:6])
    assert not any(tmp_path.iterdir())


def test_a_file_address_is_its_path(call: _Call) -> None:
    seen: list[object] = []

    def main() -> None:
        seen.append((flags.FLAGS["name"].value, flags.FLAGS["parts"].value))

    parts = "--parts=file:///c,./gs://d,tfds:e"
    assert call(main, "--name=file:///a%20b/x", parts)[0] == 0
    assert seen == [("/a b/x", ["/c", "./gs://d", "tfds:e"])]


def test_a_list_with_an_empty_part_is_one_line(call: _Call) -> None:
    for parts in ("a,", ",a", "a,,b", ","):
        _assert_one_line(call(lambda: 0, "--name=x", f"--parts={parts}"), f"--parts={parts} has")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children can be interrupted, also where this process ignores it, as a shell's job does."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_is_one_line(tmp_path: pathlib.Path) -> None:
    process = _start(tmp_path, "--name=sleeper", "--count=0", out=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("flush", ["--loud", "--noloud"])
def test_closed_reader_is_no_error(tmp_path: pathlib.Path, flush: str) -> None:
    process = _start(tmp_path, "--name=x", "--count=100000", flush, out=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (141, "")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_one_line(tmp_path: pathlib.Path) -> None:
    with open("/dev/full", "w") as full:
        process = _start(tmp_path, "--name=x", out=full)
        _, err = process.communicate(timeout=60)
    _assert_one_line((process.returncode, "", err), "free some space")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("arguments", "status"), [("--name=x", 0), ("--count=many", 2)])
def test_streams_that_nobody_reads_change_no_status(
    tmp_path: pathlib.Path, closed: str, arguments: str, status: int
) -> None:
    (tmp_path / "command.py").write_text(_COMMAND)
    shell = f"{sys.executable} command.py {arguments} {closed}"
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    result = subprocess.run(
        shell, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == status
    assert "Traceback" not in result.stderr
