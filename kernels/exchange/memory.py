"""What the exchange kernels share: addresses of peer memory, destinations, and the word that ends everything.

Every rank holds the same regions; `addresses [REGIONS, R]` int64 lists where each begins on each rank, so one
kernel serves loopback views of one tensor, torch symmetric memory and CUDA IPC alike. Regions of a rank:

    ROWS      [NvS, row]      the shard: expert-grouped rows
    WEIGHTS   [NvS] fp32      route weight of each row
    ORIGINS   [NvS] int64     of the first row here of a token of another rank: how many rows of the token
                              are here, that rank, and where it wants their sum; else -1
    LISTS     [NvS, K] int32  of such a row: all rows of its token here, itself first
    PARTIALS  [S * min(R - 1, K), row]   sums of a token's rows, one for each other rank that computed some
    CONTROL   [R + 1] int64   arrival counters of the barrier, then the abort word

Shapes: R ranks, n ranks played by a launch, s tokens of a rank, K top-k, NvS rows of a shard, H elements of a
row, J = min(R - 1, K).
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS, WEIGHTS, ORIGINS, LISTS, PARTIALS, CONTROL = (tl.constexpr(i) for i in range(6))
ABSENT = tl.constexpr(-(1 << 62))  # a destination that is none
RANK_SHIFT = tl.constexpr(32)  # an origin: place of the sum, source rank (20 bits), number of rows (10 bits)
COUNT_SHIFT = tl.constexpr(52)


@triton.jit
def region(addresses, REGION: tl.constexpr, R, rank, TYPE: tl.constexpr):
    """Pointer to a region of `rank`. The hint must follow the cast, or stores fall apart into words."""
    address = tl.load(addresses + REGION * R + rank)
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def make_origin(count, rank, place):
    return (count.to(tl.int64) << COUNT_SHIFT) | (rank.to(tl.int64) << RANK_SHIFT) | place.to(tl.int64)


@triton.jit
def origin_count(origin):
    """Rows of the token here; 0 of a row that is no first one."""
    return tl.where(origin < 0, 0, origin >> COUNT_SHIFT).to(tl.int32)


@triton.jit
def origin_rank(origin):
    return ((origin >> RANK_SHIFT) & 0xFFFFF).to(tl.int32)


@triton.jit
def origin_place(origin):
    return origin & 0xFFFFFFFF


@triton.jit
def is_aborted(addresses, R, rank, CONTROLLED: tl.constexpr):
    """Whether a wait of this rank has ended in vain: nothing may run any more."""
    if CONTROLLED:
        return tl.load(region(addresses, CONTROL, R, rank, tl.int64) + R) != 0
    else:
        return False


@triton.jit
def decode(target, NvS, WIDE: tl.constexpr):
    """(receiving rank, row) of destinations; marks of duplicates undone. WIDE: R * NvS needs 64 bits."""
    plain = tl.where(target < 0, -target - 1, target)
    plain = tl.where(target == ABSENT, 0, plain)
    if not WIDE:
        plain = plain.to(tl.int32)
    receiver = plain // NvS
    return receiver.to(tl.int32), (plain - receiver * NvS).to(tl.int32)
