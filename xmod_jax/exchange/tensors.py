"""Folders of tensors as Hugging Face lays them out: one safetensors file, or shards and an index.

Safetensors hold numbers and their names, nothing that could run; pickled weights are not read.
"""

from __future__ import annotations

import contextlib
import errno
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
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_PICKLED = "pickled weights are not read, as they may run code"
_POINTER = b"version https://git-lfs"  # how what Git keeps in place of a large file begins
_UNREAD = {
    ".bin": _PICKLED,
    ".pt": _PICKLED,
    ".pth": _PICKLED,
    ".ckpt": _PICKLED,
    ".gguf": "GGUF is not read",
    ".h5": "TensorFlow's weights are not read",
    ".msgpack": "Flax's own weights are not read",
}


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
        """Opens the files of a folder and reads what they say they hold.

        Raises:
          UserError: no safetensors there, or a file that is missing, damaged or cut; names it.
          OSError: a file that may not be read.
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

    def where(self, name: str) -> str:
        """File and name of a tensor, for messages."""
        return f"{self._place[name]}: {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, as its file's header has it.

        Raises:
          UserError: a type that is not read.
        """
        part = self._file[name].get_slice(name)
        kind = part.get_dtype()
        if kind not in _READABLE:
            raise UserError(
                f"{self.where(name)} is of type {kind}: only {', '.join(_READABLE)} are read; save "
                "the model in one of them"
            )
        return tuple(part.get_shape())

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part at an index, as float32.

        Raises:
          UserError: it cannot be read, or holds numbers that are not finite in float32.
        """
        try:
            file = self._file[name]
            stored = file.get_slice(name)[index] if index else file.get_tensor(name)
        except self._error as error:
            raise UserError(f"{self.where(name)} cannot be read: {error}") from error
        with np.errstate(over="ignore"):
            tensor = stored.astype(np.float32)
        if not np.isfinite(tensor).all():
            raise UserError(
                f"{self.where(name)} holds numbers that are not finite: the file is damaged, or "
                "the training that made it went wrong"
            )
        return tensor

    def _paths(self) -> list[pathlib.Path]:
        index, single = self._folder / INDEX, self._folder / SINGLE
        if not index.exists():
            if not single.is_file():
                raise UserError(
                    f"{self._folder}: neither {SINGLE} nor {INDEX} in it{self._other()}"
                )
            return [single]
        if single.exists():
            raise UserError(
                f"{self._folder}: both {SINGLE} and {INDEX} in it: remove the one that is not meant"
            )
        weight_map = storage.read_json(index).get("weight_map")
        names = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if not names or not all(map(_is_file_name, names)):
            raise UserError(f"{index}: its weight_map does not name files of this folder")
        return [self._folder / name for name in sorted(set(names))]

    def _other(self) -> str:
        """What else a folder without our files holds, for the message."""
        found = sorted(path.name for path in self._folder.iterdir())
        if shards := [name for name in found if name.endswith(".safetensors")]:
            return f"; {shards[0]} alone does not say what belongs to it"
        for ending, what in _UNREAD.items():
            if which := [name for name in found if name.endswith(ending)]:
                return f"; {which[0]}: {what}: save the model as safetensors"
        return ""

    def _opened(self, path: pathlib.Path) -> Any:
        if not path.is_file():
            what = "not a file" if path.exists() else "no such file"
            raise UserError(f"{path}: {what}, {INDEX} names it")
        # The library says of one without permission that it is not there.
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                raise UserError(
                    f"{path}: a pointer of Git LFS, not the weights: fetch them with git lfs pull"
                )
        try:
            return library().safe_open(path, framework="np")
        except self._error as error:
            raise UserError(f"{path}: damaged or cut, no whole safetensors: {error}") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}") from error


def _is_file_name(name: Any) -> bool:
    """Whether a value names a file of safetensors without leaving its folder."""
    return (
        isinstance(name, str) and pathlib.Path(name).name == name and name.endswith(".safetensors")
    )


def write(
    folder: pathlib.Path,
    tensors: Sequence[tuple[str, np.ndarray]],
    files: Mapping[str, bytes],
    dtype: np.dtype,
    shard_bytes: int,
) -> None:
    """Writes a folder whole or not at all: under another name, renamed when it is on disk.

    Args:
      folder: must not be there, or be empty.
      tensors: names and arrays, in the order of the files; a view is copied only as it is written.
      files: what stands beside the tensors, by name.
      dtype: of the file.
      shard_bytes: most bytes of a file; above that there are shards and an index.

    Raises:
      UserError: the folder is taken, the disk full, or a tensor not finite in `dtype`.
      OSError: the disk, otherwise.
    """
    check_free(folder)
    with replacing(folder) as temporary:
        shards = _shards(tensors, dtype, shard_bytes)
        weight_map = {}
        for number, shard in enumerate(shards, 1):
            many = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            file = SINGLE if len(shards) == 1 else many
            content = {name: np.ascontiguousarray(array, dtype) for name, array in shard}
            if wrong := [name for name, array in content.items() if not np.isfinite(array).all()]:
                raise UserError(f"{wrong[0]} holds numbers that are not finite: nothing is written")
            _save(content, temporary / file)
            weight_map.update(dict.fromkeys(content, file))
        files = dict(files)
        if len(shards) > 1:
            size = sum(array.size for _, array in tensors) * dtype.itemsize
            files[INDEX] = encode({"metadata": {"total_size": size}, "weight_map": weight_map})
        for name, data in files.items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(data)


def encode(value: Mapping[str, Any]) -> bytes:
    """A JSON file as Hugging Face lays it out."""
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


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
    for path in (folder, *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to nowhere: choose another folder")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose a folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir():
        raise UserError(f"{folder}: {above} is a file: choose another folder")
    if not os.access(above, os.W_OK):
        raise UserError(f"{folder}: {above} cannot be written to: choose another folder")


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder to fill, which becomes `folder` when the block ends well, else goes.

    Folders above it that were made for it go as well.

    Raises:
      UserError: the disk is full, or somebody else took the folder meanwhile.
    """
    folder = folder.resolve()  # a link to a folder stays one
    made = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A name may have 255 bytes, and the folder's may have them all.
    temporary = folder.with_name(f".{folder.name[:40]}.{socket.gethostname()}.{os.getpid()}")
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            storage.sync(path)
        _rename(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        # Libraries name the temporary folder, or none.
        if why := _disk_full(error):
            raise UserError(
                f"{folder}: {why}: nothing was written; free some space or choose another folder"
            ) from error
        raise
    storage.sync(folder.parent)


def _disk_full(error: BaseException) -> str | None:
    """Why a disk takes no more; None for any other error. Libraries leave only its text."""
    said = f"{error} {error.__cause__}"
    return next((text for code in _FULL if (text := os.strerror(code)) in said), None)


def _rename(temporary: pathlib.Path, folder: pathlib.Path) -> None:
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise UserError(f"{folder} was taken meanwhile: choose another folder") from error
        raise
