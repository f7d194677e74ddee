"""Quantile Balancing and its peers: the bias a router adds to its scores when it chooses experts.

K3 report section 2.3.3 and appendix D. After each step the bias of expert j becomes the k/n-quantile, over
all tokens of the step, of the bias that expert j would have needed to be chosen: `cutoff - score`, where
the cutoff is the (k+1)-th largest biased score of the token. The quantile comes from a histogram, so ranks
and micro-batches add up exactly.

Legend: T tokens, E experts (n), K top-k (k), B bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kernels.moe import quantile_histogram
from moonep.errors import ContractError


class Balancer(nn.Module):
    """A routing bias that changes between steps, never by a gradient.

    Attributes:
        bias: fp32 [E]; a buffer, not a parameter. Stays fp32 when the model is cast: its differences are
        near 1e-3.
        counts: integers of the step so far, summed over ranks by `update`; not saved.
    """

    bias: torch.Tensor
    counts: torch.Tensor

    def __init__(self, num_experts: int, top_k: int, counts: torch.Tensor):
        super().__init__()
        if not 1 <= top_k < num_experts:
            raise ContractError(
                f"top_k={top_k} cannot be balanced over num_experts={num_experts}; "
                f"allowed: 1 to {num_experts - 1} (the cutoff is the (k+1)-th largest score)"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.register_buffer("bias", torch.zeros(num_experts, dtype=torch.float32, device=counts.device))
        self.register_buffer("counts", counts, persistent=False)

    def observe(
        self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None = None
    ) -> None:
        """Counts one micro-batch under the current bias. Nothing is counted in eval mode, nor in the
        recompute pass of activation checkpointing.

        Args:
            scores_TE: [T, E] raw sigmoid scores, before the bias.
            cutoff_T: [T] the (k+1)-th largest of `scores + bias` (`kernels.moe.router_topk`).
            mask_T: [T] bool, False for padding.

        Raises:
            ContractError: a shape that does not fit.
        """
        if scores_TE.dim() != 2 or scores_TE.shape[1] != self.num_experts:
            raise ContractError(
                f"scores has shape {tuple(scores_TE.shape)}; expected [T, {self.num_experts}]"
            )
        for name, value in (("cutoff", cutoff_T), ("mask", mask_T)):
            if value is not None and value.shape != scores_TE.shape[:1]:
                raise ContractError(f"{name} has shape {tuple(value.shape)}; expected [{scores_TE.shape[0]}]")
        recomputing = torch._C._current_graph_task_id() != -1
        if self.training and not recomputing:
            with torch.no_grad():
                self._count(scores_TE.detach(), cutoff_T.detach(), mask_T)

    def update(self, group: Any = None) -> None:
        """Sums the counts over `group` (None: the default group, if any), sets the bias, clears the counts.

        Collective, once an optimizer step. A step without tokens leaves the bias as it is.
        """
        update_all([self], group)

    def _count(self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None) -> None:
        """Adds this micro-batch to `counts`."""

    def _next_bias(self) -> torch.Tensor:
        """fp32 [E] from the summed counts."""
        return self.bias

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Balancer:
        before = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != torch.float32:
            self.bias = before.to(self.bias.device)
        return self


class QuantileBalancer(Balancer):
    """Kimi K3's Quantile Balancing.

    Args:
        num_experts: E.  top_k: K, smaller than E.
        bins: of the histogram; the bias is off by at most a bin, (max(bias) - min(bias) + 2) / bins < 3 /
        bins.

    Raises:
        ContractError: K >= E, or no bins.
    """

    def __init__(
        self, num_experts: int, top_k: int, *, bins: int = 1000, device: torch.device | str | None = None
    ):
        if bins < 1:
            raise ContractError(f"bins={bins} is too few; allowed: 1 or more (the K3 report uses 1000)")
        super().__init__(num_experts, top_k, torch.zeros(num_experts, bins, dtype=torch.int32, device=device))
        self.bins = bins

    def _edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Left edge and width of the bins. Scores lie in (0, 1) and the cutoff in (min(bias), 1 +
        max(bias)), so
        every required bias falls inside; the bias is constant within a step, hence the edges are."""
        low, high = torch.aminmax(self.bias.double())
        return low - 1.0, (high - low + 2.0) / self.bins

    def _count(self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None) -> None:
        low, width = self._edges()
        self.counts += quantile_histogram(scores_TE, cutoff_T, low, width, self.bins, mask_T)

    def _next_bias(self) -> torch.Tensor:
        low, width = self._edges()
        below_EB = self.counts.to(torch.int64).cumsum(dim=1)
        tokens = below_EB[0, -1]
        target = tokens.double() * self.top_k / self.num_experts
        bin_E = torch.searchsorted(
            below_EB, target.ceil().long().expand(self.num_experts, 1).contiguous()
        ).clamp_(max=self.bins - 1)
        in_bin = self.counts.gather(1, bin_E).double()
        before = below_EB.gather(1, bin_E).double() - in_bin
        share = ((target - before) / in_bin.clamp(min=1.0)).clamp(0.0, 1.0)
        quantile_E = (low + (bin_E + share) * width).squeeze(1)
        centred = (quantile_E - quantile_E.mean()).to(torch.float32)
        return torch.where(tokens > 0, centred, self.bias)


class SignBalancer(Balancer):
    """DeepSeek's auxiliary-loss-free rule: bias += rate * sign(mean load - load)."""

    def __init__(
        self, num_experts: int, top_k: int, *, rate: float = 1e-2, device: torch.device | str | None = None
    ):
        if not rate > 0:
            raise ContractError(f"rate={rate} must be positive")
        super().__init__(num_experts, top_k, torch.zeros(num_experts, dtype=torch.int32, device=device))
        self.rate = rate

    def _count(self, scores_TE: torch.Tensor, cutoff_T: torch.Tensor, mask_T: torch.Tensor | None) -> None:
        chosen_TE = scores_TE + self.bias > cutoff_T.unsqueeze(1)
        if mask_T is not None:
            chosen_TE = chosen_TE & mask_T.unsqueeze(1)
        self.counts += chosen_TE.sum(dim=0, dtype=torch.int32)

    def _next_bias(self) -> torch.Tensor:
        load_E = self.counts.to(torch.int64)
        # integers: load * E against the total, so that a balanced expert keeps its bias exactly
        return self.bias + self.rate * torch.sign(load_E.sum() - load_E * self.num_experts).to(torch.float32)


class NoBalancer(Balancer):
    """A bias that stays zero."""

    def __init__(self, num_experts: int, top_k: int, *, device: torch.device | str | None = None):
        super().__init__(num_experts, top_k, torch.zeros(0, dtype=torch.int32, device=device))


@torch.no_grad()
def update_all(balancers: Iterable[Balancer], group: Any = None) -> None:
    """`update` of all layers with one all-reduce over their flattened counts. Collective, in the same
    order on every rank."""
    layers = [balancer for balancer in balancers if balancer.counts.numel()]
    if not layers:
        return
    flat = torch.cat([balancer.counts.flatten() for balancer in layers])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(flat, group=group)
    for balancer, summed in zip(layers, flat.split([b.counts.numel() for b in layers]), strict=True):
        balancer.counts.copy_(summed.view_as(balancer.counts))
        balancer.bias.copy_(balancer._next_bias())
        balancer.counts.zero_()
