"""The balancing rules on the device: one warp solves one attempt at one plan, in registers, integers only.

Mirrors moonep/planning/solvers.py step by step (same names, same first-of-equals ties) and gives the
same moves bit for bit. Every step is a few maxima and minima over int32 vectors, which one warp does with
redux instructions and no barrier; the only state in memory is `remaining`, of which a step reads one rank's
stretch.

Vectors: ranks [R_PAD], j [EPN_PAD] experts of one rank. Memory of one attempt: remaining [E], moves [3, M] as
(expert, receiver, tokens).
"""

from __future__ import annotations

import triton
import triton.language as tl

MOONEP = tl.constexpr(1)
BOUNDED = tl.constexpr(2)
EXACT = tl.constexpr(1000)
BIG = tl.constexpr(2**31 - 1)


@triton.jit
def first_largest(values, index, valid):
    """(largest value, its first index) among valid lanes; (-BIG, BIG) where there is none."""
    masked = tl.where(valid, values, -BIG)
    top = tl.max(masked, 0)
    return top, tl.min(tl.where(valid & (masked == top), index, BIG), 0)


@triton.jit
def first_smallest(values, index, valid):
    masked = tl.where(valid, values, BIG)
    low = tl.min(masked, 0)
    return low, tl.min(tl.where(valid & (masked == low), index, BIG), 0)


@triton.jit
def load_home(totals, remaining, scratch, ranks, R, epn, R_ROWS: tl.constexpr, TILE: tl.constexpr):
    """Copies the totals to `remaining`; returns the home load of every rank, kept in `scratch` too.

    The way through memory gives the loads one lane a rank; as a row sum they would be replicated over lanes,
    and every later step with them.
    """
    rows = tl.arange(0, R_ROWS)
    load = tl.zeros([R_ROWS], tl.int32)
    for start in range(0, epn, TILE):
        j = start + tl.arange(0, TILE)
        at = rows[:, None] * epn + j[None, :]
        inside = (rows < R)[:, None] & (j < epn)[None, :]
        tile = tl.load(totals + at, inside, other=0)
        tl.store(remaining + at, tile, inside)
        load += tl.sum(tile, 1)
    tl.store(scratch + rows, load, rows < R)
    tl.debug_barrier()
    return tl.load(scratch + ranks, ranks < R, other=0)


@triton.jit
def exact_caps(home_load, ranks, R, total, first_ranks, scratch, R_PAD: tl.constexpr):
    """floor(total/R), the remainder to the first ranks or to the most loaded."""
    base = total // R
    extra = total - base * R
    if first_ranks:
        ahead = ranks
    else:
        ahead = tl.zeros([R_PAD], tl.int32)
        if extra > 0:
            for other in range(R):
                load = tl.load(scratch + other)
                ahead += ((load > home_load) | ((load == home_load) & (other < ranks))).to(tl.int32)
    return base + (ahead < extra).to(tl.int32)


@triton.jit
def record(moves_ptr, M, moves, going, expert, receiver, tokens):
    tl.store(moves_ptr + moves, expert, going)
    tl.store(moves_ptr + M + moves, receiver, going)
    tl.store(moves_ptr + 2 * M + moves, tokens, going)


@triton.jit
def load_stretch(remaining, first, j, epn):
    return tl.load(remaining + first + j, j < epn, other=0)


@triton.jit
def choose_expert(remaining, donor, j, epn, goal):
    """The donor's smallest expert that covers `goal`, else its largest: (expert, its tokens)."""
    row = load_stretch(remaining, donor * epn, j, epn)
    inside = j < epn
    least = tl.min(tl.where(inside & (row >= goal), row, BIG), 0)
    most = tl.max(tl.where(inside, row, -BIG), 0)
    tokens = tl.where(least < BIG, least, most)
    place = tl.min(tl.where(inside & (row == tokens), j, BIG), 0)
    return donor * epn + place, tokens


@triton.jit
def shed_surplus(load, caps, free, remaining, moves_ptr, M, ranks, j, R, epn, fitting_first):
    moves = 0
    going = True
    while going:
        room = caps - load
        surplus, donor = first_largest(-room, ranks, ranks < R)
        open_ranks = (ranks < R) & (free > 0) & (room > 0)
        widest_room = tl.max(tl.where(open_ranks, room, 0), 0)
        going = (surplus > 0) & (widest_room > 0)
        if going:
            fits = (ranks < R) & (room < 0) & (-room <= widest_room)
            fit_surplus, fit = first_largest(-room, ranks, fits)
            take_fit = fitting_first & (fit_surplus > 0)
            donor = tl.where(take_fit, fit, donor)
            goal = tl.minimum(tl.where(take_fit, fit_surplus, surplus), widest_room)
            expert, tokens = choose_expert(remaining, donor, j, epn, goal)
            amount = tl.minimum(goal, tokens)
            _, receiver = first_smallest(room, ranks, open_ranks & (room >= amount))
            record(moves_ptr, M, moves, True, expert, receiver, amount)
            tl.store(remaining + expert, tokens - amount)
            load += tl.where(ranks == receiver, amount, 0) - tl.where(ranks == donor, amount, 0)
            free -= (ranks == receiver).to(tl.int32)
            moves += 1
            tl.debug_barrier()
    return load, moves


