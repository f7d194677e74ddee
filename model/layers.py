"""The small modules every part uses: linear maps without bias, RMSNorm, the SiTU-gated FFN.

Shapes: D hidden size, F FFN width.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.moe import situ_glu
from kernels.norm import rms_norm
from model.config import K3Config


class Linear(nn.Linear):
    """A linear map without bias, drawn from N(0, gain^2 / fan_in)."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0):
        self.gain = gain
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class GatedFFN(nn.Module):
    """down(situ(gate x) * cap(up x)), K3 report eq. 12; the dense layer and the shared experts. [.., D] ->
    [.., D]
    """

    def __init__(self, config: K3Config, ffn_size: int):
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * ffn_size)  # gate rows first
        self.down_proj = Linear(ffn_size, config.hidden_size, config.output_gain)
        self.beta_gate, self.beta_up = config.situ_beta_gate, config.situ_beta_up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(situ_glu(gate, up, self.beta_gate, self.beta_up))


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()
