"""What several files of tests read and none changes."""

from __future__ import annotations

import pathlib

import pytest

from tests.data.corpora import prepared


@pytest.fixture(scope="session")
def directory(tmp_path_factory) -> pathlib.Path:
    return prepared(tmp_path_factory.mktemp("data"))
