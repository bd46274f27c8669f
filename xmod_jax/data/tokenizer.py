"""Tokenizers: text to token ids and back.

The byte tokenizer needs no vocabulary files and serves the embedded data; others join it by
meeting the `Tokenizer` protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from xmod_jax.config import BYTE_VOCABULARY

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
