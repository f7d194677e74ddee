"""Layout and destinations: every routed entry gets a row of its own inside its expert's group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonep.errors import ContractError
from moonep.planning import Geometry, default_slots, destinations, layout, plan_allocation
from tests.moonep.planning.routing import histogram, routings


def plan(routing, policy, tau, padding):
    (num_ranks, num_experts, top_k, capacity), ids = routing
    geometry = Geometry.build(
        num_ranks, num_experts, top_k, capacity, policy=policy, tau=tau, token_padding=padding
    )
    counts = histogram(ids, num_experts)
    alloc = plan_allocation(counts, policy=policy, tau=tau)
    return geometry, counts, alloc, layout(counts, alloc, geometry), ids


def plain_destinations(lay, counts, alloc, rank, ids):
    """The rule of `destinations`, entry by entry: local first, then the ranks in order, stable in
    position.
    """
    g = lay.geometry
    local = torch.minimum(counts, alloc).to(torch.int64)
    taken = [
        [0] * g.num_experts for _ in range(g.num_ranks)
    ]  # travelling rows handed out so far, by receiver
    for source in range(rank):
        for expert in range(g.num_experts):
            for receiver in range(g.num_ranks):
                if receiver != source:
                    taken[receiver][expert] += int(lay.take[source, receiver, expert])
    stayed = [0] * g.num_experts
    result = []
    for token in ids.tolist():
        used, row = set(), []
        for expert in token:
            if stayed[expert] < local[rank, expert]:
                receiver, nth = rank, stayed[expert]
                stayed[expert] += 1
            else:
                room = [alloc[d, expert] - local[d, expert] - taken[d][expert] for d in range(g.num_ranks)]
                receiver = next(d for d in range(g.num_ranks) if room[d] > 0)
                nth = int(local[receiver, expert]) + taken[receiver][expert]
                taken[receiver][expert] += 1
            target = receiver * g.shard_rows + int(lay.first_row[receiver, expert]) + nth
            row.append(-target - 1 if receiver in used else target)
            used.add(receiver)
        result.append(row)
    return torch.tensor(result, dtype=torch.int64).reshape(ids.shape)


@settings(max_examples=80, deadline=None)
@given(
    routings(),
    st.sampled_from(["static", "moonep", "bounded"]),
    st.sampled_from([1.0, 1.02, 1.3]),
    st.sampled_from([1, 4, 8]),
)
def test_destinations_are_a_bijection_into_the_groups(routing, policy, tau, padding):
    geometry, counts, alloc, lay, ids = plan(routing, policy, tau, padding)
    num_ranks, rows = geometry.num_ranks, geometry.shard_rows
    expert_of_row = torch.full((num_ranks * rows,), -1)
    for rank in range(num_ranks):
        start = 0
        for group in range(geometry.num_groups):
            end = int(lay.offsets[rank, group])
            expert = int(lay.groups[rank, group])
            used = int(lay.group_rows[rank, group])
            assert end % padding == 0 and start + used <= end <= rows and end - start - used < padding
            assert expert >= 0 or used == 0
            expert_of_row[rank * rows + start : rank * rows + start + used] = expert
            start = end
    seen = torch.zeros(num_ranks * rows, dtype=torch.int64)
    for rank in range(num_ranks):
        marked = destinations(lay, rank, ids[rank])
        assert torch.equal(marked, plain_destinations(lay, counts, alloc, rank, ids[rank]))
        target = torch.where(marked < 0, -marked - 1, marked).reshape(-1)
        assert torch.equal(expert_of_row[target], ids[rank].reshape(-1))
        seen[target] += 1
    assert torch.equal(seen, (expert_of_row >= 0).to(torch.int64))


@settings(max_examples=60, deadline=None)
@given(routings(), st.sampled_from(["moonep", "bounded"]))
def test_take_splits_both_sides_and_prefers_home(routing, policy):
    _, counts, alloc, lay, _ = plan(routing, policy, 1.02, 8)
    assert torch.equal(lay.take.sum(1), counts.to(torch.int64))
    assert torch.equal(lay.take.sum(0), alloc.to(torch.int64))
    assert torch.equal(lay.take.diagonal(dim1=0, dim2=1).T, torch.minimum(counts, alloc).to(torch.int64))


def test_a_batch_of_layouts_equals_its_plans():
    counts = torch.randint(0, 30, (5, 4, 12), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    geometry = Geometry.build(4, 12, 4, 400)
    alloc = plan_allocation(counts)
    batch = layout(counts, alloc, geometry)
    for index in range(5):
        single = layout(counts[index], alloc[index], geometry)
        for name in ("groups", "group_rows", "offsets", "first_row", "take"):
            assert torch.equal(getattr(batch, name)[index], getattr(single, name))


def test_sizes_of_the_shard():
    geometry = Geometry.build(2, 896, 16, 4096, token_padding=8)
    assert geometry.slots == default_slots(2, 896) == 224
    assert geometry.max_rows == 4096 * 16
    assert geometry.padding_rows == 7 * (448 + 224) < 0.1 * 4096 * 16
    assert geometry.shard_rows == 4096 * 16 + 7 * 672
    static = Geometry.build(2, 896, 16, 4096, policy="static", token_padding=1)
    assert static.shard_rows == 2 * 4096 * 16 and static.slots == 0
    assert Geometry.build(8, 64, 4, 100, tau=1.02, token_padding=1).shard_rows == 408
    few = Geometry.build(8, 64, 4, 100, slots=2, max_imbalance=2.91, token_padding=1)
    assert few.shard_rows == 1164  # 8 * 64 / (64 + 8 * 7 * 2) = 2.909...


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 10}, "num_experts=10 must be a positive multiple of the 4"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 9}, "top_k=9 exceeds num_experts=8"),
        ({"capacity": 0}, "capacity=0"),
        ({"capacity": 2**30}, "lower capacity"),
        ({"token_padding": 0}, "token_padding=0"),
        ({"tau": 0.99}, "tau=0.99"),
        ({"tau": 1.0001}, "multiple of 0.001"),
        ({"slots": -1}, "slots=-1"),
        ({"slots": 1}, "pass max_imbalance=1.6"),
        ({"slots": 1, "max_imbalance": 1.5}, "max_imbalance=1.5 is below 1.6"),
        ({"slots": 1, "max_imbalance": 4.0, "policy": "moonep"}, "policy 'moonep' needs 2 slots"),
    ],
)
def test_geometry_refuses(change, message):
    sizes = {"num_ranks": 4, "num_experts": 8, "top_k": 2, "capacity": 16} | change
    with pytest.raises(ContractError, match=message):
        Geometry.build(**sizes)
