"""Folders of tensors as Hugging Face lays them out: one safetensors file, or shards and an index.

Safetensors hold numbers and their names, nothing that could run; pickled weights are not read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from xmod_jax import storage
from xmod_jax.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_READABLE = ("F64", "F32", "F16", "BF16")  # what safetensors calls the types that are read


def library() -> Any:
    """The package safetensors; UserError where it is not installed."""
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise UserError(
            "Hugging Face weights need the package safetensors: install the extra exchange"
        ) from error
    return safetensors


class TensorFolder:
    """The tensors of a folder, read one at a time; the files are mapped into memory.

    Attributes:
      names: of all tensors.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens the files of a folder and reads what they hold.

        Raises:
          UserError: no safetensors there, or a file that is missing, damaged or cut; names it.
        """
        self._folder = folder
        self._error = library().SafetensorError
        self._file: dict[str, Any] = {}
        self._place: dict[str, pathlib.Path] = {}
        for path in self._paths():
            opened = self._opened(path)
            for name in opened.keys():  # noqa: SIM118  an opened file is no dictionary
                if name in self._place:
                    raise UserError(f"{path}: {name} stands in {self._place[name].name} as well")
                self._file[name], self._place[name] = opened, path

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as float32.

        Args:
          name: its name.
          shape: what it must have.

        Raises:
          UserError: not there, of another shape or type, or with numbers that are not finite.
        """
        if name not in self._file:
            raise UserError(f"{self._folder}: no tensor {name} in it")
        part = self._file[name].get_slice(name)
        kind, found = part.get_dtype(), tuple(part.get_shape())
        where = f"{self._place[name]}: {name}"
        if found != shape:
            raise UserError(f"{where} has the shape {found}, config.json asks for {shape}")
        if kind not in _READABLE:
            raise UserError(f"{where} is of type {kind}: only {', '.join(_READABLE)} are read")
        try:
            tensor = self._file[name].get_tensor(name).astype(np.float32)
        except self._error as error:
            raise UserError(f"{where} cannot be read: {error}") from error
        if not np.isfinite(tensor).all():
            raise UserError(f"{where} holds numbers that are not finite: the file is damaged")
        return tensor

    def _paths(self) -> list[pathlib.Path]:
        index = self._folder / INDEX
        if not index.exists():
            if not (self._folder / SINGLE).is_file():
                raise UserError(
                    f"{self._folder}: neither {SINGLE} nor {INDEX} in it; pickled weights (.bin) "
                    "are not read"
                )
            return [self._folder / SINGLE]
        weight_map = storage.read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
        if not all(isinstance(name, str) and pathlib.Path(name).name == name for name in names):
            raise UserError(f"{index}: its weight_map does not name files of this folder")
        return [self._folder / name for name in sorted(set(map(str, names)))]

    def _opened(self, path: pathlib.Path) -> Any:
        try:
            return library().safe_open(path, framework="np")
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file, {INDEX} names it") from error
        except self._error as error:
            raise UserError(f"{path}: damaged or cut, no whole safetensors: {error}") from error


def write(
    folder: pathlib.Path,
    tensors: Sequence[tuple[str, np.ndarray]],
    texts: Mapping[str, Mapping[str, Any]],
    dtype: np.dtype,
    shard_bytes: int,
) -> None:
    """Writes a folder whole or not at all: under another name, renamed when it is on disk.

    Args:
      folder: must not be there, or be empty.
      tensors: names and arrays, in the order of the files; a view is copied only as it is written.
      texts: JSON files beside the tensors, by name.
      dtype: of the file.
      shard_bytes: most bytes of a file; above that there are shards and an index.

    Raises:
      UserError: the folder is taken.
      OSError: the disk.
    """
    check_free(folder)
    with replacing(folder) as temporary:
        shards = _shards(tensors, dtype, shard_bytes)
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = SINGLE if len(shards) == 1 else many
            content = {name: np.ascontiguousarray(array, dtype) for name, array in shard}
            _save(content, temporary / file)
            weight_map.update(dict.fromkeys(content, file))
        texts = dict(texts)
        if len(shards) > 1:
            size = sum(array.size for _, array in tensors) * dtype.itemsize
            texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": weight_map}
        for name, value in texts.items():
            (temporary / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _save(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    library()
    from safetensors.numpy import save_file

    save_file(tensors, path, metadata={"format": "pt"})  # transformers insists on a format
    path.chmod(path.parent.stat().st_mode & 0o666)  # the library leaves it to its owner alone


def _shards(
    tensors: Sequence[tuple[str, np.ndarray]], dtype: np.dtype, most: int
) -> list[list[tuple[str, np.ndarray]]]:
    """The tensors in runs of at most `most` bytes; a larger tensor stands alone."""
    shards: list[list[tuple[str, np.ndarray]]] = [[]]
    room: float = most
    for name, array in tensors:
        size = array.size * dtype.itemsize
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append((name, array))
        room = room - size if size <= most else -math.inf
    return shards


def check_free(folder: pathlib.Path) -> None:
    """Refuses a folder that holds something, or that cannot be made, with one line."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not os.access(above, os.W_OK):
        raise UserError(f"{folder}: {above} cannot be written to: choose another folder")


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder to fill, which becomes `folder` when the block ends well, else goes."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            storage.sync(path)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    storage.sync(folder.parent)
