"""From solved moves to the tables of the exchange, and from expert ids to destinations: the kernels
around the solver.

Integers only; the definitions are those of moonep/planning/layout.py. Shapes: R ranks, E experts, epn =
E/R, G = epn + slots groups of a rank, K top-k, s tokens of this rank. A program of the sort holds ENTRIES
routed entries, whole tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.plan_solve import winning_attempt

CHUNK = tl.constexpr(128)  # moves looked at together


@triton.jit(do_not_specialize=["R", "E"])
def totals_kernel(
    counts_ptr,
    totals_ptr,
    statistics_ptr,
    R,
    E,
    STATISTICS: tl.constexpr,
    R_TILE: tl.constexpr,
    E_TILE: tl.constexpr,
):
    """Column sums: counts [N, R, E] -> totals [N, E]. Clears the statistics that tables_kernel gathers."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        index = tl.arange(0, 16)
        tl.store(statistics_ptr + index, tl.zeros([16], tl.int64), index < STATISTICS)
    e = tl.program_id(0) * E_TILE + tl.arange(0, E_TILE)
    plan = tl.program_id(1).to(tl.int64)
    total = tl.zeros([E_TILE], tl.int32)
    for start in range(0, R, R_TILE):
        rank = start + tl.arange(0, R_TILE)
        inside = (rank < R)[:, None] & (e < E)[None, :]
        at = plan * R * E + rank[:, None] * E + e[None, :]
        total += tl.sum(tl.load(counts_ptr + at, inside, other=0), 0)
    tl.store(totals_ptr + plan * E + e, total, e < E)


@triton.jit
def scatter_moves(moves_ptr, M, moves, row_ptr, rank):
    """Writes the tokens that `rank` receives over its row of an allocation; returns the copies it
    receives.
    """
    copies = 0
    for start in range(0, moves, CHUNK):
        m = start + tl.arange(0, CHUNK)
        listed = m < moves
        receiver = tl.load(moves_ptr + M + m, listed, other=-1)
        expert = tl.load(moves_ptr + m, listed, other=0)
        tokens = tl.load(moves_ptr + 2 * M + m, listed, other=0)
        mine = listed & (receiver == rank)
        tl.store(row_ptr + expert, tokens, mine)
        copies += tl.sum(mine.to(tl.int32), 0)
    return copies


@triton.jit
def copies_sent(moves_ptr, M, moves, rank, epn):
    sent = 0
    for start in range(0, moves, CHUNK):
        m = start + tl.arange(0, CHUNK)
        expert = tl.load(moves_ptr + m, m < moves, other=-1)
        sent += tl.sum(((expert >= rank * epn) & (expert < (rank + 1) * epn)).to(tl.int32), 0)
    return sent


