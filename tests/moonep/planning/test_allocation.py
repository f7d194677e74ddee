"""The contract: refusals, the checker that finds each violation, user policies, and statistics by hand."""

from __future__ import annotations

import pytest
import torch

from moonep.errors import ContractError
from moonep.planning import (
    Geometry,
    PlanStatistics,
    allocation,
    check_allocation,
    plan_allocation,
    plan_statistics,
    register_policy,
)

COUNTS = torch.tensor([[9, 1, 0, 2], [7, 3, 2, 0]])  # home loads 20 and 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_per_expert": COUNTS.float()}, "int32 or int64 tensor .* got torch.float32"),
        ({"tokens_per_expert": [[1, 2]]}, "got list"),
        ({"tokens_per_expert": COUNTS[0]}, r"shape \[..., R, E\], got \(4,\)"),
        ({"tokens_per_expert": COUNTS[:, :3]}, "num_experts=3 must be a positive multiple of the 2"),
        ({"tokens_per_expert": COUNTS - 1}, "a count of -1"),
        ({"tokens_per_expert": COUNTS * 2**28}, "a plan of"),
        ({"policy": "moonpe"}, "policy='moonpe' is unknown; choose one of bounded, moonep, static"),
        ({"tau": 0.5}, "tau=0.5 must be at least 1"),
        ({"tau": float("nan")}, "tau=nan"),
        ({"slots": 1.5}, "slots=1.5"),
    ],
)
def test_plan_allocation_refuses(arguments, message):
    with pytest.raises(ContractError, match=message):
        plan_allocation(**({"tokens_per_expert": COUNTS} | arguments))


def test_no_plan_at_all_is_fine():
    assert plan_allocation(torch.zeros(0, 2, 4, dtype=torch.int32)).shape == (0, 2, 4)


@pytest.mark.parametrize(
    ("alloc", "options", "found"),
    [
        ([[12, 0, 0, 0], [4, 4, 2, 2]], {"tau": 1.0, "slots": 2}, None),
        ([[17, 0, -1, 0], [-1, 4, 3, 2]], {}, "is negative"),
        ([[16, 4, 0, 0], [0, 0, 2, 1]], {}, "minus routed tokens = -1"),
        ([[12, 0, 0, 0], [4, 4, 2, 2]], {"slots": 1}, "rank[1] holds 2 remote experts in 1 slots"),
        ([[13, 0, 0, 0], [3, 4, 2, 2]], {"tau": 1.0}, "rank[0] computes 13 tokens, more than ceil(1.0"),
        ([[13, 0, 0, 0], [3, 4, 2, 2]], {"tau": 1.1}, None),
    ],
)
def test_the_checker(alloc, options, found):
    lines = check_allocation(COUNTS, torch.tensor(alloc), **options)
    assert not lines if found is None else any(found in line for line in lines), lines


def test_the_checker_counts_groups_and_padded_rows():
    counts = torch.ones(3, 3, dtype=torch.int64)
    alloc = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert "3 non-empty experts, more than 2*epn = 2" in check_allocation(counts, alloc)[0]
    geometry = Geometry.build(2, 4, 1, 12, token_padding=4)
    wide = torch.tensor([[16, 4, 2, 2], [0, 0, 0, 0]])
    assert any("its shard has" in line for line in check_allocation(COUNTS, wide, geometry=geometry))
    assert "shape" in check_allocation(COUNTS, alloc)[0]
    flat = torch.stack([torch.tensor([[12, 4, 0, 0], [4, 0, 2, 2]]), COUNTS])
    assert "(and 7 more)" in check_allocation(torch.stack([COUNTS, COUNTS]), flat - 100)[1]


def test_exact_balance_has_a_floor_too():
    counts = torch.tensor([[3, 0], [0, 3]])
    assert any(
        "below floor" in line for line in check_allocation(counts, torch.tensor([[3, 1], [0, 2]]), tau=1.0)
    )


def test_a_users_policy(monkeypatch):
    monkeypatch.setattr(allocation, "_POLICIES", dict(allocation._POLICIES))

    @register_policy("keep_home")
    def keep_home(tokens_per_expert, *, tau_thousandths, slots):
        return plan_allocation(tokens_per_expert, policy="static")

    @register_policy("forgetful")
    def forgetful(tokens_per_expert, *, tau_thousandths, slots):
        return torch.zeros_like(tokens_per_expert, dtype=torch.int32)

    assert torch.equal(plan_allocation(COUNTS, policy="keep_home"), plan_allocation(COUNTS, policy="static"))
    with pytest.raises(ContractError, match="policy 'forgetful' broke its contract: expert"):
        plan_allocation(COUNTS, policy="forgetful")
    with pytest.raises(ContractError, match="exists already"):
        register_policy("keep_home")(forgetful)
    with pytest.raises(ContractError, match="identifier"):
        register_policy("not a name")


def test_statistics_by_hand():
    alloc = torch.tensor([[10, 0, 0, 0], [6, 4, 2, 2]])
    statistics = PlanStatistics.unpack(plan_statistics(COUNTS, alloc))
    assert statistics == PlanStatistics(
        total=24,
        max_before=20,
        max_after=14,
        lower_bound=8,
        moved_tokens=10,
        copies=2,
        egress=2,
        ingress=2,
        fan_out=1,
        missed=2,
    )
    assert statistics.imbalance(2) == (20 / 12, 14 / 12)


def test_lower_bound_leaves_the_remainder_on_the_most_loaded():
    counts = torch.tensor([[5, 0, 0], [0, 0, 0], [0, 0, 0]])  # T = 5, caps 2, 2, 1
    statistics = PlanStatistics.unpack(plan_statistics(counts, plan_allocation(counts)))
    assert statistics.lower_bound == statistics.moved_tokens == 3
