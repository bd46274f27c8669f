"""Text columns of parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from xmod_jax.errors import UserError

if TYPE_CHECKING:
    import pyarrow

_ROWS = 256  # held at once


def texts(path: str, field: str) -> Iterator[tuple[float, list[bytes | None]]]:
    """Values of a column, some rows at a time, as bytes that need not be UTF-8, None for null.

    Yields:
      The share of the rows that has been read with these, and the values.

    Raises:
      UserError: the file is damaged or no parquet; the column is missing, there twice, or no text.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        # Opened here, since pyarrow takes no name that is not UTF-8.
        with open(path, "rb") as opened, parquet.ParquetFile(opened, pre_buffer=False) as file:
            _check(path, field, file.schema_arrow)
            rows, done = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(_ROWS, columns=[field], use_threads=False):
                # By name: with a column `a.b` comes what a field `b` of a column `a` holds.
                column: Any = batch.column(field)
                if isinstance(column, pyarrow.ExtensionArray):
                    column = column.storage
                # As bytes, since the library does not look whether a string is UTF-8.
                values = column.cast(pyarrow.large_binary()).to_pylist()
                done += len(values)
                yield done / rows, values
    except (pyarrow.ArrowException, OSError) as error:
        # A full disk or a broken pipe is not the file's fault, but cannot come from reading it.
        raise UserError(f"{path}: cannot be read as parquet: {error}") from error


def _check(path: str, field: str, schema: pyarrow.Schema) -> None:
    """Refuses a column that is missing, there twice, or no text."""
    names = schema.names
    if field not in names:
        raise UserError(
            f"{path}: no column {field!r}; it has {', '.join(names) or 'none'}; choose one with "
            "--field"
        )
    if names.count(field) > 1:
        raise UserError(
            f"{path}: {names.count(field)} columns are called {field!r}: write it with one, or "
            "choose another with --field"
        )
    kind = schema.types[names.index(field)]
    if not _is_text(kind):
        raise UserError(
            f"{path}: column {field!r} is {kind}, not text; choose another with --field"
        )


def _is_text(kind: pyarrow.DataType) -> bool:
    """Whether a column of this type holds text, or bytes that may be it."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    if isinstance(kind, pyarrow.BaseExtensionType):  # JSON is text, a UUID is not
        return not types.is_fixed_size_binary(kind.storage_type) and _is_text(kind.storage_type)
    strings = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    binaries = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in (*strings, *binaries, types.is_fixed_size_binary))
