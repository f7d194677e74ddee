"""Dispatch kernels: rows go to their final, expert-grouped place; a row crosses to another rank once.

`push_kernel` stores each token's row at all its places on its own rank and at the first of its places on
every other rank, with the records the receiver needs. After a barrier `replicate_kernel` copies arrived
rows to the other places of their token. Rows move as 32-bit words, 16 bytes a thread. See memory.py for
regions and shapes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.memory import (
    ABSENT,
    LISTS,
    ORIGINS,
    ROWS,
    WEIGHTS,
    decode,
    is_aborted,
    make_origin,
    origin_count,
    region,
)


@triton.jit
def push_row(
    addresses,
    x_ptr,
    targets_ptr,
    NvS,
    R,
    rank,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One read of the row, a store for every place that is local or first on its rank."""
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < WORDS
        data = tl.load(x_ptr + word, inside)
        for k in tl.static_range(K):
            target = tl.load(targets_ptr + k)
            receiver, row = decode(target, NvS, WIDE)
            sent = (target >= 0) | ((receiver == rank) & (target != ABSENT))
            place = region(addresses, ROWS, R, receiver, tl.int32) + row.to(tl.int64) * WORDS
            tl.store(place + word, data, inside & sent)


@triton.jit
def push_weights(addresses, targets_ptr, weights_ptr, NvS, R, K, K_PAD: tl.constexpr, WIDE: tl.constexpr):
    k = tl.arange(0, K_PAD)
    target = tl.load(targets_ptr + k, k < K, other=ABSENT)
    receiver, row = decode(target, NvS, WIDE)
    weight = tl.load(weights_ptr + k, k < K, other=0)
    base = tl.load(addresses + WEIGHTS * R + receiver).to(tl.pointer_type(tl.float32))
    tl.store(base + row, weight, target != ABSENT)


@triton.jit
def push_records(addresses, targets_ptr, token, NvS, R, J, rank, K, K_PAD: tl.constexpr, WIDE: tl.constexpr):
    """Origins of all rows of the token; for each first row on another rank the list of the token's rows
    there.
    """
    k = tl.arange(0, K_PAD)
    target = tl.load(targets_ptr + k, k < K, other=ABSENT)
    present = target != ABSENT
    receiver, row = decode(target, NvS, WIDE)
    first = (target >= 0) & (receiver != rank)
    same = (receiver[:, None] == receiver[None, :]) & present[None, :]
    slot = tl.cumsum(first.to(tl.int32), 0) - 1
    origin = make_origin(tl.sum(same.to(tl.int32), 1), rank, token * J + slot)
    origins = tl.load(addresses + ORIGINS * R + receiver).to(tl.pointer_type(tl.int64))
    tl.store(origins + row, tl.where(first, origin, -1), present)
    lists = tl.load(addresses + LISTS * R + receiver).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * K
    rows = row[None, :] + tl.zeros([K_PAD, 1], tl.int32)
    tl.store(lists[:, None] + tl.cumsum(same.to(tl.int32), 1) - 1, rows, first[:, None] & same)


@triton.jit
def zero_padding(
    addresses,
    offsets_ptr,
    group_rows_ptr,
    group,
    lane,
    R,
    rank,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RECORDS: tl.constexpr,
):
    """Rows of a group from its last real one to its padded end: zero, weight 0, no origin."""
    begin = tl.load(offsets_ptr + group - 1, group > 0, other=0) + tl.load(group_rows_ptr + group).to(
        tl.int32
    )
    end = tl.load(offsets_ptr + group)
    place = region(addresses, ROWS, R, rank, tl.int32) + (begin + lane).to(tl.int64) * WORDS
    for row in range(begin + lane, end, LANES):
        for start in range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            tl.store(place + word, tl.zeros([BLOCK], tl.int32), word < WORDS)
        place += LANES * WORDS
        if WEIGHTED:
            tl.store(region(addresses, WEIGHTS, R, rank, tl.float32) + row, 0.0)
        if RECORDS:
            tl.store(region(addresses, ORIGINS, R, rank, tl.int64) + row, -1)


