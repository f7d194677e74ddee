"""The compile check tells wgmma from mma, a spill from none, and names a wrong argument."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.compile_check import CompileCase, compile_reports

SAMPLES = "tests.kernels.sample_kernels"


def test_reports_products_widths_and_spills():
    matrices = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    dot = CompileCase(f"{SAMPLES}:dot_kernel", matrices, {"N": 64, "PRECISION": "ieee"})
    small = CompileCase(f"{SAMPLES}:dot_kernel", matrices, {"N": 16, "PRECISION": "ieee"}, num_warps=1)
    spills = CompileCase(
        f"{SAMPLES}:spilling_kernel", {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {"N": 128}, num_warps=1
    )
    wgmma, mma, spilling = compile_reports([dot, small, spills])
    assert wgmma.hgmma > 0 and wgmma.hmma == 0 and wgmma.spill == 0 and wgmma.stack == 0
    assert set(wgmma.loads) == {16} and max(wgmma.stores) >= 8 and wgmma.shared > 0
    assert mma.hgmma == 0 and mma.hmma > 0
    assert spilling.spill > 0 and spilling.stack > 0


def test_names_missing_and_unknown_arguments():
    with pytest.raises(RuntimeError, match=r"without type or value \['out_ptr'\], unknown arguments \['y'\]"):
        compile_reports([CompileCase(f"{SAMPLES}:square_kernel", {"x_ptr": "*i32", "y": "i32"})])
