"""A split of a corpus: a long row of tokens, in memory or mapped from files, and its document starts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class ShardedTokens:
    """Several arrays read as one, without copying them. Supports `len` and contiguous slices."""

    def __init__(self, shards: Sequence[NDArray]):
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in self._shards])
        self.dtype = self._shards[0].dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: slice) -> NDArray:
        start, stop, step = index.indices(len(self))
        assert step == 1, "token splits are read in contiguous pieces"
        pieces = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            first = int(self._ends[shard]) - len(self._shards[shard])
            pieces.append(self._shards[shard][start - first : stop - first])
            start = int(self._ends[shard])
            shard += 1
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=self.dtype)


@dataclass(frozen=True)
class TokenSplit:
    """One split of a corpus.

    Attributes:
        name: "train" or "val".
        tokens: `[N]` uint16 or uint32: an array, a memory map or `ShardedTokens`.
        document_starts: `[documents]` int64, ascending, first 0: index of each document's first token.
        token_bytes: `[V]` text bytes that each token id stands for.
        text_bytes: text bytes of the whole split.
    """

    name: str
    tokens: NDArray | ShardedTokens
    document_starts: NDArray[np.int64]
    token_bytes: NDArray[np.int64]
    text_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)

    def window(self, start: int, length: int) -> NDArray[np.int64]:
        """Tokens `start .. start + length`, `[length]` int64."""
        return np.asarray(self.tokens[start : start + length]).astype(np.int64)

    def starts_within(self, start: int, stop: int) -> NDArray[np.int64]:
        """Document starts `d` with `start <= d < stop`, absolute indices."""
        low, high = np.searchsorted(self.document_starts, [start, stop])
        return self.document_starts[low:high]

    @property
    def mark(self) -> str:
        """Length and a checksum of 64 pieces spread over the tokens: tells splits apart without reading
        all of one."""
        piece, checksum = 1024, 0
        for i in range(64):
            checksum = zlib.crc32(self.window(max(0, len(self) - piece) * i // 63, piece).tobytes(), checksum)
        return f"{len(self)} tokens, {checksum:08x}"

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / max(1, len(self))


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The narrower of uint16 and uint32 that holds every id."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32
