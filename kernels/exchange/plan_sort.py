"""The stable order of a rank's routed entries inside each expert, and where every entry goes.

No sort: an entry's place among its expert's tokens is the number of equal ids before it, counted inside a
block of ENTRIES entries by comparing all pairs, and over earlier blocks by a table of counts [blocks, E] and
its column prefix.
"""

from __future__ import annotations

import triton
import triton.language as tl

SLICE = tl.constexpr(32)  # entries compared with the whole block at once: what registers hold


@triton.jit
def entry_offsets(flat, s, K, ENTRIES: tl.constexpr, K_PAD: tl.constexpr):
    """(offset in ids [s, K], validity) of entries of this block: tokens in order, k inside a token."""
    token = tl.program_id(0) * (ENTRIES // K_PAD) + flat // K_PAD
    k = flat % K_PAD
    return token.to(tl.int64) * K + k, (token < s) & (k < K)


@triton.jit(do_not_specialize=["s", "K", "E"])
def count_kernel(
    ids_ptr, nth_ptr, counts_ptr, s, K, E, ENTRIES: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr
):
    """Place of each entry inside its block, nth [s, K]; histogram of each block, counts [blocks, E]."""
    counts_ptr += tl.program_id(0).to(tl.int64) * E
    e = tl.arange(0, E_PAD)
    tl.store(counts_ptr + e, tl.zeros([E_PAD], tl.int32), e < E)
    flat = tl.arange(0, ENTRIES)
    offset, valid = entry_offsets(flat, s, K, ENTRIES, K_PAD)
    ids = tl.load(ids_ptr + offset, valid, other=-1).to(tl.int32)
    nth = tl.zeros([ENTRIES], tl.int32)
    for start in range(0, ENTRIES, SLICE):
        # The slice runs along the first axis, so that a thread sums its own entry's column without a shuffle.
        other = start + tl.arange(0, SLICE)
        other_offset, other_valid = entry_offsets(other, s, K, ENTRIES, K_PAD)
        other_ids = tl.load(ids_ptr + other_offset, other_valid, other=-2).to(tl.int32)
        before = (other_ids[:, None] == ids[None, :]) & (other[:, None] < flat[None, :])
        nth += tl.sum(before.to(tl.int32), 0)
    tl.store(nth_ptr + offset, nth, valid)
    tl.debug_barrier()
    tl.atomic_max(counts_ptr + ids, nth + 1, mask=valid)


@triton.jit(do_not_specialize=["blocks", "E"])
def prefix_kernel(counts_ptr, histogram_ptr, blocks, E, B_TILE: tl.constexpr, E_TILE: tl.constexpr):
    """Column prefix in place (entries of earlier blocks) and the whole histogram [E]."""
    e = tl.program_id(0) * E_TILE + tl.arange(0, E_TILE)
    carry = tl.zeros([E_TILE], tl.int32)
    for start in range(0, blocks, B_TILE):
        block = start + tl.arange(0, B_TILE)
        inside = (block < blocks)[:, None] & (e < E)[None, :]
        at = block.to(tl.int64)[:, None] * E + e[None, :]
        tile = tl.load(counts_ptr + at, inside, other=0)
        tl.store(counts_ptr + at, carry[None, :] + tl.cumsum(tile, 0) - tile, inside)
        carry += tl.sum(tile, 0)
    tl.store(histogram_ptr + e, carry, e < E)


@triton.jit(do_not_specialize=["s", "K", "E", "R", "rank", "shard_rows"])
def destinations_kernel(
    ids_ptr,
    nth_ptr,
    prefix_ptr,
    local_ptr,
    source_start_ptr,
    receive_end_ptr,
    first_row_ptr,
    destinations_ptr,
    s,
    K,
    E,
    R,
    rank,
    shard_rows,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    K_PAD: tl.constexpr,
    STEPS: tl.constexpr,
):
    """destinations [s, K] int64: receiver * shard_rows + row; later entries of a token on a rank as -that -
    1.

    A program places TOKENS tokens; BLOCK tokens share a row of the prefix table.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    k = tl.arange(0, K_PAD)
    valid = (token < s)[:, None] & (k < K)[None, :]
    offset = token.to(tl.int64)[:, None] * K + k[None, :]
    e = tl.load(ids_ptr + offset, valid, other=0).to(tl.int32)
    before_block = tl.load(prefix_ptr + (token // BLOCK).to(tl.int64)[:, None] * E + e, valid, other=0)
    nth = before_block + tl.load(nth_ptr + offset, valid, other=0)
    stays = tl.load(local_ptr + rank * E + e, valid, other=0)
    travel = nth - stays + tl.load(source_start_ptr + rank * E + e, valid, other=0)
    leaves = valid & (nth >= stays)
    # The receiver is the first rank whose receive_end exceeds `travel`: bisection over R + 1 answers.
    low = tl.zeros([TOKENS, K_PAD], tl.int32)
    high = tl.zeros([TOKENS, K_PAD], tl.int32) + R
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = leaves & (low < high)
        full = tl.load(receive_end_ptr + middle * E + e, searching, other=0) <= travel
        low = tl.where(searching & full, middle + 1, low)
        high = tl.where(searching & (full == 0), middle, high)
    receiver = tl.where(leaves, tl.minimum(low, R - 1), rank)
    taken = tl.load(receive_end_ptr + (receiver - 1) * E + e, leaves & (receiver > 0), other=0)
    kept = tl.load(local_ptr + receiver * E + e, leaves, other=0)
    row = tl.where(leaves, kept + travel - taken, nth)
    row += tl.load(first_row_ptr + receiver * E + e, valid, other=0)
    target = receiver.to(tl.int64) * shard_rows + row
    earlier = (k[None, :] < k[:, None])[None, :, :]
    same = (receiver[:, :, None] == receiver[:, None, :]) & earlier
    duplicate = tl.max(same.to(tl.int32), 2) > 0
    tl.store(destinations_ptr + offset, tl.where(duplicate, -target - 1, target), valid)
