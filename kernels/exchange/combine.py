"""Combine kernels: a rank sums its rows of a token, one row travels, and the token's rank adds what arrives.

All sums run in fp32 (fp64 for fp64 rows), in the order of the token's entries k, so results are bitwise
repeatable. `presum_kernel` pushes the partial sums; after a barrier `final_sum_kernel` adds them to the rows the
token has on its own rank. Where the outputs lie in the shard itself (`DIRECT`), a token's only row on another
rank needs no sum there: it is read from the peer by the final sum, which saves a write and a read. See memory.py
for regions and shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.memory import (
    ABSENT,
    DUPLICATED,
    LISTS,
    ORIGINS,
    PARTIALS,
    ROWS,
    WEIGHTS,
    decode,
    is_aborted,
    region,
)


@triton.jit(do_not_specialize=["NvS", "R", "first_rank", "groups"])
def presum_kernel(
    addresses,
    y_ptr,
    offsets_ptr,
    NvS,
    R,
    first_rank,
    groups,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIRECT: tl.constexpr,
    SUM: tl.constexpr,
    PARTIAL: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (row, rank): if the row stands for a token of another rank, sums the token's rows and sends the sum.

    y [n, NvS, H]: the experts' outputs, in the places their inputs have in the shard (the shard itself if DIRECT).
    """
    row = tl.program_id(0)
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    if row < tl.load(offsets_ptr + rank * groups + groups - 1):
        origin = tl.load(region(addresses, ORIGINS, R, rank, tl.int64) + row)
        least = DUPLICATED if DIRECT else 0
        if (origin >= 0) & (origin >= least):
            origin &= DUPLICATED - 1
            slot = origin & 0xFFFFFFFF
            out = region(addresses, PARTIALS, R, (origin >> 32).to(tl.int32), PARTIAL) + slot * H
            weights = region(addresses, WEIGHTS, R, rank, tl.float32)
            rows = region(addresses, LISTS, R, rank, tl.int32) + row.to(tl.int64) * K
            y_ptr += played.to(tl.int64) * NvS * H
            for start in range(0, H, BLOCK):
                h = start + tl.arange(0, BLOCK)
                total = tl.zeros([BLOCK], SUM)
                for k in tl.static_range(K):
                    other = tl.load(rows + k)
                    exists = other >= 0
                    value = tl.load(y_ptr + other.to(tl.int64) * H + h, (h < H) & exists, other=0).to(SUM)
                    if WEIGHTED:
                        value *= tl.load(weights + other, exists, other=0).to(SUM)
                    total += value
                tl.store(out + h, total.to(PARTIAL), h < H)


@triton.jit
def only_rows(targets_ptr, NvS, K: tl.constexpr, K_PAD: tl.constexpr, WIDE: tl.constexpr):
    """Bit k is set where entry k is the token's only one on its rank."""
    k = tl.arange(0, K_PAD)
    target = tl.load(targets_ptr + k, k < K, other=ABSENT)
    receiver, _ = decode(target, NvS, WIDE)
    present = target != ABSENT
    same = (receiver[:, None] == receiver[None, :]) & present[None, :]
    single = present & (tl.sum(same.to(tl.int32), 1) == 1)
    return tl.sum(single.to(tl.int32) << k, 0)


@triton.jit(do_not_specialize=["s", "NvS", "R", "first_rank", "J"])
def final_sum_kernel(
    addresses,
    y_ptr,
    targets_ptr,
    out_ptr,
    s,
    NvS,
    R,
    first_rank,
    J,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    DIRECT: tl.constexpr,
    SUM: tl.constexpr,
    PARTIAL: tl.constexpr,
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (token, rank): the rows the token has here or alone elsewhere, and the partial sums sent for it, in
    the order of k.

    y [n, NvS, H], not read if DIRECT; targets [n, s, K]; out [n, s, H].
    """
    token = tl.program_id(0)
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    at = played.to(tl.int64) * s + token
    targets_ptr += at * K
    y_ptr += played.to(tl.int64) * NvS * H
    partials = region(addresses, PARTIALS, R, rank, PARTIAL) + token.to(tl.int64) * J * H
    single = 0
    if DIRECT:
        single = only_rows(targets_ptr, NvS, K, K_PAD, WIDE)
    for start in range(0, H, BLOCK):
        h = start + tl.arange(0, BLOCK)
        inside = h < H
        total = tl.zeros([BLOCK], SUM)
        slot = 0
        for k in tl.static_range(K):
            target = tl.load(targets_ptr + k)
            receiver, row = decode(target, NvS, WIDE)
            read = ((receiver == rank) | ((single >> k) & 1 == 1)) & (target != ABSENT)
            sent = (target >= 0) & (read == 0)
            if DIRECT:
                own = region(addresses, ROWS, R, receiver, y_ptr.dtype.element_ty) + row.to(tl.int64) * H
            else:
                own = y_ptr + row.to(tl.int64) * H
            weight = 1.0
            if WEIGHTED:
                weights = region(addresses, WEIGHTS, R, receiver, tl.float32)
                weight = tl.load(weights + row, read, other=1).to(SUM)
            if PARTIAL == y_ptr.dtype.element_ty:
                # One load serves both kinds of entries: half the registers.
                place = tl.multiple_of(tl.where(read, own, partials + slot * H), 16)
                total += tl.load(place + h, inside & (read | sent), other=0).to(SUM) * weight
            else:
                total += tl.load(own + h, inside & read, other=0).to(SUM) * weight
                total += tl.load(partials + slot * H + h, inside & sent, other=0).to(SUM)
            slot += ((target >= 0) & (receiver != rank)).to(tl.int32)
        tl.store(out_ptr + at * H + h, total.to(out_ptr.dtype.element_ty), inside)


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
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """out [n, entries] fp32: what stands in the weights of the row each entry went to; 0 for absent entries."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    played = tl.program_id(1)
    if is_aborted(addresses, R, first_rank + played, CONTROLLED):
        return
    at = played.to(tl.int64) * entries + entry
    target = tl.load(targets_ptr + at, entry < entries, other=ABSENT)
    receiver, row = decode(target, NvS, WIDE)
    base = tl.load(addresses + WEIGHTS * R + receiver).to(tl.pointer_type(tl.float32))
    tl.store(out_ptr + at, tl.load(base + row, target != ABSENT, other=0), entry < entries)
