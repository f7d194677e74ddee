"""Where the exchange kernels find the regions of all ranks, and the barrier between ranks.

Shapes: R ranks, n ranks played by this process, K top-k, NvS rows of a shard, S token capacity, H width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

REGIONS = 6  # rows, weights, origins, lists, partials, control: see kernels/exchange/memory.py


@dataclass(frozen=True)
class Shards:
    """The regions of all ranks and the ranks played here.

    addresses: int64 `[6, R]` on the device (`region_addresses`); base addresses divisible by 16.
    controlled: whether kernels look at the abort word and do nothing once it is set.
    """

    addresses: torch.Tensor
    shard_rows: int
    top_k: int
    first_rank: int = 0
    played: int = 1
    controlled: bool = False

    @property
    def num_ranks(self) -> int:
        return self.addresses.shape[1]

    @property
    def partials_of_token(self) -> int:
        """J: places for partial sums a token has, min(R - 1, K), at least 1."""
        return max(1, min(self.num_ranks - 1, self.top_k))

    @property
    def wide(self) -> bool:
        """Whether destinations need 64 bits."""
        return self.num_ranks * self.shard_rows >= 2**31


def region_addresses(regions: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`[6, R]` from int64 `[R]` address tensors in the order of REGIONS; None for a region no kernel will
    touch.
    """
    given = [r for r in regions if r is not None]
    if len(regions) != REGIONS or not given:
        raise ValueError(f"regions: expected {REGIONS} entries, at least one a tensor, got {len(regions)}")
    return torch.stack([torch.zeros_like(given[0]) if r is None else r for r in regions])


def region_shapes(
    shard_rows: int, top_k: int, num_ranks: int, capacity: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Shape of each region on a rank; dtypes: rows and partials the caller's, weights fp32, origins and
    control int64, lists int32.
    """
    partials = capacity * max(1, min(num_ranks - 1, top_k))
    return {
        "rows": (shard_rows, width),
        "weights": (shard_rows,),
        "origins": (shard_rows,),
        "lists": (shard_rows, top_k),
        "partials": (partials, width),
        "control": (num_ranks + 1,),
    }


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
        torch.float64: tl.float64,
    }[dtype]


def sum_dtype(dtype: torch.dtype):
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def barrier(
    shards: Shards,
    epochs: torch.Tensor,
    status: torch.Tensor,
    phase: int,
    max_polls: int,
    *,
    arrive: bool = True,
    wait: bool = True,
) -> None:
    """Tells all ranks that the played ones arrived and waits for all, at most `max_polls` looks.

    `epochs [n]` int64 on the device, zero at first. `status [n, 4]` int64 that the host reads (pinned),
    zero at first; written when a wait ends in vain: (1: too many looks, 2: another rank gave up; phase;
    first rank missing or -1; epoch).
    """
    from kernels.exchange.barrier import barrier_kernel

    barrier_kernel[(shards.played,)](
        shards.addresses,
        epochs,
        status,
        shards.num_ranks,
        shards.first_rank,
        phase,
        max_polls,
        R_PAD=power_of_two(shards.num_ranks),
        ARRIVE=arrive,
        WAIT=wait,
        num_warps=1,
    )
