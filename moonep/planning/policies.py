"""The built-in policies: `static`, `moonep` and `bounded`, batched over leading axes."""

from __future__ import annotations

import torch

from moonep.errors import ContractError
from moonep.planning import solvers
from moonep.planning.allocation import _BUILT_IN, EXACT, MAX_TOKENS, Policy, register_policy


def _built_in(name: str, rule: int) -> Policy:
    def policy(tokens_per_expert: torch.Tensor, *, tau_thousandths: int, slots: int) -> torch.Tensor:
        from moonep.planning import compiled

        num_ranks, num_experts = tokens_per_expert.shape[-2:]
        totals = tokens_per_expert.sum(-2).reshape(-1, num_experts).cpu().numpy()
        if totals.size and (int(totals.min()) < 0 or int(totals.sum(-1).max()) > MAX_TOKENS):
            raise ContractError(
                f"tokens_per_expert must be non-negative and sum to at most {MAX_TOKENS} a plan"
            )
        alloc = compiled.solve(rule, totals, num_ranks, slots, tau_thousandths)
        return torch.from_numpy(alloc).reshape(tokens_per_expert.shape).to(tokens_per_expert.device)

    policy.__name__ = name
    _BUILT_IN.add(name)
    return register_policy(name)(policy)


static = _built_in("static", solvers.STATIC)
moonep = _built_in("moonep", solvers.MOONEP)
bounded = _built_in("bounded", solvers.BOUNDED)


def guaranteed_load(
    total: int, num_ranks: int, num_experts: int, slots: int, tau_thousandths: int = EXACT
) -> int:
    """Tokens that no rank exceeds under `bounded`, whatever the routing (proof: solvers.fill_receivers).

    With the default slots it is the target ceil(tau * total / R); with fewer at most ceil(total * epn / (epn
    + (R-1) * slots)), which runs from `total` (no slots) down to the mean.
    """
    epn = num_experts // num_ranks
    target = -(-tau_thousandths * total // (EXACT * num_ranks))
    if slots >= -(-epn * (num_ranks - 1) // num_ranks):
        return target
    return max(target, -(-total * epn // (epn + (num_ranks - 1) * slots)))
