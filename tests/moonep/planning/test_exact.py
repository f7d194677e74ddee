"""The oracle, and how near `bounded` comes to it."""

from __future__ import annotations

import itertools

import pytest
import torch

from moonep.errors import ContractError
from moonep.planning import PlanStatistics, check_allocation, default_slots, plan_allocation, plan_statistics
from tests.moonep.planning.routing import popularity

exact = pytest.importorskip("moonep.planning.exact")
pytest.importorskip("scipy")


def brute_force(counts: torch.Tensor, tau: float) -> int:
    """Fewest copies by trying every set of (expert, rank) pairs; feasible if a transport over the pairs
    reaches the caps.
    """
    num_ranks, num_experts = counts.shape
    totals = counts.sum(0).tolist()
    epn = num_experts // num_ranks
    cap = -(-round(tau * 1000) * sum(totals) // (1000 * num_ranks))
    pairs = [(e, d) for e in range(num_experts) for d in range(num_ranks) if e // epn != d]
    for size in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, size):
            where = [{e // epn} | {d for x, d in chosen if x == e} for e in range(num_experts)]
            # Hall's condition: the experts confined to a set of ranks must fit their caps.
            if all(
                sum(t for t, w in zip(totals, where, strict=True) if w <= set(subset)) <= cap * len(subset)
                for n in range(1, num_ranks + 1)
                for subset in itertools.combinations(range(num_ranks), n)
            ):
                return size
    raise AssertionError("no allocation")


@pytest.mark.parametrize("seed", range(4))
def test_the_oracle_equals_brute_force(seed):
    counts = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(seed))
    counts[:, seed] *= 4
    found = exact.solve_exact(counts, tau=1.05, time_limit=20)
    assert found.optimal and found.copies == brute_force(counts, 1.05)
    assert check_allocation(counts, found.alloc, tau=1.05, slots=default_slots(3, 6)) == []


@pytest.mark.parametrize("kind", ["power_law", "one_hot_home_group", "skew_inside_a_group", "empty_experts"])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_bounded_is_within_one_copy_of_the_optimum(kind, num_ranks):
    counts = (popularity(kind, num_ranks, 32, seed=num_ranks) * 997).to(torch.int64)
    found = exact.solve_exact(counts, tau=1.02, time_limit=20)
    assert found.optimal, "choose an instance the oracle proves"
    ours = PlanStatistics.unpack(plan_statistics(counts, plan_allocation(counts, tau=1.02), tau=1.02))
    assert found.copies <= ours.copies <= found.copies + 1
    assert ours.moved_tokens == ours.lower_bound <= found.moved_tokens


def test_exact_balance_and_what_is_reported():
    counts = torch.tensor([[50, 3, 9, 4], [20, 11, 2, 1]])
    found = exact.solve_exact(counts, time_limit=20)
    assert (found.copies, found.copies_bound, found.optimal) == (1, 1, True)
    assert found.alloc.sum(1).tolist() == [50, 50]
    assert found.moved_tokens == 34
    even = exact.solve_exact(torch.ones(2, 4, dtype=torch.int64))
    assert (even.copies, even.moved_tokens, even.optimal) == (0, 0, True)


def test_the_oracle_refuses():
    counts = torch.zeros(4, 8, dtype=torch.int64)
    counts[:, :2] = 50
    with pytest.raises(ContractError, match="no allocation reaches tau"):
        exact.solve_exact(counts, slots=0)
    with pytest.raises(ContractError, match="time_limit=0"):
        exact.solve_exact(counts, time_limit=0)
    with pytest.raises(ContractError, match=r"must be \[R, E\]"):
        exact.solve_exact(counts[None])
