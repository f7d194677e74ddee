"""The device planner gives the bits of the CPU planner (in Triton's interpreter where there is no GPU)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import plan as device_plan
from moonep.planning import (
    Geometry,
    default_slots,
    destinations,
    layout,
    plan_allocation,
    plan_statistics,
)
from tests.moonep.planning.routing import PATHOLOGIES, histogram, popularity, routed_ids

RULES = {"static": device_plan.STATIC, "moonep": device_plan.MOONEP, "bounded": device_plan.BOUNDED}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of_counts(num_ranks: int, num_experts: int) -> torch.Tensor:
    """The eight pathologies, no tokens, all on one expert, fewer tokens than ranks, and many ties."""
    counts = [(popularity(kind, num_ranks, num_experts, seed=7) * 37).to(torch.int32) for kind in PATHOLOGIES]
    empty = torch.zeros(num_ranks, num_experts, dtype=torch.int32)
    single, few, ties = empty.clone(), empty.clone(), empty.clone()
    single[0, num_experts // 2] = 1000
    few[-1, 0] = 1
    ties[0, : num_experts // 2] = 6
    return torch.stack([*counts, empty, single, few, ties])


# The interpreter needs about 10 ms a step of the solver, so larger plans are fewer there.
FEWER = {1: slice(0, None, 6), 2: slice(0, None, 3), 5: slice(1, None, 4), 33: slice(4, 5)}


@pytest.mark.parametrize("num_ranks, num_experts", [(1, 3), (2, 10), (5, 20), (33, 66)])
@pytest.mark.parametrize(
    "policy, tau, few_slots",
    [("static", 1.0, 0), ("moonep", 1.0, 0), ("moonep", 1.0, 1), ("bounded", 1.0, 0), ("bounded", 1.02, 1)],
)
def test_allocations_are_equal(num_ranks, num_experts, policy, tau, few_slots):
    counts = batch_of_counts(num_ranks, num_experts)
    if DEVICE == "cpu":
        counts = counts[FEWER[num_ranks]]
    slots = few_slots or default_slots(num_ranks, num_experts)
    expected = plan_allocation(counts, policy=policy, tau=tau, slots=slots)
    got = device_plan.solve_allocation(
        counts.to(DEVICE), rule=RULES[policy], tau_thousandths=round(tau * 1000), slots=slots
    )
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize(
    "num_ranks, num_experts, top_k, tokens", [(1, 3, 2, 5), (2, 10, 3, 90), (4, 12, 8, 40), (5, 10, 1, 0)]
)
@pytest.mark.parametrize("policy", ["moonep", "bounded"])
def test_tables_and_destinations_are_equal(num_ranks, num_experts, top_k, tokens, policy):
    weights = popularity("power_law", num_ranks, num_experts, seed=1)
    held = [max(0, tokens - 7 * rank) for rank in range(num_ranks)]
    ids = routed_ids(weights, held, top_k, duplicates=True, seed=2)
    counts = histogram(ids, num_experts)
    geometry = Geometry.build(num_ranks, num_experts, top_k, max(tokens, 1), policy=policy, tau=1.02)
    alloc = plan_allocation(counts, policy=policy, tau=1.02)
    expected = layout(counts, alloc, geometry)
    got = device_plan.plan_tables(
        counts.to(DEVICE),
        rule=RULES[policy],
        tau_thousandths=1020,
        slots=geometry.slots,
        token_padding=geometry.token_padding,
    )
    for name in ("groups", "group_rows", "offsets", "first_row", "local", "source_start", "receive_end"):
        assert torch.equal(
            getattr(got, name).cpu().to(torch.int64), getattr(expected, name).to(torch.int64)
        ), name
    assert torch.equal(got.statistics.cpu(), plan_statistics(counts, alloc, tau=1.02))
    for rank in range(num_ranks):
        entries = device_plan.sort_entries(ids[rank].to(DEVICE), num_experts)
        assert torch.equal(entries.histogram.cpu(), counts[rank])
        target = device_plan.destinations(entries, got, rank=rank, shard_rows=geometry.shard_rows)
        assert torch.equal(target.cpu(), destinations(expected, rank, ids[rank]))
