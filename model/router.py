"""The sigmoid router: biased scores choose, raw scores weigh (K3 report eq. 13 and 14).

Shapes: T tokens, D hidden size, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from kernels.moe import router_topk
from model.config import K3Config
from model.layers import Linear, at_least_fp32

RouteHook = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor | None]


class Balancer(Protocol):
    """What a router needs of a load balancer. `bias` [E] fp32 is added to scores for the choice alone and
    changes between optimizer steps; `observe` counts what the next bias needs."""

    bias: torch.Tensor

    def observe(
        self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None = None
    ) -> None: ...


class FrozenBias(nn.Module):
    """A balancer that never moves: the bias of a released checkpoint, or zero."""

    bias: torch.Tensor

    def __init__(self, num_experts: int):
        super().__init__()
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32))

    def observe(
        self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None = None
    ) -> None:
        """Nothing to count."""

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenBias:
        """Moves with the model but stays fp32: `model.bfloat16()` would round biases that differ by 1e-3."""
        bias = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != torch.float32:
            self.bias = self.bias.float() if bias.is_meta else bias.to(self.bias.device)
        return self


class Router(nn.Module):
    """Chooses top_k experts a token by sigmoid score + balancer bias, in fp32 from the full-width input.

    Attributes:
        route_hook: None, or `hook(layer, scores_TE, ids_TK) -> ids_TK or None`, called on every choice. It
            may record the choice, or replace it (forced routing); weights then follow from the raw scores
            of the new ids.
        last_counts_E: int64 [E], tokens sent to each expert since `clear_counts`, counted where the
            balancer observes: in training mode, with gradients, not in a recomputation; masked tokens left
                out.
    """

    last_counts_E: torch.Tensor

    def __init__(self, config: K3Config, layer: int, balancer: nn.Module):
        super().__init__()
        self.layer, self.top_k = layer, config.top_k
        self.renormalize, self.scaling = config.renormalize, config.routed_scaling_factor
        self.score_proj = Linear(config.hidden_size, config.num_experts)
        self.balancer: Any = balancer
        self.route_hook: RouteHook | None = None
        self.register_buffer(
            "last_counts_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False
        )

    def forward(
        self, x_TD: torch.Tensor, mask_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of each token.

        Args:
            x_TD: normed input, any float dtype.
            mask_T: bool, False for padding: such tokens are routed but not counted.

        Returns:
            (ids_TK int32, weights_TK fp32, or fp64 for fp64 input). Gradients reach x and the router by
            the weights.
        """
        counting = self.training and torch.is_grad_enabled() and not _recomputing()
        scores_TE = torch.sigmoid(F.linear(at_least_fp32(x_TD), at_least_fp32(self.score_proj.weight)))
        with torch.no_grad():
            scores = scores_TE.detach()
            ids_TK, cutoff_T = router_topk(scores, self.balancer.bias, self.top_k)
            if counting:
                self.balancer.observe(scores, cutoff_T, mask_T)
            if self.route_hook is not None:
                ids_TK = self._hooked(scores, ids_TK)
            if counting:
                self._count(ids_TK, mask_T)
        weights_TK = scores_TE.gather(1, ids_TK.long())
        if self.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20)
        return ids_TK, weights_TK * self.scaling if self.scaling != 1.0 else weights_TK

    def clear_counts(self) -> None:
        """Start counting anew."""
        self.last_counts_E.zero_()

    def _hooked(self, scores_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        assert self.route_hook is not None
        chosen = self.route_hook(self.layer, scores_TE, ids_TK)
        if chosen is None:
            return ids_TK
        if chosen.shape != ids_TK.shape:
            raise ValueError(
                f"route_hook of layer {self.layer} returned ids of shape {tuple(chosen.shape)}; "
                f"expected {tuple(ids_TK.shape)} = [tokens, top_k]"
            )
        return chosen.to(device=ids_TK.device, dtype=torch.int32)

    def _count(self, ids_TK: torch.Tensor, mask_T: torch.Tensor | None) -> None:
        ids = ids_TK.reshape(-1).long()
        if mask_T is None:
            ones = torch.ones_like(ids)
        else:
            ones = mask_T.long().repeat_interleave(self.top_k)
        self.last_counts_E.scatter_add_(0, ids, ones)


def _recomputing() -> bool:
    """Whether this forward is the second one of activation checkpointing, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
