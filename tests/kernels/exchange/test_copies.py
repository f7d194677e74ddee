"""Copied experts arrive in their slots, their gradients at home; nothing else is touched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import experts, transfer
from tests.kernels.exchange.loopback import DEVICE, Case, addresses_of, make_case

CASES = {
    "no copies": {"num_ranks": 2, "num_experts": 4, "top_k": 1, "tokens": [0, 0]},
    "one rank": {"num_ranks": 1, "num_experts": 4, "top_k": 2, "tokens": [3]},
    "one hot expert": {
        "num_ranks": 4,
        "num_experts": 8,
        "top_k": 3,
        "tokens": [6, 5, 7, 6],
        "kind": "one_hot_expert",
    },
    "hot home group": {
        "num_ranks": 4,
        "num_experts": 12,
        "top_k": 3,
        "tokens": [8] * 4,
        "kind": "one_hot_home_group",
    },
    "three ranks": {
        "num_ranks": 3,
        "num_experts": 15,
        "top_k": 2,
        "tokens": [9, 3, 30],
        "kind": "rotating_hotspot",
    },
}
# Sizes around a tile of 4096 words (8192 bf16): smaller, one more vector, two tiles.
SIZES = {"no copies": 64, "one rank": 64, "one hot expert": 264, "hot home group": 8200, "three ranks": 16384}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another: three show that they share the work."""
    if DEVICE == "cpu":
        monkeypatch.setattr(experts, "PROGRAMS", 3)


def holders(case: Case) -> transfer.Holders:
    return transfer.find_holders(case.plan.first_row.to(torch.int32).to(DEVICE), case.geometry.slots)


def copies(case: Case) -> list[tuple[int, int, int]]:
    """(rank, slot, expert) of each copy, from the groups of the plan."""
    slots = case.plan.groups[:, case.geometry.experts_per_rank :]
    return [(rank, slot, int(slots[rank, slot])) for rank, slot in (slots >= 0).nonzero().tolist()]


def part_addresses(parts: list[torch.Tensor]) -> torch.Tensor:
    """[R, P] from P stacked tensors [R, ...]."""
    return torch.stack([addresses_of(part) for part in parts], 1)


@pytest.mark.parametrize("name", CASES)
def test_holders_list_every_copy(name):
    case = make_case(**CASES[name])
    found, epn = holders(case), case.geometry.experts_per_rank
    expected: dict[int, list[int]] = {}
    for rank, slot, expert in copies(case):
        expected.setdefault(expert, []).append(rank * case.geometry.slots + slot)
    for expert in range(case.geometry.num_experts):
        count = int(found.counts[expert])
        assert found.holders[expert, :count].tolist() == expected.get(expert, [])
    for home in range(case.geometry.num_ranks):
        mine = [e - home * epn for e in sorted(expected) if e // epn == home]
        assert found.copied[home, : int(found.num_copied[home])].tolist() == mine


@pytest.mark.parametrize("name", CASES)
def test_weights_reach_their_slots(name):
    case = make_case(**CASES[name])
    sizes, size = case.geometry, SIZES[name]
    R, epn = sizes.num_ranks, sizes.experts_per_rank
    weights = [torch.randn(R, epn, size, device=DEVICE).bfloat16() for _ in range(2)]
    pools = [torch.full((R, sizes.slots + 1, size), float("nan"), device=DEVICE).bfloat16() for _ in range(2)]
    before = [pool.clone() for pool in pools]
    transfer.push_copies(case.shards, holders(case), part_addresses(weights), part_addresses(pools), size * 2)
    for part, pool, expected in zip(weights, pools, before, strict=True):
        for rank, slot, expert in copies(case):
            expected[rank, slot] = part[expert // epn, expert % epn]
        assert torch.equal(pool.cpu().view(torch.int16), expected.cpu().view(torch.int16))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16])
def test_gradients_come_home(name, slot_dtype):
    """Added to what is there, in fp32, ranks ascending: equal bit for bit to the same sum in torch."""
    case = make_case(**CASES[name])
    sizes, size = case.geometry, SIZES[name]
    R, epn = sizes.num_ranks, sizes.experts_per_rank
    home = torch.randn(R, epn, size, device=DEVICE)
    pool = torch.full((R, sizes.slots + 1, size), float("nan"), device=DEVICE, dtype=slot_dtype)
    expected = home.clone()
    for rank, slot, expert in copies(case):
        pool[rank, slot] = torch.randn(size)
        expected[expert // epn, expert % epn] += pool[rank, slot]
    transfer.return_gradients(
        case.shards,
        holders(case),
        part_addresses([home]),
        part_addresses([pool]),
        size,
        slot_dtype=slot_dtype,
    )
    assert torch.equal(home, expected)


def test_one_part_of_one_rank_needs_no_table():
    """As between processes: the weights and gradients themselves in place of their addresses."""
    case = make_case(**CASES["one hot expert"])
    sizes, size = case.geometry, SIZES["one hot expert"]
    weights = torch.randn(4, sizes.experts_per_rank, size, device=DEVICE)
    pool = torch.zeros(4, sizes.slots, size, device=DEVICE)
    found = holders(case)
    for rank in range(4):
        one = transfer.Shards(case.shards.addresses, sizes.shard_rows, sizes.top_k, first_rank=rank)
        transfer.push_copies(one, found, weights[rank], part_addresses([pool]), size * 4)
    doubled = weights.clone()
    for rank in range(4):
        one = transfer.Shards(case.shards.addresses, sizes.shard_rows, sizes.top_k, first_rank=rank)
        transfer.return_gradients(one, found, doubled[rank], part_addresses([pool]), size)
    epn = sizes.experts_per_rank
    for expert in range(sizes.num_experts):
        home, place = divmod(expert, epn)
        assert torch.equal(doubled[home, place], weights[home, place] * (1 + int(found.counts[expert])))
    with pytest.raises(ValueError, match="one rank and one part"):
        transfer.return_gradients(one, found, doubled[0].T, part_addresses([pool]), size)


def test_sizes_that_are_no_whole_vectors_are_refused():
    case = make_case(**CASES["one hot expert"])
    at = torch.zeros(4, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"24 bytes.*multiple of 16"):
        transfer.push_copies(case.shards, holders(case), at, at, 24)
    with pytest.raises(ValueError, match=r"12 elements.*multiple of 8"):
        transfer.return_gradients(case.shards, holders(case), at, at, 12)