@triton.jit
def fill_receivers(load, caps, slots, remaining, moves_ptr, M, ranks, j, R, epn):
    moves = 0
    fresh = ranks < R
    going = slots > 0
    while going:
        room = caps - load
        surplus, donor = first_largest(-room, ranks, ranks < R)
        deficit, receiver = first_largest(room, ranks, fresh & (room > 0))
        going = (surplus > 0) & (deficit > 0)
        if going:
            wanted = deficit
            places = slots
            while (wanted > 0) & (places > 0):
                expert, tokens = choose_expert(remaining, donor, j, epn, wanted)
                amount = tl.minimum(wanted, tokens)
                record(moves_ptr, M, moves, True, expert, receiver, amount)
                tl.store(remaining + expert, tokens - amount)
                tl.debug_barrier()
                wanted -= amount
                places -= 1
                moves += 1
            taken = deficit - wanted
            load += tl.where(ranks == receiver, taken, 0) - tl.where(ranks == donor, taken, 0)
            fresh = fresh & (ranks != receiver)
    return load, moves


@triton.jit
def pair_one_donor(load, caps, ranks, R, R_PAD: tl.constexpr):
    """Upstream's balance phase: (load, quota, donor of each receiver)."""
    quota = tl.zeros([R_PAD], tl.int32)
    donors = tl.zeros([R_PAD], tl.int32)
    going = True
    while going:
        surplus, high = first_largest(load - caps, ranks, ranks < R)
        deficit, low = first_largest(caps - load, ranks, ranks < R)
        going = (surplus > 0) & (deficit > 0)
        if going:
            quota = tl.where(ranks == low, deficit, quota)
            donors = tl.where(ranks == low, high, donors)
            load += tl.where(ranks == low, deficit, 0) - tl.where(ranks == high, deficit, 0)
    return load, quota, donors


@triton.jit
def spend_quotas(quota, donors, free, remaining, moves_ptr, M, ranks, j, R, epn):
    """Upstream's alloc phase: the largest quota takes from its donor's largest expert."""
    moves = 0
    going = True
    while going:
        most, receiver = first_largest(quota, ranks, ranks < R)
        going = most > 0
        if going:
            first = tl.max(tl.where(ranks == receiver, donors, 0), 0) * epn
            tokens, place = first_largest(load_stretch(remaining, first, j, epn), j, j < epn)
            amount = tl.minimum(most, tokens)
            record(moves_ptr, M, moves, True, first + place, receiver, amount)
            tl.store(remaining + first + place, tokens - amount)
            quota -= tl.where(ranks == receiver, amount, 0)
            free -= (ranks == receiver).to(tl.int32)
            moves += 1
            tl.debug_barrier()
    return free, moves


@triton.jit
def smallest_copy(moves_ptr, M, moves, rank, CHUNK: tl.constexpr):
    """(tokens, index) of the smallest move to `rank`, the first of equals."""
    low = BIG
    index = BIG
    for start in range(0, moves, CHUNK):
        m = start + tl.arange(0, CHUNK)
        receiver = tl.load(moves_ptr + M + m, m < moves, other=-1)
        tokens = tl.load(moves_ptr + 2 * M + m, m < moves, other=0)
        chunk_low, chunk_index = first_smallest(tokens, m, receiver == rank)
        better = chunk_low < low
        low = tl.where(better, chunk_low, low)
        index = tl.where(better, chunk_index, index)
    return low, index


