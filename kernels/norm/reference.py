"""Normalisations over the last dimension: L2, RMS, and RMS with a sigmoid gate.

Each is one autograd function with its backward written out: recorded op by op, backward costs several
times as much on a CPU. Statistics and products are in fp32 (fp64 for fp64), results in x's dtype.
Differentiable once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum x^2 + eps)` over the last dimension. x: [..., D], any strides."""
    return _L2Norm.apply(x, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean x^2 + eps) * weight` over the last dimension. x: [..., D], weight: [D].

    Raises:
        ValueError: a weight of another length.
    """
    _check_weight(x, weight)
    return _GatedRmsNorm.apply(x, None, weight, eps)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`sigmoid(gate) * rms_norm(x, weight, eps)`: the output gate of Kimi Linear. gate: logits of x's shape.

    Raises:
        ValueError: a weight of another length, or a gate of another shape.
    """
    _check_weight(x, weight)
    if gate.shape != x.shape:
        raise ValueError(f"gate must have x's shape {list(x.shape)}; got {list(gate.shape)}")
    return _GatedRmsNorm.apply(x, gate, weight, eps)


def naive_l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`l2_norm` in plain words."""
    wide = x.to(accumulation_dtype(x))
    return (wide / torch.sqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def naive_gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`gated_rms_norm` (or `rms_norm` without a gate) in plain words."""
    wide = x.to(accumulation_dtype(x))
    y = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if gate is None else torch.sigmoid(gate.to(wide.dtype)) * y).to(x.dtype)


def _check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    if tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(f"weight must be [D={x.shape[-1]}]; got {list(weight.shape)}")


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, eps):
        wide = x.to(accumulation_dtype(x))
        inverse = (wide * wide).sum(-1, keepdim=True).add_(eps).rsqrt_()
        y = wide * inverse
        ctx.save_for_backward(y, inverse)
        ctx.dtype = x.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y):
        y, inverse = ctx.saved_tensors
        d_y = d_y.to(y.dtype)
        along = (d_y * y).sum(-1, keepdim=True)
        return torch.addcmul(d_y, y, along, value=-1).mul_(inverse).to(ctx.dtype), None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, gate, weight, eps):
        wide = x.to(accumulation_dtype(x))
        inverse = (wide * wide).sum(-1, keepdim=True).div_(x.shape[-1]).add_(eps).rsqrt_()
        opened = None if gate is None else torch.sigmoid(gate.to(wide.dtype))
        y = (wide * inverse).mul_(weight.to(wide.dtype))
        y = y if opened is None else y.mul_(opened)
        ctx.save_for_backward(x, inverse, opened, weight)
        ctx.gate_dtype = None if gate is None else gate.dtype
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y):
        x, inverse, opened, weight = ctx.saved_tensors
        normed = x.to(inverse.dtype) * inverse
        d_y = d_y.to(inverse.dtype)
        d_gate = None
        if opened is not None:
            d_gate = (d_y * normed).mul_(weight.to(normed.dtype)).mul_(opened).mul_(1 - opened)
            d_gate = d_gate.to(ctx.gate_dtype)
            d_y = d_y * opened
        d_weight = (d_y * normed).flatten(0, -2).sum(0).to(weight.dtype) if x.dim() > 1 else d_y * normed
        d_normed = d_y * weight.to(normed.dtype)
        along = (d_normed * normed).sum(-1, keepdim=True).div_(x.shape[-1])
        d_x = d_normed.addcmul_(normed, along, value=-1).mul_(inverse)
        return d_x.to(x.dtype), d_gate, d_weight, None
