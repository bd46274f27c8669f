"""Files are whole or as they were."""

import os

import pytest

from tests.disk import largest_file
from xmod_jax import storage


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(tmp_path):
    storage.write_json(tmp_path / "a.json", {"a": 1})
    with largest_file(8), pytest.raises(OSError):
        storage.write_json(tmp_path / "a.json", {"a": "x" * 100})
    assert storage.read_json(tmp_path / "a.json") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_what_is_no_file_is_written_into_and_never_replaced(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    storage.write_atomically(path, b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert path.is_fifo()


def test_a_failed_write_names_the_path_that_was_asked_for(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as failure:
        storage.write_json(tmp_path / "folder", {})
    assert failure.value.filename == str(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
