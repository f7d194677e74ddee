"""The corpus of a run: text or a synthetic source, tokenized and split, ready for `BatchStream`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moonep.errors import ConfigError, DataError
from moonep.trainer.batches import Batch, BatchStream
from moonep.trainer.prepared import is_prepared, open_prepared
from moonep.trainer.sources import TextSource, file_fraction, open_source
from moonep.trainer.splits import TokenSplit, token_dtype
from moonep.trainer.synthetic import MarkovChain
from moonep.trainer.tokens import ByteTokenizer, CharTokenizer, SymbolTokenizer, Tokenizer

__all__ = ["Batch", "BatchStream", "Corpus", "DataConfig", "TokenSplit", "build_corpus"]

NAMES = ("stdlib", "text", "tokens", "markov")


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from.

    Attributes:
        name: stdlib (source of the running interpreter), text, tokens (from `tools.prepare_data`) or markov.
        path: a text file, a folder of them, or a prepared folder; a path given alone is enough.
        tokenizer: auto (bytes; a prepared folder knows its own), bytes or characters.
        pattern: which file names of a folder to read, shell style.
        validation_fraction: of a folder's files (by content hash), or of one file's characters (its end).
        sampling: shuffled (every window once an epoch) or random (windows at random places).
        markov_*: symbols, order, length of the training split, concentration and seed of the synthetic chain.
    """

    name: str = "stdlib"
    path: str | None = None
    tokenizer: str = "auto"
    pattern: str = "*"
    validation_fraction: float = 0.05
    sampling: str = "shuffled"
    markov_states: int = 16
    markov_order: int = 1
    markov_tokens: int = 1_000_000
    markov_concentration: float = 0.2
    markov_seed: int = 0


class Corpus:
    """A tokenized corpus with a training and a validation split.

    Attributes:
        label: what it is, for people.
        tokenizer: text to ids and back.
        fingerprint: hex digest of the content.
        entropy: nats per token of a synthetic source, exact; else None.
    """

    def __init__(
        self,
        label: str,
        tokenizer: Tokenizer,
        splits: dict[str, TokenSplit],
        fingerprint: str,
        *,
        entropy: float | None = None,
    ):
        self.label, self.tokenizer, self.fingerprint, self.entropy = label, tokenizer, fingerprint, entropy
        self._splits = splits

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    def split(self, name: str) -> TokenSplit:
        """ "train" or "val"."""
        return self._splits[name]

    @property
    def token_bytes(self) -> NDArray[np.int64]:
        """`[V]` text bytes that each id stands for."""
        return self.tokenizer.token_bytes()

    @property
    def bytes_per_token(self) -> float:
        """Text bytes of a validation token, document separators counted as tokens."""
        return self.split("val").bytes_per_token

    def encode(self, text: str) -> NDArray[np.int64]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(ids)

    def describe(self) -> str:
        """One line: source, sizes, vocabulary, content hash, and the entropy of a synthetic source."""
        train, val = self.split("train"), self.split("val")
        text = (
            f"{self.label}: {len(train):,} training and {len(val):,} validation tokens in"
            f" {len(train.document_starts):,} + {len(val.document_starts):,} documents,"
            f" vocabulary {self.vocab_size}, sha256 {self.fingerprint[:12]}"
        )
        return text if self.entropy is None else f"{text}, entropy {self.entropy:.6f} nats a token"


