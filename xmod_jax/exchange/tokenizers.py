"""Tokenizer files beside Hugging Face weights: those of our tokenizers, and those that came along.

What came with an imported checkpoint is kept in its run directory as it was, byte for byte, and
goes out again with the weights.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

from xmod_jax import storage
from xmod_jax.data.tokenizer import END_OF_TEXT, ByteTokenizer, Gpt2Tokenizer, Tokenizer
from xmod_jax.errors import UserError
from xmod_jax.exchange.settings import CONFIG, GENERATION
from xmod_jax.exchange.tensors import encode

# What transformers reads a tokenizer from, and what chat programs read beside it.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)


def tokenizer_files(folder: pathlib.Path) -> dict[str, bytes]:
    """The tokenizer's files in a folder, by name.

    Raises:
      OSError: one that cannot be read.
    """
    found = (path for pattern in _TOKENIZER for path in folder.glob(pattern) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def travelling(folder: pathlib.Path) -> dict[str, bytes]:
    """What of a folder goes with its weights: the tokenizer's files and both configurations.

    Raises:
      UserError: a generation_config.json that is not JSON.
      OSError: a file that cannot be read.
    """
    files = tokenizer_files(folder)
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            storage.read_json(folder / name)
            files[name] = (folder / name).read_bytes()
    return files


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids that config.json names: the end-of-text token stands before every text as well."""
    return {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text}


def own_files(tokenizer: Tokenizer, context_length: int) -> dict[str, bytes]:
    """Files from which transformers makes a tokenizer of the same ids.

    In them the text of the end-of-text token is that token, in our tokenizers it is text.

    Args:
      tokenizer: of bytes, or GPT-2's.
      context_length: most tokens of a text.

    Raises:
      UserError: a tokenizer that files cannot hold.
    """
    said = {
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
    }
    if isinstance(tokenizer, ByteTokenizer):
        return {
            "tokenizer.json": encode(_bytes(tokenizer)),
            "tokenizer_config.json": encode(said | {"tokenizer_class": "PreTrainedTokenizerFast"}),
        }
    if not isinstance(tokenizer, Gpt2Tokenizer):
        raise UserError(f"the tokenizer {tokenizer.name} cannot be written as Hugging Face's")
    tokens = tokenizer.tokens()
    vocabulary = {_shown(token): number for number, token in enumerate(tokens)}
    merges = [" ".join(map(_shown, pair)) for pair in _merges(tokens)]
    return {
        "vocab.json": encode(vocabulary | {END_OF_TEXT: tokenizer.end_of_text}),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer_config.json": encode(said | {"tokenizer_class": "GPT2Tokenizer"}),
    }


def _bytes(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """tokenizer.json of a vocabulary of bytes: pieces without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": tokenizer.end_of_text, "content": END_OF_TEXT, "special": True} | special
        ],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {_shown(bytes([byte])): byte for byte in range(256)},
            "merges": [],
        },
    }


def _alphabet() -> tuple[str, ...]:
    """The character that stands for each byte in GPT-2's files: itself where it can be printed."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)}
    printed |= set(range(ord("®"), ord("ÿ") + 1))
    rest = iter(range(256, 512))
    return tuple(chr(byte if byte in printed else next(rest)) for byte in range(256))


_ALPHABET = _alphabet()


def _shown(token: bytes) -> str:
    return "".join(_ALPHABET[byte] for byte in token)


def _merges(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of several bytes was merged from, in the order of the merges.

    That pair is what merging by the tokens before it leaves of the token's bytes.
    """
    rank = {token: number for number, token in enumerate(tokens)}
    pairs = []
    for number, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [rank.get(a + b, number) for a, b in itertools.pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            pairs.append((parts[0], parts[1]))
    return pairs
