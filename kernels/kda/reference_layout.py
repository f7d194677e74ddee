"""Where the tokens of each sequence go when sequences of any length are cut into chunks and run together.

Legend: N sequences, C tokens of a chunk, H query/key heads, HV value heads, "cell" one (chunk, value head).

Chunks are ordered by their step inside their sequence, and within a step by sequence, longest first. So the
chunks that run at one step of the scan are one contiguous slice of every array, and the sequences still
running are a prefix of the states. Nothing is padded beyond a sequence's last chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class ChunkLayout:
    """Index arrays between token order and chunk order.

    Attributes:
        chunk: C.
        value_heads: HV.
        rows_qk: [chunks * HV * C] row of q or k, seen as [B * T * H, K], of each place in chunk order.
        rows_v: the same for v, g, beta, seen as [B * T * HV, ...].
        back: [B * T * HV] place in chunk order of each (token, value head).
        padding: places that hold no token (they read row 0 and are then zeroed).
        outside: (token, value head) places of tokens that belong to no sequence.
        steps: per step, (first cell, last cell + 1) of its slice.
        order: sequence numbers, longest first.
        inverse_order: its inverse permutation.
    """

    chunk: int
    value_heads: int
    rows_qk: torch.Tensor
    rows_v: torch.Tensor
    back: torch.Tensor
    padding: torch.Tensor
    outside: torch.Tensor
    steps: tuple[tuple[int, int], ...]
    order: torch.Tensor
    inverse_order: torch.Tensor

    def gather(self, x: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, T, heads, D] -> [cells, C, D] in `dtype`, zero where there is no token."""
        if not rows.numel():
            return x.new_zeros(0, self.chunk, x.shape[-1], dtype=dtype)
        flat = x.reshape(-1, x.shape[-1]).index_select(0, rows).to(dtype)
        if self.padding.numel():
            flat.index_fill_(0, self.padding, 0)
        return flat.view(-1, self.chunk, x.shape[-1])

    def scatter(self, cells: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """[cells, C, D] -> [B, T, HV, D] with `shape` = (B, T, HV); zero for tokens of no sequence."""
        if not len(cells):
            return cells.new_zeros(*shape, cells.shape[-1])
        flat = cells.reshape(-1, cells.shape[-1]).index_select(0, self.back)
        if self.outside.numel():
            flat.index_fill_(0, self.outside, 0)
        return flat.view(*shape, cells.shape[-1])

    def gradient(self, cells: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[cells, C, D] -> the gradient of an input [B, T, H or HV, D], summed over a head's group."""
        batch, tokens, heads, _ = shape
        groups = self.value_heads // heads
        full = self.scatter(cells, (batch, tokens, self.value_heads))
        return (full if groups == 1 else full.unflatten(2, (heads, groups)).sum(3)).to(dtype)

    def unsorted(self, states: torch.Tensor) -> torch.Tensor:
        """States [N, ...], longest sequence first, in the order the caller gave them."""
        return states.index_select(0, self.inverse_order)


def chunk_layout(
    batch: int,
    tokens: int,
    heads: int,
    value_heads: int,
    chunk: int,
    cu_seqlens: torch.Tensor | None,
    device: torch.device,
) -> ChunkLayout:
    """The layout of `batch` sequences of `tokens`, or of the sequences that `cu_seqlens` cuts."""
    if cu_seqlens is None:
        bounds = tuple(range(0, batch * tokens + 1, tokens)) if tokens else (0,) * (batch + 1)
    else:
        bounds = tuple(cu_seqlens.tolist())
        if bounds[0] != 0 or bounds[-1] > tokens or any(a > b for a, b in itertools.pairwise(bounds)):
            raise ValueError(f"cu_seqlens must rise from 0 to at most T={tokens}; got {list(bounds)}")
    return _layout(bounds, batch * tokens, heads, value_heads, chunk, device)


@lru_cache(maxsize=32)
def _layout(
    bounds: tuple[int, ...], tokens: int, heads: int, value_heads: int, chunk: int, device: torch.device
) -> ChunkLayout:
    # Index arrays made under inference_mode would be refused by a later backward pass that finds them here.
    with torch.inference_mode(False):
        starts = torch.tensor(bounds[:-1], dtype=torch.int64)
        lengths = torch.tensor(bounds, dtype=torch.int64).diff()
        order = torch.sort(lengths, descending=True, stable=True).indices
        chunks = (lengths[order] + chunk - 1) // chunk
        most = int(chunks.max()) if len(order) else 0
        running: list[int] = (chunks > torch.arange(most).unsqueeze(1)).sum(1).tolist()
        step = torch.repeat_interleave(torch.arange(len(running)), torch.tensor(running, dtype=torch.int64))
        sequence = order[torch.cat([torch.arange(n) for n in running] or [order[:0]])]
        place = step.unsqueeze(1) * chunk + torch.arange(chunk)
        inside = place < lengths[sequence].unsqueeze(1)
        token = torch.where(inside, starts[sequence].unsqueeze(1) + place, 0).unsqueeze(1)
        head = torch.arange(value_heads).view(1, -1, 1)
        rows_v = (token * value_heads + head).flatten()
        rows_qk = (token * heads + head // (value_heads // heads)).flatten()
        inside = inside.unsqueeze(1).expand(-1, value_heads, -1).flatten()
        back = torch.full((tokens * value_heads,), -1, dtype=torch.int64)
        back[rows_v[inside]] = inside.nonzero().flatten()
        outside = (back < 0).nonzero().flatten()
        ends = list(itertools.accumulate(n * value_heads for n in running))
        return ChunkLayout(
            chunk=chunk,
            value_heads=value_heads,
            rows_qk=rows_qk.to(device),
            rows_v=rows_v.to(device),
            back=back.clamp_(min=0).to(device),
            padding=(~inside).nonzero().flatten().to(device),
            outside=outside.to(device),
            steps=tuple(itertools.pairwise([0, *ends])),
            order=order.to(device),
            inverse_order=order.argsort().to(device),
        )
