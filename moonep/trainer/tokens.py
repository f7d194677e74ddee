"""Tokenizers: bytes (default), characters of one text, and byte-level BPE trained by `tools.prepare_data`.

Every tokenizer states how many text bytes a token stands for: losses convert to bits per byte exactly.
`to_dict` / `tokenizer_from_dict` carry a tokenizer inside a checkpoint or a manifest, without its corpus.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonep.errors import CapabilityError, DataError


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        vocab_size: number of ids.
        separator_id: id that begins every document, or None where documents have no such mark.
    """

    vocab_size: int
    separator_id: int | None

    def encode(self, text: str) -> NDArray[np.int64]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def token_bytes(self) -> NDArray[np.int64]:
        """`[vocab_size]` text bytes that each id stands for; 0 for the separator."""
        ...

    def to_dict(self) -> dict: ...


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and 256 before every document."""

    vocab_size = 257
    separator_id: int | None = 256

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> NDArray[np.int64]:
        lengths = np.ones(self.vocab_size, dtype=np.int64)
        lengths[256] = 0
        return lengths

    def to_dict(self) -> dict:
        return {"kind": "bytes"}


class CharTokenizer:
    """The distinct characters of one text, in code-point order (nanoGPT's `shakespeare_char` setting).

    Args:
        characters: the vocabulary, one character an id.
        separator: adds a last id that begins every document; a single text needs none.
    """

    def __init__(self, characters: str, separator: bool = False):
        self.characters = characters
        self.separator_id = len(characters) if separator else None
        self.vocab_size = len(characters) + int(separator)
        self._ids = {character: i for i, character in enumerate(characters)}

    @classmethod
    def from_text(cls, text: str, separator: bool = False) -> CharTokenizer:
        return cls("".join(sorted(set(text))), separator)

    def encode(self, text: str) -> NDArray[np.int64]:
        try:
            return np.fromiter((self._ids[c] for c in text), dtype=np.int64, count=len(text))
        except KeyError as unknown:
            raise DataError(
                f"character {unknown.args[0]!r} is not one of the {len(self.characters)} in the vocabulary;"
                " leave it out"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[int(i)] for i in ids if int(i) < len(self.characters))

    def token_bytes(self) -> NDArray[np.int64]:
        lengths = [len(character.encode("utf-8")) for character in self.characters]
        return np.array(lengths + [0] * (self.vocab_size - len(lengths)), dtype=np.int64)

    def to_dict(self) -> dict:
        marked = self.separator_id is not None
        return {"kind": "characters", "characters": self.characters, "separator": marked}


class BPETokenizer:
    """Byte-level BPE of the `tokenizers` package; its special token `<|doc|>` begins every document."""

    separator = "<|doc|>"

    def __init__(self, serialized: str):
        self._serialized = serialized
        self._tokenizer = _import_tokenizers().Tokenizer.from_str(serialized)
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.separator_id = self._tokenizer.token_to_id(self.separator)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Raises DataError unless 257 <= vocab_size."""
        if vocab_size < 257:
            raise DataError(f"vocab_size={vocab_size} is too small for byte-level BPE; give at least 257")
        library = _import_tokenizers()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[cls.separator],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self._tokenizer.encode(text).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self) -> NDArray[np.int64]:
        # Byte-level BPE writes each byte of a token as exactly one printable character.
        lengths = [len(self._tokenizer.id_to_token(i)) for i in range(self.vocab_size)]
        lengths[self.separator_id] = 0
        return np.array(lengths, dtype=np.int64)

    def to_dict(self) -> dict:
        return {"kind": "bpe", "tokenizer": json.loads(self._serialized)}


class SymbolTokenizer:
    """Ids of a synthetic source; text is the ids, separated by blanks. One symbol counts as one byte."""

    separator_id: int | None = None

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str) -> NDArray[np.int64]:
        words = text.split()
        if not all(word.isdigit() and int(word) < self.vocab_size for word in words):
            raise DataError(f"a synthetic source speaks numbers below {self.vocab_size}, separated by blanks")
        return np.array([int(word) for word in words], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def token_bytes(self) -> NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def to_dict(self) -> dict:
        return {"kind": "symbols", "vocab_size": self.vocab_size}


def tokenizer_from_dict(described: Mapping) -> Tokenizer:
    """The tokenizer that `to_dict` described. Raises DataError on an unknown kind."""
    match described.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "characters":
            return CharTokenizer(described["characters"], described["separator"])
        case "bpe":
            return BPETokenizer(json.dumps(described["tokenizer"]))
        case "symbols":
            return SymbolTokenizer(described["vocab_size"])
        case kind:
            raise DataError(f"unknown tokenizer kind {kind!r}; known: bytes, characters, bpe, symbols")


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids to generate from, never none: an empty text begins a document, or a line, or with id 0.

    Raises DataError when the text cannot be encoded.
    """
    ids = tokenizer.encode(text).tolist()
    if ids:
        return ids
    if tokenizer.separator_id is not None:
        return [tokenizer.separator_id]
    try:
        return tokenizer.encode("\n").tolist() or [0]
    except DataError:
        return [0]


def _import_tokenizers():
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise CapabilityError(
            "BPE needs the package 'tokenizers' (pip install tokenizers); tokenizer=bytes needs nothing"
        ) from None
    return tokenizers
