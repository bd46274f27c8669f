"""Folders of safetensors: damaged, cut or misleading ones in one line, and writing whole or not."""

from __future__ import annotations

import json
import os
import pathlib
import struct

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from tests.exchange import folders
from tests.exchange.folders import CONFIG
from xmod_jax.errors import UserError
from xmod_jax.exchange import tensors

PLAIN = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _refusal(folder):
    """What a folder's tensors are refused with: one line that names the folder."""
    with pytest.raises(UserError) as error:
        found = tensors.TensorFolder(folder)
        for name in found.names:
            found.shape(name)
            found.read(name)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


def _raw(folder, header, data=b"\0" * 8, length=None):
    """A file of a header and data as they are given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    (folder / tensors.SINGLE).write_bytes(struct.pack("<Q", length) + text + data)


@pytest.mark.parametrize(
    "file",
    [
        ({"a": PLAIN}, b"\0" * 8, 2**63),
        ({"a": PLAIN}, b"\0" * 8, 10**8 + 1),
        ({"a": PLAIN}, b"\0" * 8, 10**6),
        ({"a": PLAIN, "b": PLAIN},),
        ({"a": PLAIN | {"dtype": "F33"}},),
        ({"a": PLAIN | {"dtype": "F64"}},),
        ({"a": PLAIN | {"shape": [10**9]}},),
        ({"a": PLAIN | {"shape": [-2]}},),
        ({"a": PLAIN | {"shape": [2**40, 2**40]}},),
        ({"a": PLAIN | {"data_offsets": [8, 0]}},),
        ({"a": PLAIN}, b"\0" * 4),
        ({"a": PLAIN}, b"\0" * 80),
        (b"[]",),
        (b"\xff\xfe",),
        (b'{"a":' * 50_000,),
        (b"", b"", 0),
    ],
)
def test_a_header_that_lies_is_one_line(tmp_path, file):
    _raw(tmp_path, *file)
    assert "model.safetensors: damaged or cut" in _refusal(tmp_path)


def test_a_pointer_in_place_of_the_weights_is_called_so(tmp_path):
    folders.make(tmp_path / "theirs", CONFIG)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "theirs/model.safetensors").write_text(pointer)
    assert "model.safetensors: a pointer of Git LFS" in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize("cut", [0, 4, 100, -5])
def test_a_file_that_was_cut_is_one_line(tmp_path, cut):
    folders.make(tmp_path / "theirs", CONFIG, shards=2)
    path = tmp_path / "theirs/model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    assert "model-00002-of-00002.safetensors: damaged or cut" in _refusal(tmp_path / "theirs")


@pytest.mark.parametrize(
    ("kind", "size"), [("I8", 1), ("F8_E4M3", 1), ("F4", 0.5), ("BOOL", 1), ("I64", 8)]
)
def test_numbers_that_are_no_weights_are_refused_by_their_type(tmp_path, kind, size):
    shape = [int(8 / size)]
    _raw(tmp_path, {"a": {"dtype": kind, "shape": shape, "data_offsets": [0, 8]}})
    assert f"a is of type {kind}: only F64, F32, F16, BF16 are read" in _refusal(tmp_path)


@pytest.mark.parametrize("value", [np.float32(np.nan), np.float64(1e300)])
def test_numbers_that_float32_does_not_hold_are_one_line(tmp_path, value):
    save_file({"a": np.array([1, value, 2])}, tmp_path / tensors.SINGLE)
    assert "a holds numbers that are not finite" in _refusal(tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        "..",
        ".",
        "",
        "../out.safetensors",
        "sub/model.safetensors",
        "/etc/passwd",
        "/tmp/model.safetensors",
        "pytorch_model.bin",
        3,
        None,
        ["a"],
    ],
)
def test_an_index_reaches_no_file_outside_its_folder(tmp_path, place):
    index = {"weight_map": {"model.norm.weight": place}}
    (tmp_path / tensors.INDEX).write_text(json.dumps(index))
    assert "its weight_map does not name files of this folder" in _refusal(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_without_files_is_one_line(tmp_path, index):
    (tmp_path / tensors.INDEX).write_text(json.dumps(index))
    assert "its weight_map does not name files" in _refusal(tmp_path)


def test_an_index_that_names_what_is_no_file_is_one_line(tmp_path):
    (tmp_path / "dir.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for place, what in [
        ("gone.safetensors", "no such file"),
        ("a\0b.safetensors", "no such file"),
        ("\ud800.safetensors", "no such file"),
        ("dir.safetensors", "not a file"),
        ("pipe.safetensors", "not a file"),
    ]:
        (tmp_path / tensors.INDEX).write_text(json.dumps({"weight_map": {"a": place}}))
        assert f"{place}: {what}, model.safetensors.index.json names it" in _refusal(tmp_path)


def test_a_file_that_may_not_be_read_or_mapped_is_one_line(tmp_path, monkeypatch):
    folders.make(tmp_path / "theirs", CONFIG)

    def fails(*_, **__):
        raise OSError("No such device (os error 19)")

    monkeypatch.setattr(safetensors, "safe_open", fails)
    assert "model.safetensors: cannot be read: No such device" in _refusal(tmp_path / "theirs")

    def forbidden(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "open", forbidden)
    with pytest.raises(PermissionError) as error:
        tensors.TensorFolder(tmp_path / "theirs")
    assert error.value.filename == str(tmp_path / "theirs/model.safetensors")


def test_two_files_that_hold_one_tensor_or_two_ways_to_read_are_one_line(tmp_path):
    folders.make(tmp_path / "theirs", CONFIG, shards=2)
    folder = tmp_path / "theirs"
    first, second = sorted(folder.glob("*.safetensors"))
    whole = second.read_bytes()
    second.write_bytes(first.read_bytes())
    assert "stands in model-00001-of-00002.safetensors as well" in _refusal(folder)
    second.write_bytes(whole)
    (folder / tensors.SINGLE).write_bytes(whole)
    assert "remove the one that is not meant" in _refusal(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "neither model.safetensors nor model.safetensors.index.json in it"),
        ("pytorch_model.bin", "pytorch_model.bin: pickled weights are not read"),
        ("consolidated.00.pth", "pickled weights are not read"),
        ("model-Q4_K_M.gguf", "GGUF is not read: save the model as safetensors"),
        ("tf_model.h5", "TensorFlow's weights are not read"),
        ("model-00001-of-00002.safetensors", "alone does not say what belongs to it"),
    ],
)
def test_other_weights_are_refused_by_what_they_are(tmp_path, file, message):
    if file:
        (tmp_path / file).write_bytes(b"x")
    assert message in _refusal(tmp_path)


# --- writing


def _write(folder, tensor=None, files=None):
    tensor = np.ones(4, np.float32) if tensor is None else tensor
    tensors.write(folder, [("a", tensor)], files or {}, tensors.DTYPES["float32"], 10**9)


def test_files_go_into_the_folder_with_the_tensors(tmp_path):
    _write(
        tmp_path / "new", files={"config.json": b"{}", "additional_chat_templates/t.jinja": b"x"}
    )
    assert (tmp_path / "new/additional_chat_templates/t.jinja").read_bytes() == b"x"
    assert (tmp_path / "new/config.json").read_bytes() == b"{}"


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    _write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [tensors.SINGLE]


def test_a_folder_whose_name_is_as_long_as_names_can_be_is_written(tmp_path):
    _write(tmp_path / ("n" * 255))
    assert (tmp_path / ("n" * 255) / tensors.SINGLE).is_file()


def test_a_folder_that_cannot_be_made_is_one_line_and_nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "lost").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(tmp_path.iterdir())
    for name, message in [
        ("file", "is a file"),
        ("file/new", "is a file"),
        ("lost", "lost is a link to nowhere"),
        ("loop/new", "loop is a link to nowhere"),
    ]:
        with pytest.raises(UserError, match=message):
            _write(tmp_path / name)
    monkeypatch.setattr(tensors.os, "access", lambda *_: False)
    with pytest.raises(UserError, match="cannot be written to"):
        _write(tmp_path / "new")
    assert sorted(tmp_path.iterdir()) == before


def test_numbers_that_are_not_finite_are_not_written(tmp_path):
    with pytest.raises(UserError, match="a holds numbers that are not finite"):
        _write(tmp_path / "new/deep/er", np.array([1, np.inf], np.float32))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_or_a_folder_taken_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    def taken(*_):
        (tmp_path / "new").mkdir()
        (tmp_path / "new/theirs").touch()

    with monkeypatch.context() as patched:
        patched.setattr(tensors, "_save", full)
        with pytest.raises(UserError, match=r"deep/new: No space left .* nothing was written"):
            _write(tmp_path / "deep/new")
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(tensors, "_save", taken)
        with pytest.raises(UserError, match="new was taken meanwhile"):
            _write(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "theirs"]
