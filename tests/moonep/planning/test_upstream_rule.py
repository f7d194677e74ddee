"""The `moonep` policy against a second, literal reading of upstream's two phases (ep.md 1.2)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep.planning import plan_allocation


def first_max(values: list[int]) -> int:
    return values.index(max(values))


def upstream(totals: list[int], num_ranks: int) -> list[list[int]]:
    """alloc[d][e] by the z matrix and, for each donor apart, quotas against experts."""
    epn = len(totals) // num_ranks
    base, extra = divmod(sum(totals), num_ranks)
    balance = [
        sum(totals[rank * epn : (rank + 1) * epn]) - base - (rank < extra) for rank in range(num_ranks)
    ]
    z = [[0] * num_ranks for _ in range(num_ranks)]
    while True:
        high, low = first_max(balance), balance.index(min(balance))
        if balance[high] <= 0 or balance[low] >= 0:
            break
        z[high][low] = -balance[low]
        balance[high] -= z[high][low]
        balance[low] = 0
    alloc = [[0] * len(totals) for _ in range(num_ranks)]
    for home in range(num_ranks):
        quota, left = z[home], totals[home * epn : (home + 1) * epn]
        while max(quota) > 0:
            receiver, expert = first_max(quota), first_max(left)
            take = min(quota[receiver], left[expert])
            quota[receiver] -= take
            left[expert] -= take
            alloc[receiver][home * epn + expert] += take
        for expert in range(epn):
            alloc[home][home * epn + expert] = left[expert]
    return alloc


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_same_allocation_ties_included(data):
    num_ranks = data.draw(st.integers(1, 9))
    num_experts = num_ranks * data.draw(st.integers(1, 6))
    size = data.draw(
        st.sampled_from([st.integers(0, 2), st.sampled_from([0, 7, 7, 14]), st.integers(0, 5000)])
    )
    totals = data.draw(st.lists(size, min_size=num_experts, max_size=num_experts))
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int32)
    counts[-1] = torch.tensor(totals)
    assert plan_allocation(counts, policy="moonep", slots=num_experts).tolist() == upstream(totals, num_ranks)
