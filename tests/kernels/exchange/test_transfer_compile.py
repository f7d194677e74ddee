"""What the compiler makes of the exchange kernels for Hopper: 16-byte accesses, no spills, room for many
programs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.compile_check import CompileCase, CompileReport, compile_reports

K3 = {"H": 3584, "K": 16}
WIDE_ROWS = {"H": 7168, "K": 8}


def signature(kernel: str, pointers: dict[str, str], integers: str) -> tuple[str, dict[str, str]]:
    types = {"addresses": "*i64"} | {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()}
    sizes = {name: "i64" if name == "max_polls" else "i32" for name in integers.split()}
    return f"kernels.exchange.{kernel}", types | sizes


def push(H: int, K: int) -> CompileCase:
    pointers = {"x": "i32", "targets": "i64", "weights": "fp32", "offsets": "i32", "group_rows": "i32"}
    kernel, types = signature("dispatch:push_kernel", pointers, "s NvS R first_rank groups J")
    block = 1 << (H // 2 - 1).bit_length()
    constants = {
        "K": K,
        "K_PAD": K,
        "WORDS": H // 2,
        "BLOCK": block,
        "LANES": 1,
        "WEIGHTED": True,
        "RECORDS": True,
    }
    constants |= {"WIDE": False, "CONTROLLED": True}
    return CompileCase(kernel, types, constants, num_warps=block // 1024)


def replicate(H: int, K: int) -> CompileCase:
    kernel, types = signature("dispatch:replicate_kernel", {"offsets": "i32"}, "R first_rank groups")
    block = 1 << (H // 2 - 1).bit_length()
    return CompileCase(
        kernel, types, {"K": K, "WORDS": H // 2, "BLOCK": block, "CONTROLLED": True}, num_warps=block // 1024
    )


def presum(H: int, K: int) -> CompileCase:
    kernel, types = signature("combine:presum_kernel", {"offsets": "i32"}, "R first_rank groups")
    return CompileCase(kernel, types, {"K": K, "H": H, "UNROLL": 4} | sums())


def final_sum(H: int, K: int) -> CompileCase:
    pointers = {"sources": "i64", "entries": "i32", "counts": "i32", "weights": "fp32", "out": "bf16"}
    kernel, types = signature("combine:final_sum_kernel", pointers, "s R first_rank")
    return CompileCase(kernel, types, {"K": K, "H": H, "UNROLL": 8} | sums())


def sums() -> dict[str, object]:
    types = {"ROW": "tl.bfloat16", "SUM": "tl.float32", "PARTIAL": "tl.bfloat16"}
    return {"BLOCK": 1024, "WEIGHTED": True, "CONTROLLED": True} | types


def copies(kernel: str, size: str, constants: dict) -> CompileCase:
    pointers = {"home": "i64", "pool": "i64"} | dict.fromkeys(
        ("holders", "counts", "copied", "num_copied"), "i32"
    )
    name, types = signature(f"copies:{kernel}", pointers, f"R epn slots first_rank {size} programs")
    return CompileCase(name, types, {"PARTS": 3, "TABLE": True, "CONTROLLED": True} | constants)


CASES = {
    "push, K3": push(**K3),
    "push, wide rows": push(**WIDE_ROWS),
    "replicate, K3": replicate(**K3),
    "replicate, wide rows": replicate(**WIDE_ROWS),
    "presum, K3": presum(**K3),
    "presum, wide rows": presum(**WIDE_ROWS),
    "final sum, K3": final_sum(**K3),
    "final sum, wide rows": final_sum(**WIDE_ROWS),
    "push copies": copies("push_copies_kernel", "words", {"BLOCK": 4096}),
    "return gradients": copies(
        "return_gradients_kernel",
        "octets",
        {"BLOCK": 4096, "HOME": "tl.float32", "SLOT": "tl.float32", "SUM": "tl.float32"},
    ),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, CompileReport]:
    return dict(zip(CASES, compile_reports(list(CASES.values())), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_no_spills_and_sixteen_bytes_a_thread(reports, name):
    report = reports[name]
    assert report.stack == 0 and report.spill == 0, report
    assert report.registers <= 96, report
    assert report.stores[16] >= 1, report
    assert report.loads[16] >= 4, report


def small_cases() -> list[CompileCase]:
    """Kernels whose speed is that of their launch: they must compile and stay in registers."""
    constants = {"WIDE": False, "CONTROLLED": True, "SCALAR": "tl.float32", "BLOCK": 256}
    tables = {"targets": "i64", "offsets": "i32", "group_rows": "i32"}
    scatter = signature(
        "dispatch:scatter_weights_kernel",
        {"weights": "fp32"} | tables,
        "entries NvS R first_rank groups blocks",
    )
    gather = signature(
        "combine:gather_weights_kernel", {"targets": "i64", "out": "fp32"}, "entries NvS R first_rank"
    )
    lists = {"targets": "i64", "sources": "i64", "entries": "i32", "counts": "i32"}
    sources = signature("combine:sources_kernel", lists, "s NvS R first_rank J")
    sizes = {"K": 16, "K_PAD": 16, "ROW_BYTES": 7168, "PARTIAL_BYTES": 7168}
    barrier = signature(
        "barrier:barrier_kernel", {"epochs": "i64", "status": "i64"}, "R first_rank phase max_polls"
    )
    return [
        CompileCase(*scatter, constants | {"PADDING": 8}),
        CompileCase(*gather, constants),
        CompileCase(*sources, sizes | {"WIDE": False, "CONTROLLED": True}, num_warps=1),
        CompileCase(*barrier, {"R_PAD": 8, "ARRIVE": True, "WAIT": True}, num_warps=1),
    ]


def variants() -> list[CompileCase]:
    """What the runtime launches besides: unweighted sums, fp32 partial sums, fp64, one tensor."""
    double = {"ROW": "tl.float64", "SUM": "tl.float64", "PARTIAL": "tl.float64", "BLOCK": 256}
    sum_rows, add_up = presum(**K3), final_sum(**K3)
    plain = {k: v for k, v in add_up.signature.items() if k != "weights_ptr"}
    cases = [
        CompileCase(sum_rows.kernel, sum_rows.signature, sum_rows.constants | change)
        for change in ({"WEIGHTED": False}, {"PARTIAL": "tl.float32"}, double)
    ]
    cases += [
        CompileCase(add_up.kernel, plain, add_up.constants | {"WEIGHTED": False, "weights_ptr": None}),
        CompileCase(add_up.kernel, add_up.signature, add_up.constants | {"PARTIAL": "tl.float32"}),
        CompileCase(add_up.kernel, add_up.signature | {"out_ptr": "*fp64"}, add_up.constants | double),
    ]
    one = {"PARTS": 1, "TABLE": False}
    for name in ("push copies", "return gradients"):
        base = CASES[name]
        cases.append(CompileCase(base.kernel, base.signature | {"home_ptr": "*fp32"}, base.constants | one))
    return cases


def test_variants_do_not_spill():
    for report in compile_reports(variants()):
        assert report.stack == 0 and report.spill == 0, report
        assert max(report.stores) == 16 and max(report.loads) == 16, report


def test_small_kernels_stay_in_registers():
    for report in compile_reports(small_cases()):
        assert report.stack == 0 and report.spill == 0 and report.registers <= 128, report
