"""Held-out documents: kept by unit of work, merged at the end in the order of their digests."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import numpy as np
from array_record.python import array_record_module

from xmod_jax import storage
from xmod_jax.data import workers
from xmod_jax.data.shards import Shard, ShardWriter, writing
from xmod_jax.errors import UserError

_MERGED = 4096  # documents that are gathered at once


def write(path: pathlib.Path, heldout: Sequence[tuple[bytes, np.ndarray]]) -> list[str]:
    """Writes the documents of a unit, a record each; returns their digests.

    Raises:
      OSError: the disk; nothing has the file's name then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(exist_ok=True)
    try:
        with writing(path):
            writer = array_record_module.ArrayRecordWriter(str(temporary), "group_size:1")
            for _, ids in heldout:
                writer.write(ids.astype("<u4").tobytes())
            writer.close()
        storage.sync(temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    workers.leave_if_orphaned()
    temporary.rename(path)
    storage.sync(path.parent)
    return [key.hex() for key, _ in heldout]


def merge(
    paths: Sequence[pathlib.Path],
    digests: Sequence[Sequence[str]],
    output: pathlib.Path,
    vocab_size: int,
) -> Shard:
    """One shard of the documents of all units in the order of their digests.

    Any prefix of it is then a fair sample of all sources.

    Raises:
      UserError: a unit's file is damaged; names it.
      OSError: the disk.
    """
    order = sorted(
        (key, unit, index) for unit, keys in enumerate(digests) for index, key in enumerate(keys)
    )
    writer = ShardWriter(output / "heldout-00000.arrayrecord", vocab_size)
    try:
        for start in range(0, len(order), _MERGED):
            part = order[start : start + _MERGED]
            found: dict[tuple[int, int], np.ndarray] = {}
            for unit in sorted({unit for _, unit, _ in part}):
                indices = sorted(index for _, u, index in part if u == unit)
                read = zip(indices, _read(paths[unit], indices), strict=True)
                found |= {(unit, index): ids for index, ids in read}
            ids = np.concatenate([found[unit, index] for _, unit, index in part])
            writer.add(ids, len(part))
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def _read(path: pathlib.Path, indices: list[int]) -> list[np.ndarray]:
    reader = array_record_module.ArrayRecordReader(str(path))
    try:
        contents = reader.read(indices)
    except (RuntimeError, IndexError) as error:
        raise UserError(
            f"{path}: damaged: {error}; delete {path.with_suffix('.json')} and start again"
        ) from error
    finally:
        reader.close()
    return [np.frombuffer(content, "<u4") for content in contents]