@triton.jit
def rank_tables(
    rank,
    remaining,
    moves_ptr,
    M,
    moves,
    totals_ptr,
    first_row_ptr,
    groups_ptr,
    group_rows_ptr,
    offsets_ptr,
    statistics_ptr,
    cap,
    epn,
    E,
    slots,
    padding,
    E_PAD: tl.constexpr,
    SLOT_PAD: tl.constexpr,
):
    """Groups, padded offsets and first rows of one rank, and its part of the statistics."""
    e = tl.arange(0, E_PAD)
    own = (e // epn == rank) & (e < E)
    row_ptr = first_row_ptr + rank * E  # holds the allocation first, the first rows in the end
    tl.store(row_ptr + e, tl.load(remaining + e, own, other=0), e < E)
    tl.debug_barrier()
    copies = scatter_moves(moves_ptr, M, moves, row_ptr, rank)
    tl.debug_barrier()
    rows = tl.load(row_ptr + e, e < E, other=0)
    tl.debug_barrier()
    padded = (rows + padding - 1) // padding * padding
    # In expert order own experts follow those of lower ranks; in the shard they come first.
    end = tl.cumsum(padded, 0)
    lower = tl.sum(tl.where(e < rank * epn, padded, 0), 0)
    home = tl.sum(tl.where(own, padded, 0), 0)
    end += tl.where(own, -lower, tl.where(e < rank * epn, home, 0))
    tl.store(row_ptr + e, tl.where(rows > 0, end - padded, -1), e < E)
    groups = epn + slots
    at = rank * groups + e - rank * epn
    tl.store(groups_ptr + at, e, own)
    tl.store(group_rows_ptr + at, rows, own)
    tl.store(offsets_ptr + at, end, own)
    slot = tl.arange(0, SLOT_PAD)
    idle = (slot >= copies) & (slot < slots)
    at = rank * groups + epn + slot
    tl.store(groups_ptr + at, -1, idle)
    tl.store(group_rows_ptr + at, 0, idle)
    tl.store(offsets_ptr + at, tl.sum(padded, 0), idle)
    copied = (rows > 0) & (own == 0)
    at = rank * groups + epn + tl.cumsum(copied.to(tl.int32), 0) - 1
    tl.store(groups_ptr + at, e, copied)
    tl.store(group_rows_ptr + at, rows, copied)
    tl.store(offsets_ptr + at, end, copied)
    before = tl.sum(tl.load(totals_ptr + e, own, other=0), 0)
    after = tl.sum(rows, 0)
    tl.atomic_add(statistics_ptr, before.to(tl.int64))
    tl.atomic_max(statistics_ptr + 1, before.to(tl.int64))
    tl.atomic_max(statistics_ptr + 2, after.to(tl.int64))
    tl.atomic_add(statistics_ptr + 4, tl.sum(tl.where(own, 0, rows), 0).to(tl.int64))
    tl.atomic_add(statistics_ptr + 5, copies.to(tl.int64))
    tl.atomic_max(statistics_ptr + 6, copies_sent(moves_ptr, M, moves, rank, epn).to(tl.int64))
    tl.atomic_max(statistics_ptr + 7, copies.to(tl.int64))
    tl.atomic_max(statistics_ptr + 9, (after - cap).to(tl.int64))


@triton.jit
def expert_tables(
    first,
    plan,
    counts_ptr,
    remaining,
    moves_ptr,
    M,
    moves,
    alloc_ptr,
    local_ptr,
    source_start_ptr,
    receive_end_ptr,
    statistics_ptr,
    R,
    epn,
    E,
    R_PAD: tl.constexpr,
    E_TILE: tl.constexpr,
    TABLES: tl.constexpr,
):
    """Allocation of a block of experts over all ranks, and how its travelling tokens are split."""
    rank = tl.arange(0, R_PAD)
    e = first + tl.arange(0, E_TILE)
    inside = (rank < R)[:, None] & (e < E)[None, :]
    own = (e // epn)[None, :] == rank[:, None]
    at = plan * R * E + rank[:, None] * E + e[None, :]
    stays = tl.load(remaining + e, e < E, other=0)
    tl.store(alloc_ptr + at, tl.where(own, stays[None, :], 0), inside)
    tl.debug_barrier()
    for start in range(0, moves, CHUNK):
        m = start + tl.arange(0, CHUNK)
        expert = tl.load(moves_ptr + m, m < moves, other=-1)
        receiver = tl.load(moves_ptr + M + m, m < moves, other=0)
        tokens = tl.load(moves_ptr + 2 * M + m, m < moves, other=0)
        mine = (expert >= first) & (expert < first + E_TILE)
        tl.store(alloc_ptr + plan * R * E + receiver * E + expert, tokens, mine)
    if TABLES:
        tl.debug_barrier()
        alloc = tl.load(alloc_ptr + at, inside, other=0)
        counts = tl.load(counts_ptr + at, inside, other=0)
        local = tl.minimum(counts, alloc)
        travel = counts - local
        tl.store(local_ptr + at, local, inside)
        tl.store(source_start_ptr + at, tl.cumsum(travel, 0) - travel, inside)
        tl.store(receive_end_ptr + at, tl.cumsum(alloc - local, 0), inside)
        fan_out = tl.sum(((alloc > 0) & (own == 0)).to(tl.int32), 0)
        tl.atomic_max(statistics_ptr + 8, tl.max(fan_out, 0).to(tl.int64))


@triton.jit(do_not_specialize=["R", "epn", "slots", "padding", "M", "rank_programs"])
def tables_kernel(
    counts_ptr,
    totals_ptr,
    remaining_ptr,
    moves_ptr,
    result_ptr,
    alloc_ptr,
    local_ptr,
    source_start_ptr,
    receive_end_ptr,
    first_row_ptr,
    groups_ptr,
    group_rows_ptr,
    offsets_ptr,
    statistics_ptr,
    R,
    epn,
    slots,
    padding,
    M,
    rank_programs,
    ATTEMPTS: tl.constexpr,
    R_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    E_TILE: tl.constexpr,
    SLOT_PAD: tl.constexpr,
    TABLES: tl.constexpr,
):
    """Programs [0, rank_programs): one rank each. The others: a block of experts each. Second axis: plans."""
    program = tl.program_id(0)
    plan = tl.program_id(1).to(tl.int64)
    E = R * epn
    best, moves = winning_attempt(result_ptr + plan * ATTEMPTS * 4, ATTEMPTS)
    attempt = plan * ATTEMPTS + best
    remaining = remaining_ptr + attempt * E
    moves_ptr += attempt * 3 * M
    if program < rank_programs:
        if TABLES:
            cap = tl.load(result_ptr + 3)
            if program == 0:
                tl.store(statistics_ptr + 3, tl.load(result_ptr + 2).to(tl.int64))
            rank_tables(
                program,
                remaining,
                moves_ptr,
                M,
                moves,
                totals_ptr,
                first_row_ptr,
                groups_ptr,
                group_rows_ptr,
                offsets_ptr,
                statistics_ptr,
                cap,
                epn,
                E,
                slots,
                padding,
                E_PAD,
                SLOT_PAD,
            )
    else:
        expert_tables(
            (program - rank_programs) * E_TILE,
            plan,
            counts_ptr,
            remaining,
            moves_ptr,
            M,
            moves,
            alloc_ptr,
            local_ptr,
            source_start_ptr,
            receive_end_ptr,
            statistics_ptr,
            R,
            epn,
            E,
            R_PAD,
            E_TILE,
            TABLES,
        )
