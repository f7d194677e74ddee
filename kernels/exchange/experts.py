"""Copies of experts to the ranks that compute them, and the return of their gradients, without a host read.

Shapes: R ranks, n ranks played by this process, E experts, epn = E/R, P parts (projections) of an expert.
Triton is imported at the first call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.exchange.shards import Shards, power_of_two, sum_dtype, triton_dtype

TILE = 4096  # words or elements a program moves at once: 128 threads, 8 x 16 bytes each
PROGRAMS = 1056  # of a rank's copies and gradients: 8 for each multiprocessor of an H200


@dataclass(frozen=True)
class Holders:
    """Which ranks hold copies of which experts, int32: holders `[E, R]` (rank * slots + slot, ranks
    ascending), counts `[E]`, copied `[R, epn]` (local numbers of the experts with copies), num_copied
    `[R]`.
    """

    holders: torch.Tensor
    counts: torch.Tensor
    copied: torch.Tensor
    num_copied: torch.Tensor
    slots: int


def find_holders(first_row: torch.Tensor, slots: int) -> Holders:
    """From `first_row [R, E]` of a plan: a rank computes an expert where it is not -1, and what is not its
    own lies in its slots in expert order.
    """
    from kernels.exchange.copies import holders_kernel

    R, E = first_row.shape

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=first_row.device)

    found = Holders(ints(E, R), ints(E), ints(R, E // R), ints(R), slots)
    holders_kernel[(R,)](
        first_row,
        found.holders,
        found.counts,
        found.copied,
        found.num_copied,
        R,
        E // R,
        slots,
        E_PAD=power_of_two(E),
    )
    return found


def _is_table(home: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether `home` holds addresses, rather than being the one part of the one rank played."""
    table = home.dtype == torch.int64 and home.dim() == 2
    if not table and (pool.shape[1] != 1 or not home.is_contiguous() or home.data_ptr() % 16):
        raise ValueError(
            f"home {list(home.shape)} {home.dtype}: give int64 addresses [n, P], or one contiguous tensor, "
            "16-byte aligned, for one rank and one part"
        )
    return table


def push_copies(
    shards: Shards, holders: Holders, home: torch.Tensor, pool: torch.Tensor, part_bytes: int
) -> None:
    """Sends every copied expert of the played ranks to its slots, each read once for all its copies.

    Args:
        home: int64 `[n, P]` addresses of the played ranks' weights, P parts `[epn, part_bytes]`; or, for one
            rank and one part, the weights themselves.
        pool: int64 `[R, P]` addresses of all ranks' slots, `[slots, part_bytes]`.
        part_bytes: of one expert's part; a multiple of 16.
    """
    from kernels.exchange.copies import push_copies_kernel

    if part_bytes % 16:
        raise ValueError(f"an expert's part has {part_bytes} bytes; it must be a multiple of 16")
    push_copies_kernel[(PROGRAMS, shards.played)](
        shards.addresses,
        home,
        pool,
        holders.holders,
        holders.counts,
        holders.copied,
        holders.num_copied,
        shards.num_ranks,
        holders.copied.shape[1],
        holders.slots,
        shards.first_rank,
        part_bytes // 16,
        PROGRAMS,
        PARTS=pool.shape[1],
        TABLE=_is_table(home, pool),
        BLOCK=TILE,
        CONTROLLED=shards.controlled,
    )


def return_gradients(
    shards: Shards,
    holders: Holders,
    home: torch.Tensor,
    pool: torch.Tensor,
    part_elements: int,
    *,
    home_dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.float32,
) -> None:
    """Adds the gradients in the slots of all ranks to those of the played ranks' experts, in fp32, ranks
    ascending.

    `home [n, P]` and `pool [R, P]` as for `push_copies`; `part_elements` of one expert's part: a multiple
    of 8.
    """
    from kernels.exchange.copies import return_gradients_kernel

    if part_elements % 8:
        raise ValueError(f"an expert's part has {part_elements} elements; it must be a multiple of 8")
    return_gradients_kernel[(PROGRAMS, shards.played)](
        shards.addresses,
        home,
        pool,
        holders.holders,
        holders.counts,
        holders.copied,
        holders.num_copied,
        shards.num_ranks,
        holders.copied.shape[1],
        holders.slots,
        shards.first_rank,
        part_elements // 8,
        PROGRAMS,
        PARTS=pool.shape[1],
        TABLE=_is_table(home, pool),
        BLOCK=TILE,
        HOME=triton_dtype(home_dtype),
        SLOT=triton_dtype(slot_dtype),
        SUM=sum_dtype(home_dtype),
        CONTROLLED=shards.controlled,
    )
