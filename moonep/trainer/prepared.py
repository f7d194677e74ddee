"""Tokens on disk: a folder of memory-mapped shards with a manifest, as `tools.prepare_data` writes it.

DIR/manifest.json          tokenizer, and for each split: shards (file, tokens, sha256), documents, text bytes
DIR/SPLIT_00000.bin ...    little-endian uint16 or uint32 tokens
DIR/SPLIT_documents.bin    little-endian int64, index of each document's first token in the split
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from moonep.errors import DataError
from moonep.trainer.splits import ShardedTokens, TokenSplit, token_dtype
from moonep.trainer.tokens import Tokenizer, tokenizer_from_dict

MANIFEST = "manifest.json"
FORMAT = "moonep-tokens-1"


def is_prepared(path: Path) -> bool:
    return (path / MANIFEST).is_file()


class SplitWriter:
    """Appends documents to one split of a folder; a shard is closed once it holds `shard_tokens`."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int):
        self.name = name
        self._folder, self._shard_tokens = folder, shard_tokens
        self._tokenizer = tokenizer
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size)).newbyteorder("<")
        self._token_bytes = tokenizer.token_bytes()
        self._stream: IO[bytes] | None = None
        self._shards: list[dict] = []
        self._starts: list[int] = []
        self._filled = self.tokens = self.text_bytes = 0

    def add(self, ids: NDArray[np.int64]) -> None:
        """One document; the tokenizer's separator is put before it."""
        separator = self._tokenizer.separator_id
        if separator is not None:
            ids = np.concatenate([[separator], ids])
        self._starts.append(self.tokens)
        self.tokens += len(ids)
        self.text_bytes += int(self._token_bytes[ids].sum())
        while len(ids):
            room = self._shard_tokens - self._filled
            self._write(ids[:room])
            ids = ids[room:]

    def _write(self, ids: NDArray[np.int64]) -> None:
        if self._stream is None:
            file = f"{self.name}_{len(self._shards):05d}.bin"
            self._stream = (self._folder / file).open("wb")
            self._shards.append({"file": file, "tokens": 0})
            self._hash = hashlib.sha256()
        raw = ids.astype(self._dtype).tobytes()
        self._stream.write(raw)
        self._hash.update(raw)
        self._shards[-1]["tokens"] += len(ids)
        self._filled += len(ids)
        if self._filled >= self._shard_tokens:
            self._close_shard()

    def _close_shard(self) -> None:
        assert self._stream is not None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None
        self._shards[-1]["sha256"] = self._hash.hexdigest()
        self._filled = 0

    def close(self) -> dict:
        """The split's entry of the manifest."""
        if self._stream is not None:
            self._close_shard()
        documents = f"{self.name}_documents.bin"
        raw = np.array(self._starts, dtype="<i8").tobytes()
        (self._folder / documents).write_bytes(raw)
        return {
            "shards": self._shards,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "documents": {"file": documents, "count": len(self._starts)},
        }


def write_manifest(folder: Path, tokenizer: Tokenizer, label: str, splits: Mapping[str, dict]) -> dict:
    """Writes `manifest.json` last, so that a folder with a manifest is complete."""
    manifest = {
        "format": FORMAT,
        "label": label,
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).name,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.to_dict(),
        "splits": dict(splits),
    }
    partial = folder / (MANIFEST + ".partial")
    partial.write_text(json.dumps(manifest, indent=1))
    partial.replace(folder / MANIFEST)
    return manifest


def open_prepared(folder: Path) -> tuple[Tokenizer, dict[str, TokenSplit], str, str]:
    """Maps a prepared folder.

    Returns:
        (tokenizer, splits, label, fingerprint); the fingerprint covers every shard's checksum.

    Raises:
        DataError: unreadable manifest, a missing file, or a file whose size differs from the manifest.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise DataError(f"{folder / MANIFEST} has format {manifest['format']!r}; this reads {FORMAT!r}")
        tokenizer = tokenizer_from_dict(manifest["tokenizer"])
        splits = {
            name: _open_split(folder, name, manifest["splits"][name], np.dtype(manifest["dtype"]), tokenizer)
            for name in ("train", "val")
        }
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{folder / MANIFEST} is no token manifest ({error!r}); prepare it again") from None
    checksums = [s["sha256"] for entry in manifest["splits"].values() for s in entry["shards"]]
    fingerprint = hashlib.sha256("".join(checksums).encode()).hexdigest()
    return tokenizer, splits, manifest["label"], fingerprint


def _open_split(folder: Path, name: str, entry: dict, dtype: np.dtype, tokenizer: Tokenizer) -> TokenSplit:
    dtype = dtype.newbyteorder("<")
    shards = [_map(folder / s["file"], dtype, s["tokens"]) for s in entry["shards"]]
    starts = _map(folder / entry["documents"]["file"], np.dtype("<i8"), entry["documents"]["count"])
    tokens = ShardedTokens(shards or [np.empty(0, dtype=dtype)])
    return TokenSplit(name, tokens, np.asarray(starts), tokenizer.token_bytes(), entry["text_bytes"])


def _map(path: Path, dtype: np.dtype, count: int) -> NDArray:
    expected = count * dtype.itemsize
    actual = path.stat().st_size if path.exists() else None
    if actual != expected:
        found = "is missing" if actual is None else f"has {actual} bytes"
        raise DataError(f"{path} {found}, the manifest says {expected} bytes; run tools.prepare_data again")
    return np.memmap(path, dtype=dtype, mode="r") if count else np.empty(0, dtype=dtype)
