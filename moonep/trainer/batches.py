"""Batches of a training split, in an order that knows nothing of ranks.

Sequences are numbered 0, 1, 2, ... over the whole run; step `n` of a run with G sequences a step trains on
numbers `n G .. n G + G - 1`, however many ranks and micro-batches they are dealt to. Where sequence `i` lies
in the corpus is a pure function of (seed, i): the position is all the state there is, and it loads at any
world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moonep.errors import ConfigError, DataError
from moonep.trainer.splits import TokenSplit

IGNORE = -100
_MASK = (1 << 64) - 1


def hash64(*values: int) -> int:
    """A fixed 64-bit hash (SplitMix64's finaliser, chained), the same on every machine and numpy version."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(index: int, size: int, key: int) -> int:
    """Place of `index` in a pseudo-random permutation of `range(size)` (Feistel network, cycle walking)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_number in range(4):
            left, right = right, left ^ (hash64(key, round_number, right) & mask)
        index = (left << half) | right
        if index < size:
            return index


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        tokens: int64 `[B, T]`, or `[1, B*T]` when `cu_seqlens` is set.
        targets: int64, same shape: the next token, -100 where the next token belongs to another document.
        cu_seqlens: int32 `[n + 1]` offsets of sequences and documents in the packed row, or None when no
            document begins inside the micro-batch.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor | None


def make_batch(split: TokenSplit, starts: list[int], context: int) -> Batch:
    """Windows of `context` tokens at `starts`, with next-token targets; what lies past the split's end is
    masked.
    """
    tokens = np.zeros((len(starts), context), dtype=np.int64)
    targets = np.full_like(tokens, IGNORE)
    offsets: list[int] = []
    packed = False
    for row, start in enumerate(starts):
        window = split.window(start, context + 1)
        tokens[row, : len(window) - 1], targets[row, : len(window) - 1] = window[:-1], window[1:]
        inner = split.starts_within(start + 1, start + context + 1) - start
        targets[row, inner - 1] = IGNORE
        inner = inner[inner < context]
        packed |= len(inner) > 0
        offsets += [row * context, *(row * context + inner).tolist()]
    if not packed:
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), None)
    cu_seqlens = torch.tensor([*offsets, tokens.size], dtype=torch.int32)
    return Batch(torch.from_numpy(tokens).view(1, -1), torch.from_numpy(targets).view(1, -1), cu_seqlens)


class BatchStream:
    """Micro-batches of this rank, without end.

    `shuffled` (default): the split is cut into windows of `context` tokens at a phase drawn for each epoch;
    every window is seen once an epoch, in a shuffled order. `random`: each window starts at a uniformly drawn
    token, with replacement (nanoGPT's sampling).

    Args:
        split: the training split.
        context: T, tokens of a sequence.
        micro_batch: B, sequences of one micro-batch of one rank.
        rank, world_size: this rank among all that hold different data.
        accumulation: micro-batches a rank computes in a step, which has
            world_size x accumulation x micro_batch sequences.
        seed: of the order.
        sampling: "shuffled" or "random".

    Raises:
        DataError: the split is shorter than the batch of one step.
        ConfigError: unknown sampling.
    """

    def __init__(
        self,
        split: TokenSplit,
        *,
        context: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        sampling: str = "shuffled",
    ):
        if sampling not in ("shuffled", "random"):
            raise ConfigError(f"data.sampling={sampling}; allowed: shuffled, random")
        self.split, self.context, self.micro_batch = split, context, micro_batch
        self.rank, self.world_size, self.accumulation = rank, world_size, accumulation
        self.seed, self.sampling = seed, sampling
        self.sequences_per_step = world_size * accumulation * micro_batch
        # The phase of an epoch lies in [0, T), and the last target is one token past its window.
        self.windows_per_epoch = max(0, (len(split) - context) // context)
        if self.windows_per_epoch < self.sequences_per_step:
            raise DataError(
                f"the {split.name} split has {len(split)} tokens, one step of"
                f" {self.sequences_per_step} x {context} needs {(self.sequences_per_step + 1) * context};"
                " lower train.tokens_per_step or train.context, or give more text by data.path="
            )
        self._mark = split.mark
        self._step_start = 0
        self._micro = 0

    def next(self) -> Batch:
        """This rank's next micro-batch, CPU tensors."""
        first = self._step_start + (self._micro * self.world_size + self.rank) * self.micro_batch
        starts = [self.window_start(first + i) for i in range(self.micro_batch)]
        self._micro += 1
        if self._micro == self.accumulation:
            self._micro = 0
            self._step_start += self.sequences_per_step
        return make_batch(self.split, starts, self.context)

    def window_start(self, sequence: int) -> int:
        """Index of the first token of a sequence, by its global number."""
        if self.sampling == "random":
            return hash64(self.seed, sequence) % (len(self.split) - self.context)
        epoch, index = divmod(sequence, self.windows_per_epoch)
        key = hash64(self.seed, epoch)
        phase = hash64(key, self.context) % (len(self.split) - self.windows_per_epoch * self.context)
        return phase + self.context * permute(index, self.windows_per_epoch, key)

    @property
    def epoch(self) -> float:
        """Passes over the split so far."""
        return self._step_start * self.context / len(self.split)

    def state_dict(self) -> dict[str, Any]:
        """The position, as of the last completed step."""
        return {
            "next_sequence": self._step_start,
            "context": self.context,
            "seed": self.seed,
            "sampling": self.sampling,
            "split": self._mark,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`, which any world size and accumulation may have written.

        Raises:
            DataError: the state belongs to another order, in which the position would mean nothing.
        """
        own = self.state_dict()
        names = ("train.context", "seed", "data.sampling", "data.path")
        for key, name in zip(("context", "seed", "sampling", "split"), names, strict=True):
            if state.get(key) != own[key]:
                raise DataError(
                    f"cannot continue the data: the checkpoint was written with {key} {state.get(key)!r},"
                    f" this run has {own[key]!r}; set {name} as it was"
                )
        self._step_start = int(state["next_sequence"])
        self._micro = 0


def consecutive_starts(split: TokenSplit, context: int) -> NDArray[np.int64]:
    """Starts of the non-overlapping windows that cover a split; the last one may be shorter."""
    return np.arange(0, max(0, len(split) - 1), context, dtype=np.int64)
