"""Stable LatentMoE: routed experts in a narrow latent space beside full-width shared experts (K3 report
section 2.3).

Shapes: B batch, T tokens, D hidden size, H latent width, Hi expert FFN width, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from kernels.moe import grouped_ffn
from kernels.moe.init import draw_expert_seed, expert_init
from model.config import K3Config
from model.layers import GatedFFN, Linear, RMSNorm
from model.router import FrozenBias, Router

Run = Callable[..., torch.Tensor]


class Experts(Protocol):
    """What a layer needs of its routed experts: u = sum_k weight_k E_k(x), for 0 <= T <= `capacity` tokens.

    An implementation may lack `capacity` (no limit), and on several ranks a call is collective.
    """

    def __call__(
        self, x_TH: torch.Tensor, expert_ids_TK: torch.Tensor, route_weights_TK: torch.Tensor
    ) -> torch.Tensor: ...


ExpertsFactory = Callable[[K3Config, int], nn.Module]
BalancerFactory = Callable[[K3Config, int], nn.Module]


class LocalExperts(nn.Module):
    """All experts in this process, each a SiTU-gated FFN.

    Parameters: gate_weight, up_weight [E, Hi, H], down_weight [E, H, Hi], initialised by kernels.moe.init,
    so the same seed gives the same experts as any expert-parallel arrangement of them.
    """

    def __init__(self, config: K3Config, layer: int):
        super().__init__()
        E, H, Hi = config.num_experts, config.latent_size, config.expert_ffn_size
        self.gate_weight = nn.Parameter(torch.empty(E, Hi, H))
        self.up_weight = nn.Parameter(torch.empty(E, Hi, H))
        self.down_weight = nn.Parameter(torch.empty(E, H, Hi))
        self.beta_gate, self.beta_up = config.situ_beta_gate, config.situ_beta_up
        expert_init(self.gate_weight, self.up_weight, self.down_weight, draw_expert_seed())

    def forward(
        self, x_TH: torch.Tensor, expert_ids_TK: torch.Tensor, route_weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] in the dtype of x; the sum over k is taken in the dtype of the weights, in order of k."""
        T, K = expert_ids_TK.shape
        ids = expert_ids_TK.reshape(-1).long()
        order = torch.argsort(ids, stable=True)
        counts = torch.zeros(self.gate_weight.shape[0], dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids))
        rows = grouped_ffn(
            x_TH[order // K],
            counts.cumsum(0).to(torch.int32),
            (self.gate_weight, self.up_weight, self.down_weight),
            beta_gate=self.beta_gate,
            beta_up=self.beta_up,
        )
        place = torch.empty_like(order)
        place[order] = torch.arange(T * K, device=ids.device)
        rows_TKH = rows[place].view(T, K, x_TH.shape[1])
        return (rows_TKH * route_weights_TK.unsqueeze(-1)).sum(dim=1).to(x_TH.dtype)


class LatentMoE(nn.Module):
    """y = W_up RMSNorm(sum_k p_k E_k(W_down x)) + shared(x); router and shared experts see the full width.

    The norm stands after aggregation; shared experts are neither gated nor scaled.
    """

    def __init__(
        self,
        config: K3Config,
        layer: int,
        experts: ExpertsFactory | None = None,
        balancer: BalancerFactory | None = None,
    ):
        super().__init__()
        self.layer = layer
        make_balancer = balancer or (lambda config, layer: FrozenBias(config.num_experts))
        self.router = Router(config, layer, make_balancer(config, layer))
        self.latent_down_proj = Linear(config.hidden_size, config.latent_size)
        self.experts = (experts or LocalExperts)(config, layer)
        self.latent_norm = RMSNorm(config.latent_size, config.rms_norm_eps)
        self.latent_up_proj = Linear(config.latent_size, config.hidden_size, config.output_gain)
        self.shared_experts = (
            GatedFFN(config, config.num_shared_experts * config.expert_ffn_size)
            if config.num_shared_experts
            else None
        )

    def forward(self, x_BTD: torch.Tensor, mask_BT: torch.Tensor | None, run: Run) -> torch.Tensor:
        """Apply the layer. `run(f, *tensors)` computes f under activation checkpointing, or plainly.

        Routing and experts stay outside `run`: their choice must not be made twice, and the expert layer
        does its own recomputation (its exchange is collective).
        """
        x_TD = x_BTD.flatten(0, 1)
        ids_TK, weights_TK = self.router(x_TD, None if mask_BT is None else mask_BT.flatten())
        u_TH = self.experts(self.latent_down_proj(x_TD), ids_TK, weights_TK)
        y_TD = run(self._finish, u_TH, x_TD)
        return y_TD.view_as(x_BTD)

    def _finish(self, u_TH: torch.Tensor, x_TD: torch.Tensor) -> torch.Tensor:
        routed = self.latent_up_proj(self.latent_norm(u_TH))
        return routed if self.shared_experts is None else routed + self.shared_experts(x_TD)

    def idle(self) -> None:
        """Take part in the experts' exchange with no tokens, for ranks that have fewer calls to make than
        others.
        """
        weight = self.latent_down_proj.weight
        ids = torch.zeros(0, self.router.top_k, dtype=torch.int32, device=weight.device)
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.experts(weight.new_zeros(0, weight.shape[0]), ids, ids.to(dtype))
