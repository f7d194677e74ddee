"""The integer-programming oracle: fewest expert copies for a balance target, then fewest moved tokens.

For tests, the simulator and anyone who wants to know how far a policy is from the best. Needs scipy (HiGHS).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numpy as np
import torch

from moonep.errors import CapabilityError, ContractError
from moonep.planning.allocation import EXACT, check_shape, check_slots, plan_allocation, tau_in_thousandths
from moonep.planning.statistics import PlanStatistics, plan_statistics


@dataclass(frozen=True)
class ExactPlan:
    """What the oracle found in its time.

    alloc: `[R, E]` int32, the best allocation found (never worse than `bounded`).
    copies, moved_tokens: its cost.
    copies_bound: proved: no allocation that meets the target has fewer copies.
    optimal: copies == copies_bound.
    moved_optimal: also proved that no allocation with so few copies moves fewer tokens.
    """

    alloc: torch.Tensor
    copies: int
    moved_tokens: int
    copies_bound: int
    optimal: bool
    moved_optimal: bool


def solve_exact(
    tokens_per_expert: torch.Tensor, *, tau: float = 1.0, slots: int | None = None, time_limit: float = 10.0
) -> ExactPlan:
    """Minimum copies, then minimum moved tokens, such that every rank holds at most ceil(tau * total / R)
    tokens.

    The program: y[e,d] = 1 if expert e is copied to rank d, x[e,d] its tokens there; x <= C_e y; at most
    `slots` copies a rank; loads in [floor(total/R) if tau = 1 else 0, cap]. For fixed y this is a transport
    problem, whose vertices are integral, so x is continuous and only y is branched on.

    Args:
        tokens_per_expert: `[R, E]` integers.
        tau, slots: as in `plan_allocation`.
        time_limit: seconds for both stages together.

    Raises:
        ContractError: bad shapes or arguments, or no allocation meets the target with so few slots.
        CapabilityError: scipy is missing.
    """
    if tokens_per_expert.ndim != 2:
        raise ContractError(f"tokens_per_expert must be [R, E], got {tuple(tokens_per_expert.shape)}")
    if time_limit <= 0:
        raise ContractError(f"time_limit={time_limit} must be positive seconds")
    check_shape(*tokens_per_expert.shape)
    known = plan_allocation(tokens_per_expert, policy="bounded", tau=tau, slots=slots)
    cost = PlanStatistics.unpack(plan_statistics(tokens_per_expert, known, tau=tau))
    if cost.max_before == cost.max_after and cost.copies == 0 and cost.missed == 0:
        return ExactPlan(known, 0, 0, 0, True, True)
    deadline = monotonic() + time_limit
    program = _Program(tokens_per_expert, tau, slots)
    copies, bound, proved = program.fewest_copies(deadline - monotonic())
    if copies is None and proved:
        raise ContractError(f"slots={program.slots}: no allocation reaches tau={tau} with so few slots")
    best, found = (known, cost.copies) if cost.missed == 0 else (None, None)
    if copies is not None and (found is None or len(copies) < found):
        best, found = program.route(copies), len(copies)
    if best is None or found is None:
        raise ContractError(f"time_limit={time_limit}: no allocation for tau={tau} found in time; raise it")
    cheaper, moved_optimal = program.fewest_tokens(found, max(0.1, deadline - monotonic()))
    if cheaper is not None:
        best = min(best, program.route(cheaper), key=lambda alloc: _moved(tokens_per_expert, alloc))
    return ExactPlan(best, found, _moved(tokens_per_expert, best), bound, found == bound, moved_optimal)


def _moved(tokens_per_expert: torch.Tensor, alloc: torch.Tensor) -> int:
    return PlanStatistics.unpack(plan_statistics(tokens_per_expert, alloc)).moved_tokens


class _Program:
    """Variables: y for every (expert, foreign rank) pair, then x for the same pairs."""

    def __init__(self, tokens_per_expert: torch.Tensor, tau: float, slots: int | None):
        self.num_ranks, self.num_experts = tokens_per_expert.shape
        self.slots = check_slots(slots, self.num_ranks, self.num_experts)
        self.totals = tokens_per_expert.sum(0).cpu().numpy().astype(np.int64)
        self.home = np.arange(self.num_experts) // (self.num_experts // self.num_ranks)
        total, thousandths = int(self.totals.sum()), tau_in_thousandths(tau)
        self.cap = -(-thousandths * total // (EXACT * self.num_ranks))
        self.floor = total // self.num_ranks if thousandths == EXACT else 0
        live = np.flatnonzero(self.totals)
        expert, rank = (
            grid.reshape(-1) for grid in np.meshgrid(live, np.arange(self.num_ranks), indexing="ij")
        )
        foreign = self.home[expert] != rank
        self.expert, self.rank = expert[foreign], rank[foreign]
        self.most = np.minimum(self.totals[self.expert], self.cap)  # tokens a copy can take
        self.load = np.bincount(self.home, self.totals, self.num_ranks)

    @property
    def pairs(self) -> int:
        return len(self.expert)

    def fewest_copies(self, seconds: float) -> tuple[np.ndarray | None, int, bool]:
        """(chosen pairs or None, proved lower bound on copies, whether the search finished)."""
        cost = np.concatenate([np.ones(self.pairs), np.zeros(self.pairs)])
        result = self._milp(cost, seconds)
        bound = getattr(result, "mip_dual_bound", None)
        proved = int(np.ceil(bound - 1e-6)) if bound is not None and np.isfinite(bound) else 0
        return self._chosen(result), max(0, proved), result.status in (0, 2)

    def fewest_tokens(self, copies: int, seconds: float) -> tuple[np.ndarray | None, bool]:
        """Pairs of an allocation with at most `copies` copies and few moved tokens; whether that is proved
        fewest.
        """
        cost = np.concatenate([np.zeros(self.pairs), np.ones(self.pairs)])
        result = self._milp(cost, seconds, copies)
        return self._chosen(result), result.status == 0

    def route(self, chosen: np.ndarray) -> torch.Tensor:
        """The allocation with fewest moved tokens that copies exactly the chosen pairs (a linear program)."""
        from scipy.optimize import Bounds

        upper = np.zeros(self.pairs)
        upper[chosen] = self.most[chosen]
        bounds = Bounds(0, np.concatenate([upper > 0, upper]))
        cost = np.concatenate([np.zeros(self.pairs), np.ones(self.pairs)])
        result = self._milp(cost, 60.0, bounds=bounds, integer_tokens=True)
        tokens = np.rint(result.x[self.pairs :]).astype(np.int64)
        alloc = np.zeros((self.num_ranks, self.num_experts), dtype=np.int64)
        alloc[self.home, np.arange(self.num_experts)] = self.totals
        np.add.at(alloc, (self.rank, self.expert), tokens)
        np.add.at(alloc, (self.home[self.expert], self.expert), -tokens)
        return torch.from_numpy(alloc).to(torch.int32)

    def _chosen(self, result) -> np.ndarray | None:
        return None if result.x is None else np.flatnonzero(result.x[: self.pairs] > 0.5)

    def _milp(self, cost, seconds, copies=None, bounds=None, integer_tokens=False):
        try:
            from scipy.optimize import Bounds, milp
        except ImportError as missing:
            raise CapabilityError("the exact planner needs scipy; pip install 'moonep[sim]'") from missing
        upper = np.concatenate([np.ones(self.pairs), self.most])
        return milp(
            cost,
            constraints=self._constraints(copies),
            bounds=Bounds(0, upper) if bounds is None else bounds,
            integrality=np.concatenate([np.ones(self.pairs), np.full(self.pairs, int(integer_tokens))]),
            options={"time_limit": max(0.1, seconds), "mip_rel_gap": 0.0},
        )

    def _constraints(self, copies):
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_matrix, hstack, identity

        n, one = self.pairs, np.ones(self.pairs)
        index = np.arange(n)
        into = coo_matrix((one, (self.rank, index)), (self.num_ranks, n)).tocsr()
        out = coo_matrix((one, (self.home[self.expert], index)), (self.num_ranks, n)).tocsr()
        of = coo_matrix((one, (self.expert, index)), (self.num_experts, n)).tocsr()
        link = coo_matrix((-self.most, (index, index)), (n, n)).tocsr()
        constraints = [
            LinearConstraint(hstack([link, identity(n)]), -np.inf, 0),
            LinearConstraint(hstack([0 * of, of]), -np.inf, self.totals),
            LinearConstraint(hstack([0 * into, into - out]), self.floor - self.load, self.cap - self.load),
            LinearConstraint(hstack([into, 0 * into]), -np.inf, self.slots),
        ]
        if copies is not None:
            constraints.append(LinearConstraint(np.concatenate([one, 0 * one])[None], -np.inf, copies))
        return constraints
