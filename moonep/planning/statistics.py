"""What a plan costs and what it achieves, as one small tensor that can stay on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moonep.planning.allocation import EXACT, tau_in_thousandths


class PlanStatistics(NamedTuple):
    """Integers of one plan, or tensors `[...]` of a batch.

    total: routed tokens. max_before, max_after: tokens of the fullest rank at home and under the plan.
    lower_bound: tokens that any plan meeting the target must move. moved_tokens: tokens computed away from
    home.
    copies: pairs (expert, rank it was copied to). egress: most copies of one owner's experts. ingress: most
    copies on one rank. fan_out: most copies of one expert. missed: tokens by which the fullest rank exceeds
    ceil(tau * total / R) (above 0 only with too few slots, or for a policy without a target).
    """

    total: int
    max_before: int
    max_after: int
    lower_bound: int
    moved_tokens: int
    copies: int
    egress: int
    ingress: int
    fan_out: int
    missed: int

    @classmethod
    def unpack(cls, statistics: torch.Tensor) -> PlanStatistics:
        """From the tensor of `plan_statistics` (reads it on the host)."""
        return cls(*statistics.tolist())

    def imbalance(self, num_ranks: int) -> tuple[float, float]:
        """Rank imbalance, max over mean, before and after (1.0 when there are no tokens)."""
        mean = self.total / num_ranks
        return (self.max_before / mean, self.max_after / mean) if self.total else (1.0, 1.0)


def plan_statistics(
    tokens_per_expert: torch.Tensor, alloc: torch.Tensor, *, tau: float = 1.0
) -> torch.Tensor:
    """`[..., 10]` int64 in the order of `PlanStatistics`, from counts and allocation `[..., R, E]`, without a
    host read.

    The lower bound is sum_h max(0, L_h - cap) with cap = ceil(tau * total / R); at tau = 1 the caps are
    floor(total / R) with the remainder left on the most loaded ranks (ep.md 2.1: attained by any transport
    that never overdraws a donor).
    """
    alloc, totals = alloc.to(torch.int64), tokens_per_expert.to(torch.int64).sum(-2)
    num_ranks, num_experts = alloc.shape[-2:]
    epn = num_experts // num_ranks
    rank = torch.arange(num_ranks, device=alloc.device)
    remote = torch.arange(num_experts, device=alloc.device) // epn != rank[:, None]
    copied = (alloc > 0) & remote
    before = totals.unflatten(-1, (num_ranks, epn)).sum(-1)
    after, total = alloc.sum(-1), totals.sum(-1)
    thousandths = tau_in_thousandths(tau)
    cap = -(-thousandths * total // (EXACT * num_ranks))
    surplus = (before - cap[..., None]).clamp_min(0).sum(-1)
    if thousandths == EXACT:
        # Caps are floor for all but `total mod R` ranks: those above floor beyond that number shed one more.
        base = total // num_ranks
        above = (before > base[..., None]).sum(-1)
        surplus = (before - base[..., None]).clamp_min(0).sum(-1) - torch.minimum(
            above, total - base * num_ranks
        )
    fan_out = copied.sum(-2)
    columns = (
        total,
        before.amax(-1),
        after.amax(-1),
        surplus,
        (alloc * remote).sum((-2, -1)),
        copied.sum((-2, -1)),
        fan_out.unflatten(-1, (num_ranks, epn)).sum(-1).amax(-1),
        copied.sum(-1).amax(-1),
        fan_out.amax(-1),
        (after.amax(-1) - cap).clamp_min(0),
    )
    return torch.stack(columns, dim=-1)
