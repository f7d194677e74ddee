"""SiTU-GLU, the activation of K3's experts (K3 report eq. 12 and appendix B)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta_gate: float = 4.0, beta_up: float = 25.0) -> torch.Tensor:
    """`beta_gate tanh(gate / beta_gate) sigmoid(gate) * beta_up tanh(up / beta_up)`, bounded by beta_gate * beta_up.

    Args:
        gate, up: same shape, any float dtype; computed in fp32 (fp64 for fp64). Differentiable once.

    Returns:
        Same shape, gate's dtype.

    Raises:
        ValueError: shapes that differ.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape; got {list(gate.shape)} and {list(up.shape)}")
    return _SituGlu.apply(gate, up, beta_gate, beta_up)


def situ_forward(gate: torch.Tensor, up: torch.Tensor, beta_gate: float, beta_up: float) -> torch.Tensor:
    """`situ_glu` without autograd."""
    dtype = accumulation_dtype(gate)
    g, u = gate.to(dtype), up.to(dtype)
    h = torch.tanh(g * (1 / beta_gate)).mul_(torch.sigmoid(g)).mul_(torch.tanh(u * (1 / beta_up)))
    return h.mul_(beta_gate * beta_up).to(gate.dtype)


def situ_backward(
    d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, beta_gate: float, beta_up: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(d_gate, d_up, h)` of `h = situ_glu(gate, up)` from the pre-activations; h comes free and backward needs it."""
    dtype = accumulation_dtype(gate)
    g, u, d = gate.to(dtype), up.to(dtype), d_out.to(dtype)
    tanh_g, tanh_u, sigma = torch.tanh(g * (1 / beta_gate)), torch.tanh(u * (1 / beta_up)), torch.sigmoid(g)
    bounded_gate = beta_gate * tanh_g * sigma
    # d/dg [b tanh(g/b) s(g)] = s (1 - tanh^2) + b tanh s (1 - s)
    slope = sigma * (1 - tanh_g * tanh_g) + bounded_gate * (1 - sigma)
    d_gate = d * slope * tanh_u * beta_up
    d_up = d * bounded_gate * (1 - tanh_u * tanh_u)
    h = bounded_gate * tanh_u * beta_up
    return d_gate.to(gate.dtype), d_up.to(up.dtype), h.to(gate.dtype)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, beta_gate, beta_up):
        ctx.save_for_backward(gate, up)
        ctx.betas = (beta_gate, beta_up)
        return situ_forward(gate, up, beta_gate, beta_up)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        d_gate, d_up, _ = situ_backward(d_out, *ctx.saved_tensors, *ctx.betas)
        return d_gate, d_up, None, None
