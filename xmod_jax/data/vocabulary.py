"""The tokenizer that travels with what it made: its name, and its vocabulary files.

A prepared folder and a run directory each keep a folder ``tokenizer``, so that neither generation
nor evaluation needs the training data, or a package that carries the vocabulary.
"""

from __future__ import annotations

import pathlib

from xmod_jax import storage
from xmod_jax.data.tokenizer import GPT2, TOKENIZERS, Tokenizer, get_tokenizer, packaged_vocabulary
from xmod_jax.errors import UserError

FOLDER = "tokenizer"
_NAME = "tokenizer.json"
# What `get_tokenizer` reads in a folder.
FILES = {GPT2: ("vocab.bpe", "encoder.json")}


def keep(directory: pathlib.Path, name: str, vocabulary: pathlib.Path | None = None) -> None:
    """Puts a tokenizer into a directory, whole or not at all; nothing where it is there already.

    Args:
      directory: a prepared folder or a run directory.
      name: of the tokenizer.
      vocabulary: folder of its files; None: those that an installed package carries. Without any
        the name alone is kept.
    """
    folder = directory / FOLDER
    if (folder / _NAME).exists():
        return
    source = vocabulary or packaged_vocabulary()
    files = [source / file for file in FILES.get(name, ())] if source else []
    if all(file.is_file() for file in files):
        for file in files:
            storage.write_atomically(folder / file.name, file.read_bytes())
    storage.write_json(folder / _NAME, {"name": name})


def kept_name(directory: pathlib.Path) -> str | None:
    """The name of the tokenizer in a directory; None where none was kept.

    Raises:
      UserError: what is there cannot be read.
    """
    path = directory / FOLDER / _NAME
    if not path.exists():
        return None
    name = storage.read_json(path).get("name")
    if name not in TOKENIZERS:
        known = ", ".join(TOKENIZERS)
        raise UserError(f"{path}: no tokenizer {name!r} here; known: {known}")
    return str(name)


def folder_of(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    """The folder of a directory that holds all vocabulary files of tokenizer `name`, or None."""
    files = FILES.get(name, ())
    folder = directory / FOLDER
    return folder if files and all((folder / file).is_file() for file in files) else None


def kept(directory: pathlib.Path, name: str, vocabulary: str | None = None) -> Tokenizer:
    """The tokenizer `name` with the files of `vocabulary`, else of the directory, else a package's.

    Raises:
      UserError: its files cannot be had, or are not its own.
    """
    own = folder_of(directory, name)
    return get_tokenizer(name, vocabulary or (str(own) if own else None))