@triton.jit(do_not_specialize=["s", "NvS", "R", "first_rank", "groups", "J"])
def push_kernel(
    addresses,
    x_ptr,
    targets_ptr,
    weights_ptr,
    offsets_ptr,
    group_rows_ptr,
    s,
    NvS,
    R,
    first_rank,
    groups,
    J,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RECORDS: tl.constexpr,
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Programs (0 .. s - 1, rank): a token each; the next groups * LANES: padding. Second axis: ranks.

    x [n, s, WORDS] int32; targets [n, s, K] int64; weights [n, s, K] fp32; offsets, group_rows [R, groups].
    """
    program = tl.program_id(0)
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    if program < s:
        token = played.to(tl.int64) * s + program
        targets_ptr += token * K
        push_row(addresses, x_ptr + token * WORDS, targets_ptr, NvS, R, rank, K, WORDS, BLOCK, WIDE)
        if WEIGHTED:
            push_weights(addresses, targets_ptr, weights_ptr + token * K, NvS, R, K, K_PAD, WIDE)
        if RECORDS:
            push_records(addresses, targets_ptr, program, NvS, R, J, rank, K, K_PAD, WIDE)
    else:
        at = rank * groups
        zero_padding(
            addresses,
            offsets_ptr + at,
            group_rows_ptr + at,
            (program - s) // LANES,
            (program - s) % LANES,
            R,
            rank,
            LANES,
            WORDS,
            BLOCK,
            WEIGHTED,
            RECORDS,
        )


@triton.jit(do_not_specialize=["entries", "NvS", "R", "first_rank", "groups", "blocks"])
def scatter_weights_kernel(
    addresses,
    weights_ptr,
    targets_ptr,
    offsets_ptr,
    group_rows_ptr,
    entries,
    NvS,
    R,
    first_rank,
    groups,
    blocks,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALAR: tl.constexpr,
    WIDE: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """weights [n, entries] of SCALAR to the places of the entries; programs from `blocks` on: 0 to padding
    rows.
    """
    program = tl.program_id(0)
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    if program < blocks:
        entry = program * BLOCK + tl.arange(0, BLOCK)
        at = played.to(tl.int64) * entries + entry
        target = tl.load(targets_ptr + at, entry < entries, other=ABSENT)
        receiver, row = decode(target, NvS, WIDE)
        base = tl.load(addresses + WEIGHTS * R + receiver).to(tl.pointer_type(SCALAR))
        tl.store(base + row, tl.load(weights_ptr + at, entry < entries, other=0), target != ABSENT)
    else:
        place = (program - blocks) * BLOCK + tl.arange(0, BLOCK)
        group = place // PADDING
        valid = group < groups
        slot = rank * groups + group
        begin = tl.load(offsets_ptr + slot - 1, valid & (group > 0), other=0)
        row = begin + tl.load(group_rows_ptr + slot, valid, other=0).to(tl.int32) + place % PADDING
        valid = valid & (row < tl.load(offsets_ptr + slot, valid, other=0))
        tl.store(region(addresses, WEIGHTS, R, rank, SCALAR) + row, tl.zeros([BLOCK], SCALAR), valid)


@triton.jit(do_not_specialize=["R", "first_rank", "groups"])
def replicate_kernel(
    addresses,
    offsets_ptr,
    R,
    first_rank,
    groups,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (row, rank): copies a row that arrived to the other places of its token here."""
    row = tl.program_id(0)
    rank = first_rank + tl.program_id(1)
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    if row < tl.load(offsets_ptr + rank * groups + groups - 1):
        count = origin_count(tl.load(region(addresses, ORIGINS, R, rank, tl.int64) + row))
        if count > 1:
            rows = region(addresses, ROWS, R, rank, tl.int32)
            list_ptr = region(addresses, LISTS, R, rank, tl.int32) + row.to(tl.int64) * K
            for start in range(0, WORDS, BLOCK):
                word = start + tl.arange(0, BLOCK)
                inside = word < WORDS
                data = tl.load(rows + row.to(tl.int64) * WORDS + word, inside)
                for i in range(1, count):
                    place = rows + tl.load(list_ptr + i).to(tl.int64) * WORDS
                    tl.store(place + word, data, inside)
