"""The package's metadata, its bounds and the lock file agree, and light modules stay light."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import itertools
import pathlib
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# A configuration can be read, counted and reported where no accelerator library is installed.
_LIGHT = (
    "accounting",
    "claims",
    "config",
    "errors",
    "fields",
    "hierarchy",
    "identity",
    "records",
    "storage",
)


def _setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(_ROOT / "setup.cfg")
    return parser


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def _requirements(extra: str | None = None) -> list[Requirement]:
    setup = _setup()
    text = setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]
    return [Requirement(line) for line in _lines(text)]


def _locked(name: str = "requirements.lock") -> dict[str, Version]:
    pins = [line.split("==") for line in _lines((_ROOT / name).read_text())]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def test_version_matches_metadata() -> None:
    assert importlib.metadata.version("xmod_jax") == _setup()["metadata"]["version"]


def test_every_dependency_has_both_bounds_and_is_locked_within_them() -> None:
    locked = _locked("requirements-hf.lock") | _locked()
    extras = ("test", "cuda", "exchange", "eval", "hf")
    for requirement in [*_requirements(), *itertools.chain(*map(_requirements, extras))]:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, requirement
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_lock_holds_what_the_package_needs_and_no_more() -> None:
    needed: set[str] = set()
    waiting = [*_requirements(), *_requirements("test")]
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        needed.add(canonicalize_name(requirement.name))
        extras = requirement.extras or {""}
        for text in importlib.metadata.requires(requirement.name) or ():
            inner = Requirement(text)
            marker = inner.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(inner)
    assert needed == set(_locked())


def test_what_only_some_tests_need_is_locked_apart() -> None:
    apart = _locked("requirements-hf.lock")
    assert {"torch", "transformers", "lm-eval"} <= set(apart)
    assert not set(apart) & set(_locked())


def _module_level_imports(path: pathlib.Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "xmod_jax":
            names |= {f"xmod_jax.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


@pytest.mark.parametrize(
    "name", [name for name in _LIGHT if (_ROOT / f"xmod_jax/{name}.py").exists()]
)
def test_light_module_imports_only_the_standard_library_and_its_like(name: str) -> None:
    light = {f"xmod_jax.{other}" for other in _LIGHT}
    for imported in _module_level_imports(_ROOT / f"xmod_jax/{name}.py"):
        assert imported.split(".")[0] in sys.stdlib_module_names or imported in light


def test_only_the_library_is_packaged() -> None:
    include = _lines(_setup()["options.packages.find"]["include"])
    assert include == ["xmod_jax", "xmod_jax.*"]
    folders = {path.parent for path in (_ROOT / "xmod_jax").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_no_package_registry_is_named() -> None:
    # The user's own pip or uv settings decide where packages come from.
    for name in (
        "requirements.lock",
        "requirements-hf.lock",
        "setup.cfg",
        "pyproject.toml",
        "launch/local.sh",
        ".ci/run",
    ):
        text = (_ROOT / name).read_text()
        assert not re.search(r"index-url|find-links|https?://", text), name
