"""Tokenizes text into memory-mapped shards, which training then opens at once, however large:

python -m tools.prepare_data data.path=FILE_OR_FOLDER out=DIR
python -m tools.prepare_data data.path=corpus.jsonl text_field=content tokenizer=bpe vocab_size=8192 out=DIR
python train.py data.path=DIR
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moonep.command import command, progress, table
from moonep.errors import ConfigError, DataError

if TYPE_CHECKING:
    from moonep.trainer.tokens import Tokenizer


@dataclass
class PrepareSource:
    """What to read: a file or folder (None: the standard library); `pattern`: file names of a folder."""

    path: str | None = None
    pattern: str = "*"
    validation_fraction: float = 0.05


@dataclass
class PrepareConfig:
    """Keys of the command.

    Attributes:
        data: what to read; .jsonl, .jsonl.gz, .ndjson and .parquet hold a document a row, other files are
        documents.
        out: folder to write; must be empty or new.
        tokenizer: bytes | characters | bpe (byte-level, trained here).
        vocab_size: of BPE.
        train_bytes: BPE is trained on about so many bytes of documents, taken evenly.
        text_field: field or column of the text.
        shard_tokens: tokens of one file.
    """

    data: PrepareSource = field(default_factory=PrepareSource)
    out: str | None = None
    tokenizer: str = "bytes"
    vocab_size: int = 8192
    train_bytes: int = 100_000_000
    text_field: str = "text"
    shard_tokens: int = 1 << 28


def run(config: PrepareConfig) -> dict:
    """Writes the folder, prints a table, returns the manifest."""
    folder = _check(config)
    files, label = _files(config)
    tokenizer = _make_tokenizer(config, files)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        manifest = _write(config, files, label, tokenizer, partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    rows = [
        (name, split["documents"]["count"], split["tokens"], split["text_bytes"], len(split["shards"]))
        for name, split in manifest["splits"].items()
    ]
    columns = ("split", "documents", "tokens", "text bytes", "shards")
    print(table(f"{label}: vocabulary {manifest['vocab_size']}, {manifest['dtype']}", columns, rows))
    print(f"wrote {folder}; train on it with data.path={folder}")
    return manifest


def _check(config: PrepareConfig) -> Path:
    if config.out is None:
        raise ConfigError("out= is not set; name a folder for the shards")
    folder = Path(config.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={config.out} is not an empty folder; name a new one")
    if config.tokenizer not in ("bytes", "characters", "bpe"):
        raise ConfigError(f"tokenizer={config.tokenizer} is unknown; allowed: bytes, characters, bpe")
    if not 0 < config.data.validation_fraction < 1:
        fraction = config.data.validation_fraction
        raise ConfigError(f"data.validation_fraction={fraction} must lie between 0 and 1")
    for key in ("shard_tokens", "train_bytes"):
        if getattr(config, key) < 1:
            raise ConfigError(f"{key}={getattr(config, key)} must be at least 1")
    return folder


def _files(config: PrepareConfig) -> tuple[list[Path], str]:
    from moonep.trainer.documents import holds_rows
    from moonep.trainer.sources import find_files

    source = find_files(config.data.path, config.data.pattern, keep=holds_rows)
    return list(source.files), source.label


def _documents(config: PrepareConfig, files: list[Path]) -> Iterator[str]:
    from moonep.trainer.documents import read_documents

    for path in progress(files, len(files), "reading"):
        yield from read_documents(path, config.text_field)


def _make_tokenizer(config: PrepareConfig, files: list[Path]) -> Tokenizer:
    from moonep.trainer.tokens import BPETokenizer, ByteTokenizer, CharTokenizer

    if config.tokenizer == "bytes":
        return ByteTokenizer()
    if config.tokenizer == "characters":
        characters: set[str] = set()
        for text in _documents(config, files):
            characters.update(text)
        return CharTokenizer("".join(sorted(characters)), separator=True)
    size = sum(path.stat().st_size for path in files)
    return BPETokenizer.train(_sample(config, files, size), config.vocab_size)


def _sample(config: PrepareConfig, files: list[Path], size: int) -> Iterator[str]:
    """Documents at even distances, `train_bytes` in all, of about `size` bytes."""
    share = min(1.0, config.train_bytes / max(size, 1))
    due = 0.0
    for text in _documents(config, files):
        due += share
        if due >= 1.0:
            due -= 1.0
            yield text


def _write(config: PrepareConfig, files: list[Path], label: str, tokenizer: Tokenizer, folder: Path) -> dict:
    """Documents go to the split that their content's hash names; a single one is cut by position."""
    from moonep.trainer.data import split_by_position
    from moonep.trainer.prepared import SplitWriter, write_manifest
    from moonep.trainer.sources import file_fraction

    writers = {name: SplitWriter(folder, name, tokenizer, config.shard_tokens) for name in ("train", "val")}
    documents = _documents(config, files)
    first, second = next(documents, None), next(documents, None)
    if first is None:
        raise DataError(f"data.path={config.data.path} holds no text; give a file or folder with text in it")
    if second is None:
        parts = split_by_position(first.encode(), config.data.validation_fraction)
        for name, contents in parts.items():
            for content in contents:
                writers[name].add(tokenizer.encode(content.decode()))
    else:
        for text in _chain(first, second, documents):
            validates = file_fraction(text.encode()) < config.data.validation_fraction
            writers["val" if validates else "train"].add(tokenizer.encode(text))
    splits = {name: writer.close() for name, writer in writers.items()}
    for name, split in splits.items():
        if split["tokens"] < 2:
            fraction = config.data.validation_fraction
            raise DataError(
                f"the {name} split came out empty; give more documents or another"
                f" data.validation_fraction than {fraction}"
            )
    return write_manifest(folder, tokenizer, label, splits)


def _chain(first: str, second: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield second
    yield from rest


if __name__ == "__main__":
    command(run, "prepare_data", PrepareConfig)
