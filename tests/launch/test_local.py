"""launch/local.sh: makes its environment once, redoes what was cut short, refuses in one line.

A stub of uv stands for the installer, so nothing is downloaded.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_UV = """#!/bin/sh
echo "$@" >> "$UV_LOG"
env > "$UV_LOG.env"
case "$UV_DOES" in
  fail) exit 1 ;;
  die) kill -9 $PPID ;;
  wait) sleep 0.5 ;;
esac
"""
# Makes environments whose Python notes what pip is told.
_PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*)
    for last; do :; done
    mkdir -p "$last/bin"
    printf '#!/bin/sh\\ncase "$*" in *"-m pip install"*) echo "pip $@" >> "$UV_LOG";; esac\\n' \\
      > "$last/bin/python"
    chmod +x "$last/bin/python" ;;
  *) exec "{real}" "$@" ;;
esac
"""


def _script(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class _Checkout:
    """A copy of what local.sh reads, and a PATH whose first folder holds the stubs."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.root = folder / "check out"
        self.tools = folder / "tools"
        self.log = folder / "uv.log"
        self.venv = self.root / ".venv"
        (self.root / "launch").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copy(_ROOT / "launch/local.sh", self.root / "launch")
        for name in ("requirements.lock", "setup.cfg", "pyproject.toml"):
            (self.root / name).write_text("")
        _script(self.tools / "uv", _UV)
        _script(self.tools / "python3", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')

    def start(self, *command: str, does: str = "", **extra: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.tools}:{os.environ['PATH']}",
            "HOME": str(self.root),
            "UV_LOG": str(self.log),
            "UV_DOES": does,
            **extra,
        }
        return subprocess.Popen(
            [str(self.root / "launch/local.sh"), *command],
            cwd=self.root.parent,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *command: str, does: str = "", **extra: str) -> tuple[int, str, str]:
        process = self.start(*command, does=does, **extra)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def installs(self) -> int:
        """Calls of the installer so far; one install makes two, packages and checkout."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> _Checkout:
    return _Checkout(tmp_path)


def _assert_refused(result: tuple[int, str, str], part: str) -> None:
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert part in err


def test_without_a_command_prints_usage(checkout: _Checkout) -> None:
    _assert_refused(checkout.run(), "usage: ")
    assert not checkout.venv.exists()


def test_environment_is_made_once(checkout: _Checkout) -> None:
    assert checkout.run("true")[0] == 0
    assert checkout.run("true") == (0, "", "")
    assert checkout.installs() == 2
    assert "--no-deps --editable ." in checkout.log.read_text()


def test_command_runs_in_root_with_environment_first(checkout: _Checkout) -> None:
    probe = 'pwd; command -v python; echo "$PYTHONPATH"; printf "%s\\n" "$@"'
    command = ("bash", "-c", probe, "probe", "two words", "*", "")
    status, out, _ = checkout.run(*command, PYTHONPATH="/some:/where")
    assert status == 0
    python = str(checkout.venv / "bin/python")
    assert out.split("\n") == [
        *(str(checkout.root), python, "/some:/where"),
        *("two words", "*", "", ""),
    ]


def test_status_of_the_command_is_passed_on(checkout: _Checkout) -> None:
    assert checkout.run("bash", "-c", "exit 7")[0] == 7


@pytest.mark.parametrize("changed", ["requirements.lock", "setup.cfg"])
def test_changed_requirements_are_installed_again(checkout: _Checkout, changed: str) -> None:
    checkout.run("true")
    (checkout.root / changed).write_text("# changed\n")
    (checkout.venv / "kept").touch()
    assert checkout.run("true")[0] == 0
    assert checkout.installs() == 4
    assert (checkout.venv / "kept").exists()


@pytest.mark.parametrize("does", ["die", "fail"])
def test_install_cut_short_is_done_again_from_nothing(checkout: _Checkout, does: str) -> None:
    if does == "fail":
        # Neither can pip, which is tried next, read this.
        (checkout.root / "requirements.lock").write_text("= no requirement\n")
    status, out, err = checkout.run("echo", "ran", does=does)
    assert (status, out) == (-9 if does == "die" else 1, "")
    assert ("trying pip" in err) == (does == "fail")
    (checkout.venv / "half").touch()
    status, out, err = checkout.run("echo", "ran")
    assert (status, out) == (0, "ran\n")
    assert "cut short" in err
    assert not (checkout.venv / "half").exists()
    assert checkout.run("true") == (0, "", "")


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_two_starts_at_once_install_once(checkout: _Checkout) -> None:
    starts = [checkout.start("echo", "ran", does="wait") for _ in range(2)]
    ends = [start.communicate(timeout=60) for start in starts]
    assert [out for out, _ in ends] == ["ran\n", "ran\n"]
    assert checkout.installs() == 2
    assert sum("waiting for another start" in err for _, err in ends) == 1


def test_environment_folder_can_be_chosen(checkout: _Checkout) -> None:
    status, out, _ = checkout.run("bash", "-c", "command -v python", XMOD_VENV="else/where")
    assert (status, out) == (0, f"{checkout.root.parent}/else/where/bin/python\n")
    assert not checkout.venv.exists()


def test_environment_of_another_checkout_is_pointed_here(checkout: _Checkout) -> None:
    checkout.run("true", XMOD_VENV="shared")
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root = moved
    assert checkout.run("true", XMOD_VENV="shared")[0] == 0
    assert checkout.installs() == 4


def test_folder_with_other_files_is_refused_untouched(checkout: _Checkout) -> None:
    precious = checkout.root.parent / "home" / "precious"
    precious.parent.mkdir()
    precious.touch()
    result = checkout.run("true", XMOD_VENV=str(precious.parent))
    _assert_refused(result, "no virtual environment")
    assert precious.exists()
    _assert_refused(checkout.run("true", XMOD_VENV=str(precious)), "cannot write")


def test_no_python_of_a_right_version_is_refused(checkout: _Checkout) -> None:
    for name in ("bash", "cat", "dirname", "readlink", "mkdir", "rm", "find", "flock"):
        if path := shutil.which(name):
            (checkout.tools / name).symlink_to(path)
    # A version manager's name that starts nothing, and one that is too old.
    _script(checkout.tools / "python3", "#!/bin/sh\nexit 127\n")
    _script(checkout.tools / "python3.11", '#!/bin/sh\ncase "$*" in *version*) exit 1;; esac\n')
    for _ in range(2):
        _assert_refused(checkout.run("true", PATH=str(checkout.tools)), "no Python 3.11")


def test_environment_of_a_wrong_python_is_refused(checkout: _Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    _script(checkout.venv / "bin/python", "#!/bin/sh\nexit 1\n")
    _assert_refused(checkout.run("true"), "no working Python")
    assert checkout.installs() == 0


def test_settings_that_would_install_elsewhere_do_not_reach_the_installer(
    checkout: _Checkout,
) -> None:
    elsewhere = {
        **dict.fromkeys(("PIP_USER", "PIP_DRY_RUN", "PIP_REQUIRE_HASHES"), "1"),
        **dict.fromkeys(("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_CONSTRAINT"), "/nowhere"),
        **dict.fromkeys(("UV_SYSTEM_PYTHON", "UV_REQUIRE_HASHES"), "1"),
        **dict.fromkeys(("UV_PYTHON", "UV_TARGET", "PYTHONPATH", "PYTHONHOME"), "/nowhere"),
    }
    kept = {"PIP_INDEX_URL": "site", "PIP_CERT": "c", "PIP_CACHE_DIR": "d", "UV_INDEX_URL": "site"}
    assert checkout.run("true", **elsewhere, **kept)[0] == 0
    seen = dict(
        line.split("=", 1) for line in (checkout.log.with_name("uv.log.env")).read_text().split()
        if "=" in line
    )  # fmt: skip
    assert not set(elsewhere) & set(seen)
    assert kept.items() <= seen.items()


def test_the_fallback_never_installs_for_the_user(checkout: _Checkout) -> None:
    _script(checkout.tools / "python3", _PYTHON.format(real=sys.executable))
    assert checkout.run("true", does="fail", PIP_USER="1")[0] == 0
    calls = checkout.log.read_text().splitlines()
    with_pip = [call for call in calls if call.startswith("pip -I")]
    assert len(with_pip) == 2 and all("--no-user" in call for call in with_pip)


def test_home_of_another_python_does_not_reach_the_command(checkout: _Checkout) -> None:
    probe = ("bash", "-c", 'echo "${PYTHONHOME-none} $VIRTUAL_ENV"')
    elsewhere = {"PYTHONHOME": "/nowhere", "VIRTUAL_ENV": "/nowhere"}
    assert checkout.run(*probe, **elsewhere)[:2] == (0, f"none {checkout.venv}\n")


def test_the_command_finds_the_checkouts_modules_whatever_python_is_told(
    checkout: _Checkout,
) -> None:
    probe = ("bash", "-c", 'echo "${PYTHONSAFEPATH-none}"')
    assert checkout.run(*probe, PYTHONSAFEPATH="1")[:2] == (0, "none\n")


@pytest.mark.parametrize("folder", ["gs://bucket/venv", "/tmp/a:b"])
def test_a_folder_that_no_path_can_name_is_refused(checkout: _Checkout, folder: str) -> None:
    _assert_refused(checkout.run("true", XMOD_VENV=folder), f"{folder} cannot hold")
    assert not (checkout.root.parent / "gs:").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_checkout_that_is_read_only_is_installed_from_a_copy(checkout: _Checkout) -> None:
    for name in ("README.md", "LICENSE"):
        (checkout.root / name).touch()
    (checkout.root / "xmod_jax").mkdir()
    checkout.root.chmod(0o555)
    try:
        assert checkout.run("true", XMOD_VENV="else")[0] == 0
    finally:
        checkout.root.chmod(0o755)
    assert "--force-reinstall" in checkout.log.read_text()
    assert "--editable" not in checkout.log.read_text()
