"""SiTU-GLU, the activation of K3's experts (K3 report eq. 12 and appendix B)."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype


def situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta_gate: float = 4.0, beta_up: float = 25.0
) -> torch.Tensor:
    """`beta_gate tanh(gate / beta_gate) sigmoid(gate) * beta_up tanh(up / beta_up)`; below beta_gate *
    beta_up.

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
    tanh_g, sigma, tanh_u = _factors(gate.to(dtype), up.to(dtype), beta_gate, beta_up)
    return tanh_g.mul_(sigma).mul_(tanh_u).mul_(beta_gate * beta_up).to(gate.dtype)


def situ_backward(
    d_out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, beta_gate: float, beta_up: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(d_gate, d_up, h)` of `h = situ_glu(gate, up)`, from the pre-activations."""
    dtype = accumulation_dtype(gate)
    d = d_out.to(dtype)
    tanh_g, sigma, tanh_u = _factors(gate.to(dtype), up.to(dtype), beta_gate, beta_up)
    bounded_gate, bounded_up = (tanh_g * sigma).mul_(beta_gate), tanh_u * beta_up
    # d/dg [b tanh(g/b) s] = s - (b tanh s) (tanh / b + s) + b tanh s, with s = sigmoid(g)
    slope = tanh_g.mul_(1 / beta_gate).add_(sigma).mul_(bounded_gate).neg_().add_(bounded_gate).add_(sigma)
    d_gate = slope.mul_(bounded_up).mul_(d)
    d_up = (1 - tanh_u.square_()).mul_(bounded_gate).mul_(d)
    return d_gate.to(gate.dtype), d_up.to(up.dtype), bounded_gate.mul_(bounded_up).to(gate.dtype)


def _factors(g: torch.Tensor, u: torch.Tensor, beta_gate: float, beta_up: float) -> list[torch.Tensor]:
    """New tensors tanh(g / beta_gate), sigmoid(g), tanh(u / beta_up).

    tanh costs a CPU three times a sigmoid. For the gate, 2 sigmoid(2x) - 1 is as good: its error of 1e-7
    stays an error of beta_gate * 1e-7 in h. Times beta_up it would not, so the up side keeps the real one.
    """
    tanh_g = (g * (2 / beta_gate)).sigmoid_().mul_(2).sub_(1)
    return [tanh_g, torch.sigmoid(g), (u * (1 / beta_up)).tanh_()]


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
