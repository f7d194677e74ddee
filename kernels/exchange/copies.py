"""Copies of expert weights to the ranks that compute them, and the return of their gradients.

Which rank holds a copy of which expert in which slot follows from `first_row [R, E]` of the plan: a rank's
copied experts take its slots in expert order. A part is one tensor of an expert (gate, up, down); all parts
of one call have the same bytes. Work is a list of copied experts, so the cost follows the copies, not the
experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.memory import is_aborted


@triton.jit(do_not_specialize=["R", "epn", "slots"])
def holders_kernel(
    first_row_ptr, holders_ptr, counts_ptr, copied_ptr, num_copied_ptr, R, epn, slots, E_PAD: tl.constexpr
):
    """Program r: for each expert of rank r its copies (rank * slots + slot, ranks ascending) and their
    number, and the experts that have any.

    holders [E, R], counts [E], copied [R, epn] (expert - r * epn), num_copied [R], all int32.
    """
    home = tl.program_id(0)
    E = R * epn
    e = tl.arange(0, E_PAD)
    mine = (e // epn == home) & (e < E)
    count = tl.zeros([E_PAD], tl.int32)
    for rank in range(R):
        present = tl.load(first_row_ptr + rank * E + e, e < E, other=-1) >= 0
        present = present & (e // epn != rank)
        slot = tl.cumsum(present.to(tl.int32), 0) - 1
        tl.store(holders_ptr + e * R + count, rank * slots + slot, mine & present)
        count += (mine & present).to(tl.int32)
    tl.store(counts_ptr + e, count, mine)
    copied = (count > 0).to(tl.int32)
    at = home * epn + tl.cumsum(copied, 0) - 1
    tl.store(copied_ptr + at, e - home * epn, count > 0)
    tl.store(num_copied_ptr + home, tl.sum(copied, 0))


@triton.jit
def pointer(address_ptr, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def home_pointer(home_ptr, part, TYPE: tl.constexpr, TABLE: tl.constexpr):
    """A part of the played rank's experts: from a table of addresses, or the one tensor given."""
    if TABLE:
        return pointer(home_ptr + part, TYPE)
    else:
        return tl.multiple_of(home_ptr.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def piece(item, copied_ptr, tiles, PARTS: tl.constexpr):
    """(local expert, part, tile) of a piece of work."""
    tile = item % tiles
    item = item // tiles
    return tl.load(copied_ptr + item // PARTS), item % PARTS, tile


@triton.jit(do_not_specialize=["R", "epn", "slots", "first_rank", "words", "programs"])
def push_copies_kernel(
    addresses,
    home_ptr,
    pool_ptr,
    holders_ptr,
    counts_ptr,
    copied_ptr,
    num_copied_ptr,
    R,
    epn,
    slots,
    first_rank,
    words,
    programs,
    PARTS: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (any, rank): reads pieces of the rank's copied experts once and stores them at every copy.

    home [n, PARTS], pool [R, PARTS] int64: addresses of the experts' weights and of every rank's slots;
    `words`: 32-bit words of an expert's part, in units of 4.
    """
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    size = words.to(tl.int64) * 4
    tiles = tl.cdiv(words * 4, BLOCK)
    total = tl.load(num_copied_ptr + rank) * PARTS * tiles
    for item in range(tl.program_id(0), total, programs):
        expert, part, tile = piece(item, copied_ptr + rank * epn, tiles, PARTS)
        word = tile * BLOCK + tl.arange(0, BLOCK)
        source = home_pointer(home_ptr, played * PARTS + part, tl.int32, TABLE) + expert * size
        data = tl.load(source + word, word < size)
        at = rank * epn + expert
        for i in range(tl.load(counts_ptr + at)):
            holder = tl.load(holders_ptr + at * R + i)
            pool = pointer(pool_ptr + (holder // slots) * PARTS + part, tl.int32)
            tl.store(pool + (holder % slots) * size + word, data, word < size)


@triton.jit(do_not_specialize=["R", "epn", "slots", "first_rank", "octets", "programs"])
def return_gradients_kernel(
    addresses,
    home_ptr,
    pool_ptr,
    holders_ptr,
    counts_ptr,
    copied_ptr,
    num_copied_ptr,
    R,
    epn,
    slots,
    first_rank,
    octets,
    programs,
    PARTS: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK: tl.constexpr,
    HOME: tl.constexpr,
    SLOT: tl.constexpr,
    SUM: tl.constexpr,
    CONTROLLED: tl.constexpr,
):
    """Program (any, rank): adds to pieces of the rank's gradients those of every copy, ranks ascending.

    home [n, PARTS], pool [R, PARTS] int64 addresses, of HOME and SLOT elements; `octets`: elements of an
    expert's part, in units of 8.
    """
    played = tl.program_id(1)
    rank = first_rank + played
    if is_aborted(addresses, R, rank, CONTROLLED):
        return
    size = octets.to(tl.int64) * 8
    tiles = tl.cdiv(octets * 8, BLOCK)
    total = tl.load(num_copied_ptr + rank) * PARTS * tiles
    for item in range(tl.program_id(0), total, programs):
        expert, part, tile = piece(item, copied_ptr + rank * epn, tiles, PARTS)
        element = tile * BLOCK + tl.arange(0, BLOCK)
        inside = element < size
        home = home_pointer(home_ptr, played * PARTS + part, HOME, TABLE) + expert * size
        gradient = tl.load(home + element, inside, other=0).to(SUM)
        at = rank * epn + expert
        for i in range(tl.load(counts_ptr + at)):
            holder = tl.load(holders_ptr + at * R + i)
            pool = pointer(pool_ptr + (holder // slots) * PARTS + part, SLOT)
            gradient += tl.load(pool + (holder % slots) * size + element, inside, other=0).to(SUM)
        tl.store(home + element, gradient.to(HOME), inside)