@triton.jit
def return_smallest(load, free, remaining, moves_ptr, M, moves, ranks, R, epn, CHUNK: tl.constexpr):
    """Where slots are short, the smallest copies go home."""
    going = True
    while going:
        rank = tl.min(tl.where((ranks < R) & (free < 0), ranks, BIG), 0)
        going = rank < BIG
        if going:
            tokens, index = smallest_copy(moves_ptr, M, moves, rank, CHUNK)
            expert = tl.load(moves_ptr + index)
            tl.store(remaining + expert, tl.load(remaining + expert) + tokens)
            home = expert // epn
            load += tl.where(ranks == home, tokens, 0) - tl.where(ranks == rank, tokens, 0)
            free += (ranks == rank).to(tl.int32)
            moves -= 1
            last_expert = tl.load(moves_ptr + moves)
            last_receiver = tl.load(moves_ptr + M + moves)
            last_tokens = tl.load(moves_ptr + 2 * M + moves)
            tl.debug_barrier()
            record(moves_ptr, M, index, True, last_expert, last_receiver, last_tokens)
            tl.debug_barrier()
    return load, moves


@triton.jit(do_not_specialize=["R", "epn", "slots", "tau", "M", "attempts"])
def solve_kernel(
    totals_ptr,  # [N, E] int32
    remaining_ptr,  # [N, A, E] int32
    moves_ptr,  # [N, A, 3, M] int32
    scratch_ptr,  # [N, A, R] int32
    result_ptr,  # [N, A, 4] int32: tokens above the target, moves, least tokens to move, cap
    R,
    epn,
    slots,
    tau,
    M,
    attempts,
    RULE: tl.constexpr,
    R_PAD: tl.constexpr,
    EPN_PAD: tl.constexpr,
    R_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    attempt = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64) * attempts + attempt
    E = R * epn
    totals = totals_ptr + tl.program_id(1).to(tl.int64) * E
    remaining = remaining_ptr + program * E
    moves_ptr += program * 3 * M
    scratch = scratch_ptr + program * R
    ranks = tl.arange(0, R_PAD)
    j = tl.arange(0, EPN_PAD)
    load = load_home(totals, remaining, scratch, ranks, R, epn, R_ROWS, TILE)
    total = tl.sum(load, 0)
    free = tl.zeros([R_PAD], tl.int32) + slots
    cap = ((total.to(tl.int64) * tau + EXACT * R - 1) // (EXACT * R)).to(tl.int32)
    target = tl.zeros([R_PAD], tl.int32) + cap
    if tau == EXACT:
        target = exact_caps(load, ranks, R, total, False, scratch, R_PAD)
    least = tl.sum(tl.where(ranks < R, tl.maximum(load - target, 0), 0), 0)
    moves = 0
    if RULE == MOONEP:
        caps = exact_caps(load, ranks, R, total, True, scratch, R_PAD)
        load, quota, donors = pair_one_donor(load, caps, ranks, R, R_PAD)
        free, moves = spend_quotas(quota, donors, free, remaining, moves_ptr, M, ranks, j, R, epn)
        load, moves = return_smallest(load, free, remaining, moves_ptr, M, moves, ranks, R, epn, 128)
    if RULE == BOUNDED:
        if attempt < 2:
            load, moves = shed_surplus(
                load, target, free, remaining, moves_ptr, M, ranks, j, R, epn, attempt == 0
            )
        else:
            caps = target
            if attempt == 3:
                caps = exact_caps(load, ranks, R, total, False, scratch, R_PAD)
            if attempt == 4:
                spread = (epn + (R - 1) * slots).to(tl.int64)
                guaranteed = ((total.to(tl.int64) * epn + spread - 1) // spread).to(tl.int32)
                caps = tl.zeros([R_PAD], tl.int32) + tl.maximum(guaranteed, cap)
            load, moves = fill_receivers(load, caps, slots, remaining, moves_ptr, M, ranks, j, R, epn)
    missed = tl.max(tl.where(ranks < R, tl.maximum(load - target, 0), 0), 0)
    tl.store(result_ptr + program * 4, missed)
    tl.store(result_ptr + program * 4 + 1, moves)
    tl.store(result_ptr + program * 4 + 2, least)
    tl.store(result_ptr + program * 4 + 3, cap)


@triton.jit
def winning_attempt(result_ptr, ATTEMPTS: tl.constexpr):
    """(attempt, its moves): fewest tokens above the target, then fewest moves; fallbacks only where both
    sheds miss.
    """
    best = 0
    best_missed = tl.load(result_ptr)
    best_moves = tl.load(result_ptr + 1)
    for attempt in tl.static_range(1, ATTEMPTS):
        missed = tl.load(result_ptr + attempt * 4)
        moves = tl.load(result_ptr + attempt * 4 + 1)
        better = (missed < best_missed) | ((missed == best_missed) & (moves < best_moves))
        better = better & ((attempt < 2) | (best_missed > 0))
        best = tl.where(better, attempt, best)
        best_missed = tl.where(better, missed, best_missed)
        best_moves = tl.where(better, moves, best_moves)
    return best, best_moves
