"""The built-in policies: `static`, `moonep` and `bounded`, batched over leading axes."""

from __future__ import annotations

import torch

from kernels.backend import use_triton
from kernels.exchange import plan as device_planner
from moonep.planning import solvers
from moonep.planning.allocation import _BUILT_IN, EXACT, Policy, register_policy
from moonep.planning.compiled import solve, sum_over_sources


def _built_in(name: str, rule: int) -> Policy:
    def policy(tokens_per_expert: torch.Tensor, *, tau_thousandths: int, slots: int) -> torch.Tensor:
        num_ranks, num_experts = tokens_per_expert.shape[-2:]
        counts = tokens_per_expert.reshape(-1, num_ranks, num_experts)
        if use_triton("auto", counts) and counts.numel() and num_ranks <= device_planner.MAX_RANKS:
            alloc = device_planner.solve_allocation(
                counts, rule=rule, tau_thousandths=tau_thousandths, slots=slots
            )
            return alloc.reshape(tokens_per_expert.shape)
        counts = counts.cpu()
        alloc = solve(rule, sum_over_sources(counts), num_ranks, slots, tau_thousandths)
        return alloc.reshape(tokens_per_expert.shape).to(tokens_per_expert.device)

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
