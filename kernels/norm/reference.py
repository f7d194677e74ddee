"""Normalisations over the last dimension: L2, RMS, and RMS with a sigmoid gate."""

from __future__ import annotations

import torch

from kernels.precision import accumulation_dtype


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum x^2 + eps)` over the last dimension, computed in fp32 (fp64), returned in x's dtype."""
    wide = x.to(accumulation_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean x^2 + eps) * weight` over the last dimension; `weight` is [D]; in fp32 (fp64), x's dtype out."""
    wide = x.to(accumulation_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`sigmoid(gate) * rms_norm(x, weight)`, in fp32 (fp64), x's dtype out (Kimi Linear's output gate)."""
    wide = x.to(accumulation_dtype(x))
    normed = rms_norm(wide, weight, eps)
    return (torch.sigmoid(gate.to(wide.dtype)) * normed).to(x.dtype)
