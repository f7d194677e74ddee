"""What the compiler makes of the device planner for Hopper: no spills, almost no barriers in the solver."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.compile_check import CompileCase, compile_reports


def ints(*names: str, kind: str = "*i32") -> dict[str, str]:
    return dict.fromkeys(names, kind)


def solve(rule: int, ranks: int, experts: int) -> CompileCase:
    pointers = ints("totals_ptr", "remaining_ptr", "moves_ptr", "scratch_ptr", "result_ptr")
    sizes = ints("R", "epn", "slots", "tau", "M", "attempts", kind="i32")
    constants = {"RULE": rule, "R_PAD": ranks, "EPN_PAD": experts, "R_ROWS": 8, "TILE": 128}
    return CompileCase("kernels.exchange.plan_solve:solve_kernel", pointers | sizes, constants, num_warps=1)


def destinations(top_k: int) -> CompileCase:
    tables = ("nth_ptr", "prefix_ptr", "local_ptr", "source_start_ptr", "receive_end_ptr", "first_row_ptr")
    signature = ints("ids_ptr", *tables) | {"destinations_ptr": "*i64"}
    signature |= ints("s", "K", "E", "R", "rank", "shard_rows", kind="i32")
    constants = {"BLOCK": 256 // top_k, "TOKENS": 256 // top_k, "K_PAD": top_k, "STEPS": 7}
    return CompileCase("kernels.exchange.plan_sort:destinations_kernel", signature, constants)


def count(top_k: int) -> CompileCase:
    signature = ints("ids_ptr", "nth_ptr", "counts_ptr") | ints("s", "K", "E", kind="i32")
    constants = {"ENTRIES": 256, "K_PAD": top_k, "E_PAD": 1024}
    return CompileCase("kernels.exchange.plan_sort:count_kernel", signature, constants, num_warps=8)


def test_the_solver_stays_in_registers_of_one_warp():
    """K3 at R = 8 (epn = 112) and R = 64: per step a few reductions, no shared memory worth the name."""
    reports = compile_reports([solve(2, 32, 128), solve(2, 64, 32), solve(1, 64, 32)])
    for report in reports:
        assert report.stack == 0 and report.spill == 0, report
        assert report.barriers <= 6 and report.instructions < 3000, report


def test_the_sort_does_not_spill():
    for report in compile_reports([destinations(16), count(16)]):
        assert report.stack == 0 and report.spill == 0 and report.registers <= 128, report
