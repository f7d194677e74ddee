"""The planner on the device: no host read, every shape known beforehand, the same bits as the CPU planner.

Order of a layer: `sort_entries` (needs only this rank's ids; its histogram is what ranks exchange), then
`plan_tables` on the gathered counts, then `destinations`. Six small launches in all; capturable in a CUDA
graph once compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

STATIC, MOONEP, BOUNDED = 0, 1, 2  # rules, numbered as in moonep/planning/solvers.py
ATTEMPTS = {STATIC: 1, MOONEP: 1, BOUNDED: 5}
ENTRIES = 256  # routed entries a program of the sort compares with each other
PLACED = 256  # routed entries a program gives destinations
MAX_RANKS = 1024
STATISTICS = 10


@dataclass(frozen=True)
class SortedEntries:
    """A rank's routed entries in order, all int32 (ids as given).

    nth [s, K]: equal ids before an entry in its block. counts [blocks, E]: entries of an expert before each
    block. histogram [E]: this rank's counts.
    """

    ids: torch.Tensor
    nth: torch.Tensor
    counts: torch.Tensor
    histogram: torch.Tensor


@dataclass(frozen=True)
class PlanTables:
    """The plan as tensors on the device, int32 unless said; the meaning is that of moonep.planning.Layout.

    alloc, local, source_start, receive_end, first_row [R, E]; groups, group_rows, offsets [R, epn + slots];
    statistics [10] int64 in the order of moonep.planning.PlanStatistics.
    """

    alloc: torch.Tensor
    local: torch.Tensor
    source_start: torch.Tensor
    receive_end: torch.Tensor
    first_row: torch.Tensor
    groups: torch.Tensor
    group_rows: torch.Tensor
    offsets: torch.Tensor
    statistics: torch.Tensor


def _power_of_two(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


def solve_allocation(
    counts: torch.Tensor, *, rule: int, tau_thousandths: int = 1000, slots: int = 0
) -> torch.Tensor:
    """`counts [N, R, E]` int32 -> `alloc [N, R, E]` int32, by the rules of moonep/planning/solvers.py.

    Raises `ValueError` for more than 1024 ranks. Counts must be non-negative and sum to less than 2^31 a
    plan (not checked: that would read the device).
    """
    return _solve(counts, rule, tau_thousandths, slots, 1, tables=False).alloc


def plan_tables(
    counts: torch.Tensor, *, rule: int, tau_thousandths: int, slots: int, token_padding: int
) -> PlanTables:
    """Solves one plan, `counts [R, E]` int32, and lays out every rank's shard. Arguments as in
    `solve_allocation`.
    """
    return _solve(counts[None], rule, tau_thousandths, slots, token_padding, tables=True)


def _solve(
    counts: torch.Tensor, rule: int, tau: int, slots: int, token_padding: int, *, tables: bool
) -> PlanTables:
    import triton

    from kernels.exchange.plan_solve import solve_kernel
    from kernels.exchange.plan_tables import tables_kernel, totals_kernel

    batch, R, E = counts.shape
    if R > MAX_RANKS:
        raise ValueError(f"the device planner takes at most {MAX_RANKS} ranks, got {R}; plan on the CPU")
    counts = counts.to(torch.int32).contiguous()
    epn, attempts, M = E // R, ATTEMPTS[rule], R * slots + E + R
    # One warp reduces with redux when every lane has a value of its own, so vectors have at least 32.
    R_PAD, EPN_PAD = _power_of_two(R, 32), _power_of_two(epn, 32)

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=counts.device)

    totals, remaining, moves = ints(batch, E), ints(batch, attempts, E), ints(batch, attempts, 3, M)
    result, scratch = ints(batch, attempts, 4), ints(batch, attempts, R)
    statistics = torch.empty(STATISTICS, dtype=torch.int64, device=counts.device)
    totals_kernel[(triton.cdiv(E, 64), batch)](
        counts, totals, statistics, R, E, STATISTICS, R_TILE=min(R_PAD, 64), E_TILE=64
    )
    solve_kernel[(attempts, batch)](
        totals,
        remaining,
        moves,
        scratch,
        result,
        R,
        epn,
        slots,
        tau,
        M,
        attempts,
        RULE=rule,
        R_PAD=R_PAD,
        EPN_PAD=EPN_PAD,
        R_ROWS=_power_of_two(R),
        TILE=min(_power_of_two(epn), max(1, 1024 // _power_of_two(R))),
        num_warps=1,
    )
    shape, groups = ((R, E), (R, epn + slots)) if tables else ((1,), (1,))
    plan = PlanTables(
        alloc=ints(R, E) if tables else ints(batch, R, E),
        local=ints(*shape),
        source_start=ints(*shape),
        receive_end=ints(*shape),
        first_row=ints(*shape),
        groups=ints(*groups),
        group_rows=ints(*groups),
        offsets=ints(*groups),
        statistics=statistics,
    )
    rank_programs = R if tables else 0
    E_TILE = max(4, min(64, 1024 // _power_of_two(R)))
    tables_kernel[(rank_programs + triton.cdiv(E, E_TILE), batch)](
        counts,
        totals,
        remaining,
        moves,
        result,
        plan.alloc,
        plan.local,
        plan.source_start,
        plan.receive_end,
        plan.first_row,
        plan.groups,
        plan.group_rows,
        plan.offsets,
        plan.statistics,
        R,
        epn,
        slots,
        token_padding,
        M,
        rank_programs,
        ATTEMPTS=attempts,
        R_PAD=_power_of_two(R),
        E_PAD=_power_of_two(E),
        E_TILE=E_TILE,
        SLOT_PAD=_power_of_two(max(slots, 1)),
        TABLES=tables,
    )
    return plan


def sort_entries(ids_sK: torch.Tensor, num_experts: int) -> SortedEntries:
    """Orders the entries of `ids_sK [s, K]` (int32 or int64, in [0, E)) inside each expert."""
    import triton

    from kernels.exchange.plan_sort import count_kernel, prefix_kernel

    s, K = ids_sK.shape
    K_PAD = _power_of_two(K)
    if K_PAD > ENTRIES:
        raise ValueError(f"top_k={K} exceeds {ENTRIES}")
    blocks = -(-s // (ENTRIES // K_PAD))
    ids_sK = ids_sK.contiguous()
    nth = torch.empty(s, K, dtype=torch.int32, device=ids_sK.device)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids_sK.device)
    histogram = torch.empty(num_experts, dtype=torch.int32, device=ids_sK.device)
    if blocks:
        count_kernel[(blocks,)](
            ids_sK, nth, counts, s, K, num_experts, ENTRIES, K_PAD, _power_of_two(num_experts), num_warps=8
        )
    prefix_kernel[(triton.cdiv(num_experts, 8),)](
        counts, histogram, blocks, num_experts, B_TILE=min(256, _power_of_two(max(blocks, 1), 16)), E_TILE=8
    )
    return SortedEntries(ids_sK, nth, counts, histogram)


def destinations(entries: SortedEntries, plan: PlanTables, *, rank: int, shard_rows: int) -> torch.Tensor:
    """`[s, K]` int64 destinations of source rank `rank`, as moonep.planning.destinations."""
    from kernels.exchange.plan_sort import destinations_kernel

    s, K = entries.ids.shape
    R, E = plan.alloc.shape
    K_PAD = _power_of_two(K)
    tokens = max(1, PLACED // K_PAD)
    target = torch.empty(s, K, dtype=torch.int64, device=entries.ids.device)
    if s:
        destinations_kernel[(-(-s // tokens),)](
            entries.ids,
            entries.nth,
            entries.counts,
            plan.local,
            plan.source_start,
            plan.receive_end,
            plan.first_row,
            target,
            s,
            K,
            E,
            R,
            rank,
            shard_rows,
            BLOCK=ENTRIES // K_PAD,
            TOKENS=tokens,
            K_PAD=K_PAD,
            STEPS=R.bit_length(),
        )
    return target
