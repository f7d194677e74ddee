"""Attention Residuals, naive and in two phases."""

from kernels.attention_residuals.reference import (
    Partial,
    attention_residual,
    block_phase_one,
    merge_partial,
    naive_attention_residual,
)

__all__ = ["Partial", "attention_residual", "block_phase_one", "merge_partial", "naive_attention_residual"]
