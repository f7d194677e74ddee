"""Routing biases of all MoE layers as one thing: one all-reduce a step, saved and loaded by layer number."""

from __future__ import annotations

import torch

from moonep.quantile import Balancer, NoBalancer, QuantileBalancer, SignBalancer, update_all
from moonep.trainer.config import RoutingConfig


def make_balancer(routing: RoutingConfig, num_experts: int, top_k: int, device: torch.device) -> Balancer:
    """The balancer that `routing.balancer` names."""
    if routing.balancer == "quantile":
        return QuantileBalancer(num_experts, top_k, bins=routing.bins, device=device)
    if routing.balancer == "sign":
        return SignBalancer(num_experts, top_k, rate=routing.sign_rate, device=device)
    return NoBalancer(num_experts, top_k, device=device)


class Balancers:
    """layer number -> balancer, updated together after the optimizer step."""

    def __init__(self, by_layer: dict[int, Balancer]):
        self.by_layer = by_layer

    def update(self) -> None:
        """New biases from the whole step's tokens. Collective."""

        update_all(self.by_layer.values())

    def biases(self) -> dict[int, torch.Tensor]:
        """layer -> bias [E] fp32, on the CPU."""
        return {layer: balancer.bias.detach().cpu().clone() for layer, balancer in self.by_layer.items()}

    def load_biases(self, biases: dict[int, torch.Tensor]) -> None:
        """Puts back what `biases` gave."""
        for layer, bias in biases.items():
            own = self.by_layer[layer].bias
            own.copy_(bias.to(own.device))
