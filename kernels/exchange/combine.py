"""Combine kernels: a rank sums its rows of a token, one row travels, and the token's rank adds what arrives.

The experts' outputs stand in the shard, in the places of their inputs. `presum_kernel` sums the rows that a
rank computed for a token of another rank and pushes the sum, unless there is only one row: that one is read
in place by the final sum, which saves a write and a read. `sources_kernel` lists what a token's final sum
takes; after a barrier `final_sum_kernel` takes it. All sums run in fp32 (fp64 for fp64 rows) in the order
of the token's entries k, so results are bitwise repeatable. Instructions follow the rows that exist, not K.
See memory.py for regions and shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.memory import (
    ABSENT,
    LISTS,
    ORIGINS,
    PARTIALS,
    ROWS,
    WEIGHTS,
    decode,
    is_aborted,
    origin_count,
    origin_place,
    origin_rank,
    region,
)


@triton.jit(do_not_specialize=["R", "first_rank", "groups"])
def presum_kernel(
    addresses,
    offsets_ptr,
    R,
    first_rank,
    groups,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROW: tl.constexpr,
    SUM: tl.constexpr,
    PARTIAL: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (row, rank): if the row is the first of several of a token of another rank, sums and sends
    them.
    """
    row = tl.program_id(0)
    rank = first_rank + tl.program_id(1)
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    if row < tl.load(offsets_ptr + rank * groups + groups - 1):
        origin = tl.load(region(addresses, ORIGINS, R, rank, tl.int64) + row)
        count = origin_count(origin)
        if count > 1:
            out = region(addresses, PARTIALS, R, origin_rank(origin), PARTIAL) + origin_place(origin) * H
            weights = region(addresses, WEIGHTS, R, rank, tl.float32)
            list_ptr = region(addresses, LISTS, R, rank, tl.int32) + row.to(tl.int64) * K
            y_ptr = region(addresses, ROWS, R, rank, ROW)
            for start in range(0, H, BLOCK):
                h = start + tl.arange(0, BLOCK)
                total = tl.zeros([BLOCK], SUM)
                for first in range(0, count, UNROLL):
                    for i in tl.static_range(UNROLL):
                        exists = first + i < count
                        other = tl.load(list_ptr + first + i, exists, other=0)
                        place = y_ptr + other.to(tl.int64) * H + h
                        value = tl.load(place, (h < H) & exists, other=0).to(SUM)
                        if WEIGHTED:
                            value *= tl.load(weights + other, exists, other=0).to(SUM)
                        total += value
                tl.store(out + h, total.to(PARTIAL), h < H)


@triton.jit(do_not_specialize=["s", "NvS", "R", "first_rank", "J"])
def sources_kernel(
    addresses,
    targets_ptr,
    sources_ptr,
    entries_ptr,
    counts_ptr,
    s,
    NvS,
    R,
    first_rank,
    J,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PARTIAL_BYTES: tl.constexpr,
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (token, rank): the addresses that the token's final sum reads, in the order of k, and their
    number.

    targets [n, s, K]. sources [n, s, K] int64: rows on the token's own rank, a token's only row on another
    rank, and partial sums; entries [n, s, K] int32: k of a row, -1 of a partial sum; counts [n, s] int32.
    """
    token = tl.program_id(0)
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    at = played.to(tl.int64) * s + token
    k = tl.arange(0, K_PAD)
    target = tl.load(targets_ptr + at * K + k, k < K, other=ABSENT)
    present = target != ABSENT
    receiver, row = decode(target, NvS, WIDE)
    same = (receiver[:, None] == receiver[None, :]) & present[None, :]
    alone = tl.sum(same.to(tl.int32), 1) == 1
    first = (target >= 0) & (receiver != rank)
    read = present & ((receiver == rank) | alone)
    taken = read | first
    slot = token.to(tl.int64) * J + tl.cumsum(first.to(tl.int32), 0) - 1
    rows = tl.load(addresses + ROWS * R + receiver) + row.to(tl.int64) * ROW_BYTES
    partials = tl.load(addresses + PARTIALS * R + rank) + slot * PARTIAL_BYTES
    place = at * K + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(sources_ptr + place, tl.where(read, rows, partials), taken)
    tl.store(entries_ptr + place, tl.where(read, k, -1), taken)
    tl.store(counts_ptr + at, tl.sum(taken.to(tl.int32), 0))


@triton.jit(do_not_specialize=["s", "R", "first_rank"])
def final_sum_kernel(
    addresses,
    sources_ptr,
    entries_ptr,
    counts_ptr,
    weights_ptr,
    out_ptr,
    s,
    R,
    first_rank,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROW: tl.constexpr,
    SUM: tl.constexpr,
    PARTIAL: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (token, rank): adds up the token's sources, rows times their route weight.

    weights [n, s, K] fp32; out [n, s, H].
    """
    token = tl.program_id(0)
    played = tl.program_id(1)
    if is_aborted(addresses, R, first_rank + played, CONTROLLED):
        return
    at = played.to(tl.int64) * s + token
    count = tl.load(counts_ptr + at)
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = h < H
        total = tl.zeros([BLOCK], SUM)
        for first in range(0, count, UNROLL):
            for i in tl.static_range(UNROLL):
                exists = first + i < count
                address = tl.load(sources_ptr + at * K + first + i, exists, other=0)
                source = tl.multiple_of(address.to(tl.pointer_type(ROW)), 16)
                k = 0
                if WEIGHTED or ROW != PARTIAL:
                    k = tl.load(entries_ptr + at * K + first + i, exists, other=0)
                if ROW == PARTIAL:
                    value = tl.load(source + h, inside & exists, other=0).to(SUM)
                else:
                    partial = tl.multiple_of(address.to(tl.pointer_type(PARTIAL)), 16)
                    value = tl.load(source + h, inside & exists & (k >= 0), other=0).to(SUM)
                    value += tl.load(partial + h, inside & exists & (k < 0), other=0).to(SUM)
                if WEIGHTED:
                    value *= tl.load(weights_ptr + at * K + k, exists & (k >= 0), other=1).to(SUM)
                total += value
        tl.store(out_ptr + at * H + h, total.to(ROW), inside)


@triton.jit(do_not_specialize=["entries", "NvS", "R", "first_rank"])
def gather_weights_kernel(
    addresses,
    targets_ptr,
    out_ptr,
    entries,
    NvS,
    R,
    first_rank,
    BLOCK: tl.constexpr,
    SCALAR: tl.constexpr,
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """out [n, entries] of SCALAR: what the weights hold at the row each entry went to; 0 for absent
    entries.
    """
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    played = tl.program_id(1)
    if is_aborted(addresses, R, first_rank + played, CONTROLLED):
        return
    at = played.to(tl.int64) * entries + entry
    target = tl.load(targets_ptr + at, entry < entries, other=ABSENT)
    receiver, row = decode(target, NvS, WIDE)
    base = tl.load(addresses + WEIGHTS * R + receiver).to(tl.pointer_type(SCALAR))
    tl.store(out_ptr + at, tl.load(base + row, target != ABSENT, other=0), entry < entries)