def build_corpus(config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Reads, tokenizes and splits; the same on every rank, with no communication.

    Args:
        config: where tokens come from.
        tokenizer: encode with this one (a checkpoint's) instead of `config.tokenizer`.

    Raises:
        DataError: missing, empty or malformed data; the message names the key to change.
        ConfigError: an unknown name, tokenizer or fraction.
    """
    _check(config)
    corpus = _open_corpus(config, tokenizer)
    for name in ("train", "val"):
        if len(corpus.split(name)) < 2:
            raise DataError(
                f"the {name} split of {corpus.label} is empty; give more text by data.path="
                f" or change data.validation_fraction={config.validation_fraction}"
            )
    return corpus


def _open_corpus(config: DataConfig, tokenizer: Tokenizer | None) -> Corpus:
    if config.name == "markov":
        return _markov_corpus(config)
    if config.path is not None and is_prepared(Path(config.path).expanduser()):
        return _prepared_corpus(config, Path(config.path).expanduser(), tokenizer)
    if config.name == "tokens":
        raise DataError(
            f"data.path={config.path} has no manifest.json; prepare a folder with tools.prepare_data"
        )
    return text_corpus(open_source(config.path, config.pattern), config, tokenizer)


def _check(config: DataConfig) -> None:
    if config.name not in NAMES:
        raise ConfigError(f"data.name={config.name}; allowed: {', '.join(NAMES)}")
    if config.tokenizer not in ("auto", "bytes", "characters"):
        raise ConfigError(f"data.tokenizer={config.tokenizer}; allowed: auto, bytes, characters")
    if not 0 < config.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={config.validation_fraction} must lie between 0 and 1")
    if config.name in ("text", "tokens") and config.path is None:
        raise DataError(f"data={config.name} needs data.path=: a text file, a folder, or a prepared folder")


def text_corpus(source: TextSource, config: DataConfig, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenizes documents in memory. Several files: split by content hash. One file: its end validates."""
    documents = list(source.documents())
    digest = hashlib.sha256()
    for name, content in documents:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    contents = [content for _, content in documents]
    if len(contents) == 1:
        parts = split_by_position(contents[0], config.validation_fraction)
    else:
        parts = split_by_file(contents, config.validation_fraction)
    if tokenizer is None:
        tokenizer = _make_tokenizer(config.tokenizer, contents)
    splits = {
        name: make_split(name, encode_all(parts[name], tokenizer), tokenizer) for name in ("train", "val")
    }
    return Corpus(f"{source.label} ({len(documents)} files)", tokenizer, splits, digest.hexdigest())


def split_by_position(content: bytes, validation_fraction: float) -> dict[str, list[bytes]]:
    """The first `int(n * (1 - fraction))` characters train, the rest validate (nanoGPT's rule)."""
    text = content.decode("utf-8", errors="surrogateescape")
    cut = int(len(text) * (1 - validation_fraction))
    parts = {"train": text[:cut], "val": text[cut:]}
    return {
        name: [part.encode("utf-8", errors="surrogateescape")] if part else [] for name, part in parts.items()
    }


def split_by_file(contents: list[bytes], validation_fraction: float) -> dict[str, list[bytes]]:
    """A file validates when its content's hash is below the fraction; each side keeps at least one."""
    fractions = [file_fraction(content) for content in contents]
    threshold = max(validation_fraction, np.nextafter(min(fractions), 1))
    if all(f < threshold for f in fractions):
        threshold = max(fractions)
    return {
        "train": [c for c, f in zip(contents, fractions, strict=True) if f >= threshold],
        "val": [c for c, f in zip(contents, fractions, strict=True) if f < threshold],
    }


def _make_tokenizer(kind: str, contents: list[bytes]) -> Tokenizer:
    if kind != "characters":
        return ByteTokenizer()
    # A single text needs no separator: its vocabulary is its characters alone, as in nanoGPT.
    return CharTokenizer.from_text(
        "".join(_utf8(content) for content in contents), separator=len(contents) > 1
    )


def encode_all(contents: list[bytes], tokenizer: Tokenizer) -> list[NDArray]:
    """Ids of each document. Raises DataError where a text tokenizer meets bytes that are not UTF-8."""
    if isinstance(tokenizer, ByteTokenizer):
        return [np.frombuffer(content, dtype=np.uint8) for content in contents]
    return [tokenizer.encode(_utf8(content)) for content in contents]


def _utf8(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8 ({error}); data.tokenizer=bytes takes any file") from None


def make_split(name: str, documents: list[NDArray], tokenizer: Tokenizer) -> TokenSplit:
    """Concatenates documents, each after the tokenizer's separator."""
    dtype = token_dtype(tokenizer.vocab_size)
    mark = [] if tokenizer.separator_id is None else [np.array([tokenizer.separator_id], dtype=dtype)]
    pieces = [piece for document in documents for piece in [*mark, document.astype(dtype)]]
    lengths = [len(mark) + len(document) for document in documents]
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
    starts = np.cumsum([0, *lengths[:-1]], dtype=np.int64) if lengths else np.empty(0, dtype=np.int64)
    token_bytes = tokenizer.token_bytes()
    text_bytes = int(np.bincount(tokens, minlength=len(token_bytes)) @ token_bytes)
    return TokenSplit(name, tokens, starts, token_bytes, text_bytes)


def _prepared_corpus(config: DataConfig, folder: Path, wanted: Tokenizer | None) -> Corpus:
    tokenizer, splits, label, fingerprint = open_prepared(folder)
    kind = tokenizer.to_dict()["kind"]
    if config.tokenizer not in ("auto", kind):
        raise DataError(f"data.path={folder} was prepared with tokenizer {kind}; leave data.tokenizer= out")
    if wanted is not None and wanted.to_dict() != tokenizer.to_dict():
        raise DataError(f"data.path={folder} was prepared with another tokenizer than the checkpoint's")
    return Corpus(label, tokenizer, splits, fingerprint)


def _markov_corpus(config: DataConfig) -> Corpus:
    seed = config.markov_seed
    chain = MarkovChain(config.markov_states, config.markov_order, config.markov_concentration, seed)
    if config.markov_tokens < 2:
        raise ConfigError(f"data.markov_tokens={config.markov_tokens} must be at least 2")
    tokenizer = SymbolTokenizer(config.markov_states)
    validation = max(2, int(config.markov_tokens * config.validation_fraction))
    lengths = {"train": config.markov_tokens, "val": validation}
    splits = {
        name: make_split(name, [chain.sample(length, seed + 1 + i)], tokenizer)
        for i, (name, length) in enumerate(lengths.items())
    }
    digest = hashlib.sha256(b"".join(split.tokens[:].tobytes() for split in splits.values())).hexdigest()
    label = f"Markov chain of order {chain.order} over {chain.vocab_size} symbols"
    return Corpus(label, tokenizer, splits, digest, entropy=chain.entropy)
