"""Property tests of the policies: hard invariants and the balance target, for every routing and geometry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep.planning import (
    Geometry,
    PlanStatistics,
    check_allocation,
    default_slots,
    guaranteed_load,
    plan_allocation,
    plan_statistics,
)
from tests.moonep.planning.routing import PATHOLOGIES, histogram, popularity, routings

FAST = settings(max_examples=150, deadline=None)


def target(policy: str, tau: float) -> float | None:
    return {"static": None, "moonep": 1.0}.get(policy, tau)


@FAST
@given(
    routings(),
    st.sampled_from(["static", "moonep", "bounded"]),
    st.sampled_from([1.0, 1.001, 1.02, 1.5]),
    st.sampled_from([1, 3, 8, 128]),
)
def test_every_invariant_holds_with_the_default_slots(routing, policy, tau, padding):
    (num_ranks, num_experts, top_k, capacity), ids = routing
    counts = histogram(ids, num_experts)
    geometry = Geometry.build(
        num_ranks, num_experts, top_k, capacity, policy=policy, tau=tau, token_padding=padding
    )
    alloc = plan_allocation(counts, policy=policy, tau=tau)
    assert alloc.dtype == torch.int32
    slots = default_slots(num_ranks, num_experts) if policy != "static" else 0
    assert check_allocation(counts, alloc, tau=target(policy, tau), slots=slots, geometry=geometry) == []


@FAST
@given(st.data())
def test_arbitrary_totals_including_extremes(data):
    """Totals drawn directly reach corners that routing does not: huge, equal, all on one expert, none, T
    < R.
    """
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 4, 6, 9]))
    epn = data.draw(st.sampled_from([1, 2, 4, 7]))
    size = st.one_of(st.integers(0, 3), st.sampled_from([0, 1, 100, 100_000]), st.integers(0, 10_000))
    totals = data.draw(st.lists(size, min_size=num_ranks * epn, max_size=num_ranks * epn))
    counts = torch.zeros(num_ranks, num_ranks * epn, dtype=torch.int64)
    counts[data.draw(st.integers(0, num_ranks - 1))] = torch.tensor(totals)
    slots = default_slots(num_ranks, num_ranks * epn)
    tau = data.draw(st.sampled_from([1.0, 1.003, 1.02, 1.25]))
    for policy in ("moonep", "bounded"):
        alloc = plan_allocation(counts, policy=policy, tau=tau)
        assert check_allocation(counts, alloc, tau=target(policy, tau), slots=slots) == []
    rows = plan_allocation(counts, policy="moonep").sum(-1)
    base, extra = divmod(sum(totals), num_ranks)
    assert rows.tolist() == [base + (rank < extra) for rank in range(num_ranks)]


@FAST
@given(routings(), st.integers(0, 8), st.sampled_from([1.0, 1.02, 1.5]))
def test_fewer_slots_stay_within_the_guaranteed_load(routing, slots, tau):
    (num_ranks, num_experts, _, _), ids = routing
    counts = histogram(ids, num_experts)
    alloc = plan_allocation(counts, policy="bounded", tau=tau, slots=slots)
    assert check_allocation(counts, alloc, slots=slots) == []
    total, used = int(counts.sum()), min(slots, num_experts // num_ranks)
    limit = guaranteed_load(total, num_ranks, num_experts, used, round(tau * 1000))
    assert int(alloc.sum(-1).max()) <= limit
    statistics = PlanStatistics.unpack(plan_statistics(counts, alloc, tau=tau))
    assert statistics.missed == max(
        0, int(alloc.sum(-1).max()) - -(-round(tau * 1000) * total // (1000 * num_ranks))
    )
    trimmed = plan_allocation(counts, policy="moonep", slots=slots)
    assert check_allocation(counts, trimmed, slots=slots) == []


@pytest.mark.parametrize("kind", PATHOLOGIES)
def test_bounded_moves_the_fewest_tokens_that_any_plan_can(kind):
    """Where slots are plenty, moved tokens equal the closed-form lower bound (ep.md 2.1), at tau = 1 and
    above.
    """
    counts = (popularity(kind, 8, 128, seed=3) * 97).to(torch.int64)
    for tau in (1.0, 1.02, 1.1):
        statistics = PlanStatistics.unpack(plan_statistics(counts, plan_allocation(counts, tau=tau), tau=tau))
        assert statistics.moved_tokens == statistics.lower_bound
        assert statistics.missed == 0


def test_slack_saves_copies():
    generator = torch.Generator().manual_seed(0)
    counts = (
        torch.distributions.LogNormal(3.0, 0.5).sample((16, 8, 64))
        if generator is None
        else (
            torch.randn(16, 1, 64, generator=generator)
            .mul(0.5)
            .exp()
            .mul(500)
            .expand(16, 8, 64)
            .to(torch.int64)
        )
    )
    copies = [
        plan_statistics(counts, plan_allocation(counts, tau=tau), tau=tau)[:, 5].sum()
        for tau in (1.0, 1.02, 1.1)
    ]
    assert copies[0] > copies[1] > copies[2]


def test_a_plan_inside_the_target_moves_nothing():
    counts = torch.full((4, 8), 25)
    counts[0, 0] = 27  # imbalance 1.0025
    assert PlanStatistics.unpack(plan_statistics(counts, plan_allocation(counts, tau=1.01))).copies == 0


def test_the_default_slots_are_reached():
    """R-1 equal donors at R/(R-1) of the mean and one empty rank: the receiver needs ceil(epn*(R-1)/R)
    experts.
    """
    num_ranks, epn = 4, 8
    counts = torch.zeros(num_ranks, num_ranks * epn, dtype=torch.int64)
    counts[0, : (num_ranks - 1) * epn] = 4000
    statistics = PlanStatistics.unpack(plan_statistics(counts, plan_allocation(counts, policy="moonep")))
    assert statistics.ingress == default_slots(num_ranks, num_ranks * epn) == 6


def test_batches_and_strides_change_nothing():
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 50, (2, 3, 4, 12), generator=generator, dtype=torch.int32)
    strided = counts.transpose(0, 1).contiguous().transpose(0, 1)
    for policy in ("static", "moonep", "bounded"):
        batched = plan_allocation(strided, policy=policy, tau=1.02)
        single = torch.stack([plan_allocation(c, policy=policy, tau=1.02) for c in counts.reshape(-1, 4, 12)])
        assert torch.equal(batched, single.reshape(counts.shape))
