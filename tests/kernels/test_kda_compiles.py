"""What the Hopper compiler makes of the KDA kernels at K = V = 128, looked at without a GPU.

Spills were what cost most on the GPU (docs/results/kda.md), so their size is held: a change that raises it
must say so.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from kernels.compile_check import CompileCase, compile_reports

FP16_TILE, SQUARE_TILE = "tensordesc<fp16[64,128]>", "tensordesc<fp16[64,64]>"
TILES = {
    "q_decayed_tiles": FP16_TILE,
    "k_decayed_tiles": FP16_TILE,
    "k_remaining_tiles": FP16_TILE,
    "n_tiles": SQUARE_TILE,
    "p_tiles": SQUARE_TILE,
}
SCAN = {"decay_ptr": "*fp32", "beta_ptr": "*fp32", "row_scale_ptr": "*fp32", "cu_seqlens_ptr": "*i64"}
SCAN |= {"scale": "fp32", "T": "i32"}
COMMON = {"HV": 96, "K": 128, "V": 128, "KP": 128, "V_FIRST": False, "VARLEN": False}


def strides(*names: str) -> dict[str, str]:
    return {f"{name}_stride_{axis}": "i32" for name in names for axis in "bth"}


def scan_case() -> CompileCase:
    pointers = {"v_ptr": "*bf16", "o_ptr": "*bf16", "z_ptr": "*bf16", "h_ptr": "*bf16"}
    states = {"initial_state_ptr": "*fp32", "final_state_ptr": "*fp32"}
    flags = {"HAS_INITIAL": True, "HAS_FINAL": True, "SAVE": False, "OUTPUT": True, "SCALED": False}
    return CompileCase(
        "kernels.kda.scan:kda_scan_kernel",
        {**TILES, **SCAN, **pointers, **states, **strides("v")},
        {**COMMON, **flags, "BV": 128, "STAGES": 2},
        num_warps=8,
        num_stages=2,
        divisible=tuple(strides("v")),
    )


def reverse_scan_case() -> CompileCase:
    pointers = {"do_ptr": "*bf16", "x_ptr": "*bf16", "dh_ptr": "*bf16"}
    states = {"d_final_state_ptr": "*fp32", "d_initial_state_ptr": "*fp32"}
    flags = {"HAS_INITIAL": True, "HAS_FINAL": True, "SCALED": False}
    return CompileCase(
        "kernels.kda.reverse_scan:kda_reverse_scan_kernel",
        {**TILES, **SCAN, **pointers, **states, **strides("do")},
        {**COMMON, **flags, "BV": 64, "STAGES": 1},
        num_stages=1,
        divisible=tuple(strides("do")),
    )


def prepare_case() -> CompileCase:
    inputs = dict.fromkeys(("q_ptr", "k_ptr", "g_ptr", "beta_ptr"), "*bf16")
    parameters = {
        "A_log_ptr": "*fp32",
        "dt_bias_ptr": "*fp32",
        "sum_masks_ptr": "*fp16",
        "cu_seqlens_ptr": "*i64",
    }
    outputs = {f"{name}_ptr": "*fp16" for name in ("q_decayed", "k_decayed", "k_remaining", "n", "p")}
    outputs |= {"decay_ptr": "*fp32", "beta_out_ptr": "*fp32", "row_scale_ptr": "*fp32"}
    scalars = {"lower_bound": "fp32", "T": "i32", "num_sequences": "i32"}
    flags = {"GATE": 1, "HAS_A": True, "HAS_BIAS": True, "BETA": 1, "L2NORM": True, "VARLEN": False}
    return CompileCase(
        "kernels.kda.prepare:kda_prepare_kernel",
        {**inputs, **parameters, **outputs, **scalars, **strides("q", "k", "g", "beta")},
        {"HV": 96, "GROUP": 1, "K": 128, "KP": 128, "D": 32, **flags},
        num_stages=1,
        divisible=tuple(strides("q", "k", "g")),
    )


@pytest.mark.slow
def test_kernels_use_wgmma_wide_accesses_and_hold_their_spills():
    limits = {
        "kda_scan_kernel": 64,
        "kda_reverse_scan_kernel": 400,
        "kda_prepare_kernel": 480,
    }  # bytes of a thread
    for report in compile_reports([scan_case(), reverse_scan_case(), prepare_case()]):
        name = report.kernel.split(":")[1]
        assert report.hgmma > 0, name
        assert 16 in report.stores, (name, report.stores)
        assert report.stack <= limits[name], (name, report.stack)
        assert report.shared <= 227 * 1024, name
