"""Files are whole or as they were."""

import errno
import os
import pathlib

import pytest

from tests.disk import largest_file
from tests.training import small
from xmod_jax import records, storage
from xmod_jax.errors import UserError


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


def _fsync_fails(monkeypatch, code, folders_alone=True):
    real = os.fsync

    def fsync(descriptor):
        if not folders_alone or os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS])
@pytest.mark.parametrize("folders_alone", [True, False])
def test_a_file_system_that_forces_nothing_to_disk_is_no_error(
    tmp_path, monkeypatch, code, folders_alone
):
    _fsync_fails(monkeypatch, code, folders_alone)
    storage.write_json(tmp_path / "a.json", {"a": 1})
    storage.sync(tmp_path / "a.json")
    storage.sync(tmp_path)
    assert storage.read_json(tmp_path / "a.json") == {"a": 1}


def test_a_disk_that_fails_is_an_error_with_its_path(tmp_path, monkeypatch):
    _fsync_fails(monkeypatch, errno.EIO)
    with pytest.raises(OSError) as failure:
        storage.write_json(tmp_path / "a.json", {})
    assert (failure.value.errno, failure.value.filename) == (errno.EIO, str(tmp_path))


def test_a_folder_that_cannot_be_opened_is_not_forced_to_disk(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    storage.write_json(tmp_path / "a.json", {"a": 1})
    storage.sync(tmp_path / "missing")
    assert storage.read_json(tmp_path / "a.json") == {"a": 1}


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path):
    path = tmp_path / ("ä" * 125 + ".json")
    storage.write_json(path, {"a": 1})
    assert storage.read_json(path) == {"a": 1}


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path, there):
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    if there:
        target.write_text("old")
    link.symlink_to("target.json")
    storage.write_json(link, {"a": 1})
    assert link.is_symlink() and storage.read_json(target) == {"a": 1}


def test_a_line_that_cannot_be_appended_names_its_file(tmp_path, monkeypatch):
    def fail(descriptor, size):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OSError) as failure:
        storage.append(tmp_path / "a.jsonl", {"step": 1})
    assert failure.value.filename == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands there twice"),
        (b'{"a": 1e999}', "1e999 is not a finite number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "9" * 40 + " is not a finite number"),
        (b'{"a": "\xff"}', "can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_json_object_of_ours_is_refused_with_its_path(tmp_path, content, told):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json") as refused:
        storage.read_json(path)
    assert told in str(refused.value) and len(str(refused.value)) < 400


def test_a_byte_order_mark_is_read_over(tmp_path):
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert storage.read_json(tmp_path / "a.json") == {"a": 1}


def test_a_file_far_too_large_is_not_taken_into_memory(monkeypatch):
    monkeypatch.setattr(storage, "_LARGEST", 1 << 20)
    with pytest.raises(UserError, match="/dev/zero: larger than 1 MiB"):
        storage.read_json("/dev/zero")


def test_a_run_directory_is_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory in ("gs://bucket/run", pathlib.Path("s3://bucket/run")):
        with pytest.raises(UserError, match="no folder of this machine"):
            records.prepare(directory, small.run())
    assert not any(tmp_path.iterdir())
