"""Kimi Delta Attention, the linear-attention token mixer (K3 report section 2.1.1; Kimi Linear).

Shapes: B batch, T time, D hidden size, H heads, K head_dim of keys and values, C = H*K channels, W conv
kernel, N sequences (B, or the documents of a packed row).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kernels.conv import short_convolution
from kernels.kda import chunk_kda, fused_recurrent_kda
from kernels.norm import gated_rms_norm
from model.config import K3Config
from model.layers import Linear, at_least_fp32


@dataclass
class KDACache:
    """What KDA carries from token to token: the last W-1 inputs of the convolution and the recurrent
    state.
    """

    conv: torch.Tensor | None = None  # [N, 3C, W-1]
    state: torch.Tensor | None = None  # [N, H, K, K], fp32 or wider


class KimiDeltaAttention(nn.Module):
    """y = W_o [ sigmoid(W_g x) * RMSNorm_head(KDA(q, k, v, decay, beta)) ].

    q, k, v pass a causal depthwise convolution and SiLU; q and k are L2-normalised per head; the log decay
    of a token and key channel is lower_bound * sigmoid(exp(A_h) (W_up W_down x + dt_bias)); beta =
    sigmoid(W_beta x).
    """

    def __init__(self, config: K3Config):
        super().__init__()
        d, channels = config.hidden_size, config.kda_size
        self.num_heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.lower_bound, self.eps = config.gate_lower_bound, config.rms_norm_eps
        self.qkv_proj = Linear(d, 3 * channels)  # rows: q heads, k heads, v heads
        self.conv_weight = nn.Parameter(torch.empty(3 * channels, config.conv_kernel_size))
        self.decay_down_proj = Linear(d, self.head_dim)
        self.decay_up_proj = Linear(self.head_dim, channels)
        self.dt_bias = nn.Parameter(torch.empty(channels))
        self.A_log = nn.Parameter(torch.empty(config.padded_kda_heads))  # entries past the heads are unread
        self.beta_proj = Linear(d, self.num_heads)
        self.gate_proj = Linear(d, channels)
        self.out_norm_weight = nn.Parameter(torch.ones(self.head_dim))
        self.out_proj = Linear(channels, d, config.output_gain)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A = 1 and softplus(dt_bias) log-uniform in [1e-3, 1e-1]: decays of 0.62 to 0.995 a token at first.

        The scheme is Mamba2's and Gated DeltaNet's; the bounds are the flash-linear-attention library's.
        """
        nn.init.zeros_(self.A_log)
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp_().clamp_(min=1e-4)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        bound = self.conv_weight.shape[1] ** -0.5
        nn.init.uniform_(self.conv_weight, -bound, bound)

    def make_cache(self, batch: int, max_length: int, like: torch.Tensor) -> KDACache:
        """An empty cache: no tokens seen. Its size does not depend on `max_length`."""
        return KDACache()

    def forward(
        self, x_BTD: torch.Tensor, cu_seqlens: torch.Tensor | None = None, cache: KDACache | None = None
    ) -> torch.Tensor:
        """Mix tokens causally.

        Args:
            x_BTD: normed input.
            cu_seqlens: [N+1] end offsets of packed documents, with B = 1; each starts from an empty state.
            cache: continues from it and updates it in place.
        """
        B, T, _ = x_BTD.shape
        keep = cache is not None
        qkv, conv = short_convolution(
            self.qkv_proj(x_BTD),
            self.conv_weight,
            activation="silu",
            cu_seqlens=cu_seqlens,
            initial_state=cache.conv if cache else None,
            output_final_state=keep,
        )
        q, k, v = qkv.view(B, T, 3, self.num_heads, self.head_dim).unbind(2)
        arguments: dict[str, Any] = {
            "q": q,
            "k": k,
            "v": v,
            "g": self.decay_up_proj(self.decay_down_proj(x_BTD)).view(B, T, self.num_heads, self.head_dim),
            "beta": self.beta_proj(x_BTD),
            "A_log": at_least_fp32(self.A_log[: self.num_heads]),
            "dt_bias": at_least_fp32(self.dt_bias),
            "initial_state": cache.state if cache else None,
            "output_final_state": keep,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": self.lower_bound,
            "cu_seqlens": cu_seqlens,
        }
        if keep and T == 1:
            o, state = fused_recurrent_kda(**arguments)
        else:
            o, state = chunk_kda(**arguments, safe_gate=True)
        if cache is not None:
            cache.conv, cache.state = conv, state
        gate = self.gate_proj(x_BTD).view(B, T, self.num_heads, self.head_dim)
        y = gated_rms_norm(o, gate, self.out_norm_weight, self.eps)
        return self.out_proj(y.reshape(B, T, -1))
