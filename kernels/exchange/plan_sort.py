"""The stable order of a rank's routed entries inside each expert, and where every entry goes.

No sort: an entry's place among its expert's tokens is the number of equal ids before it, counted inside
a block of ENTRIES entries by comparing all pairs, and over earlier blocks by a table of counts [blocks, E]
and its column prefix.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_entries(ids_ptr, s, K, ENTRIES: tl.constexpr, K_PAD: tl.constexpr):
    """(expert id, offset in ids [s, K], validity) of this program's entries, tokens in order, k inside a
    token.
    """
    flat = tl.arange(0, ENTRIES)
    token = tl.program_id(0) * (ENTRIES // K_PAD) + flat // K_PAD
    k = flat % K_PAD
    valid = (token < s) & (k < K)
    offset = token.to(tl.int64) * K + k
    return tl.load(ids_ptr + offset, valid, other=-1).to(tl.int32), offset, valid


@triton.jit
def equal_before(values, group, ENTRIES: tl.constexpr):
    """How many earlier entries have the same value and the same group."""
    flat = tl.arange(0, ENTRIES)
    same = (values[:, None] == values[None, :]) & (group[:, None] == group[None, :])
    return tl.sum((same & (flat[None, :] < flat[:, None])).to(tl.int32), 1)


@triton.jit(do_not_specialize=["s", "K", "E"])
def count_kernel(
    ids_ptr, counts_ptr, s, K, E, ENTRIES: tl.constexpr, K_PAD: tl.constexpr, E_PAD: tl.constexpr
):
    """Histogram of each block: counts [blocks, E]."""
    ids, _, valid = load_entries(ids_ptr, s, K, ENTRIES, K_PAD)
    counts_ptr += tl.program_id(0).to(tl.int64) * E
    e = tl.arange(0, E_PAD)
    tl.store(counts_ptr + e, tl.zeros([E_PAD], tl.int32), e < E)
    nth = equal_before(ids, tl.zeros([ENTRIES], tl.int32), ENTRIES)
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
    ENTRIES: tl.constexpr,
    K_PAD: tl.constexpr,
    STEPS: tl.constexpr,
):
    """destinations [s, K] int64: receiver * shard_rows + row; later entries of a token on a rank as
    -that - 1.
    """
    ids, offset, valid = load_entries(ids_ptr, s, K, ENTRIES, K_PAD)
    flat = tl.arange(0, ENTRIES)
    e = tl.where(valid, ids, 0)
    before_block = tl.load(prefix_ptr + tl.program_id(0).to(tl.int64) * E + e, valid, other=0)
    nth = before_block + equal_before(ids, tl.zeros([ENTRIES], tl.int32), ENTRIES)
    stays = tl.load(local_ptr + rank * E + e, valid, other=0)
    travel = nth - stays + tl.load(source_start_ptr + rank * E + e, valid, other=0)
    leaves = valid & (nth >= stays)
    # The receiver is the first rank whose receive_end exceeds `travel`: bisection over R + 1 answers.
    low = tl.zeros([ENTRIES], tl.int32)
    high = tl.zeros([ENTRIES], tl.int32) + R
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
    duplicate = equal_before(receiver, flat // K_PAD, ENTRIES) > 0
    tl.store(destinations_ptr + offset, tl.where(duplicate, -target - 1, target), valid)
