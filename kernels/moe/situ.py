"""SiTU-GLU, the activation of K3's experts (K3 report eq. 12 and appendix B)."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Factors(NamedTuple):
    """What backward needs of a SiTU-GLU, in the accumulation dtype: no tanh or sigmoid is taken twice.

    Attributes:
        tanh_gate: tanh(gate / beta_gate).
        sigma: sigmoid(gate).
        tanh_up: tanh(up / beta_up).
    """

    tanh_gate: torch.Tensor
    sigma: torch.Tensor
    tanh_up: torch.Tensor


def situ_factors(gate: torch.Tensor, up: torch.Tensor, beta_gate: float, beta_up: float) -> Factors:
    """The factors of `situ_glu(gate, up)`.

    tanh costs a CPU three times a sigmoid. For the gate, 2 sigmoid(2x) - 1 is as good: its error of 1e-7
    stays an error of beta_gate * 1e-7. Times beta_up it would not, so the up side keeps the real one.
    """
    dtype = accumulation_dtype(gate)
    g, u = gate.to(dtype), up.to(dtype)
    tanh_gate = (g * (2 / beta_gate)).sigmoid_().mul_(2).sub_(1)
    return Factors(tanh_gate, torch.sigmoid(g), (u * (1 / beta_up)).tanh_())


def situ_forward(factors: Factors, beta_gate: float, beta_up: float) -> torch.Tensor:
    """h, in the factors' dtype."""
    return (factors.tanh_gate * factors.sigma).mul_(factors.tanh_up).mul_(beta_gate * beta_up)


def situ_backward(
    d_h: torch.Tensor, factors: Factors, beta_gate: float, beta_up: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(d_gate, d_up, h)`, in the factors' dtype."""
    tanh_gate, sigma, tanh_up = factors
    d = d_h.to(sigma.dtype)
    bounded_gate, bounded_up = (tanh_gate * sigma).mul_(beta_gate), tanh_up * beta_up
    # d/dg [b tanh(g/b) s] = s - (b tanh s) (tanh / b + s) + b tanh s, with s = sigmoid(g)
    slope = torch.add(sigma, tanh_gate, alpha=1 / beta_gate).neg_().add_(1).mul_(bounded_gate).add_(sigma)
    d_gate = slope.mul_(bounded_up).mul_(d)
    d_up = torch.mul(tanh_up, tanh_up).neg_().add_(1).mul_(bounded_gate).mul_(d)
    return d_gate, d_up, bounded_gate.mul_(bounded_up)


class _SituGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate, up, beta_gate, beta_up):
        factors = situ_factors(gate, up, beta_gate, beta_up)
        ctx.save_for_backward(*factors)
        ctx.betas, ctx.dtypes = (beta_gate, beta_up), (gate.dtype, up.dtype)
        return situ_forward(factors, beta_gate, beta_up).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out):
        d_gate, d_up, _ = situ_backward(d_out, Factors(*ctx.saved_tensors), *ctx.betas)
        return d_gate.to(ctx.dtypes[0]), d_up.to(ctx.dtypes[1]), None, None
