"""Dispatch is bitwise: every row at all its places, padding zero, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import transfer
from tests.kernels.exchange.loopback import Case, make_case, poisoned

CASES = {
    "one rank": {"num_ranks": 1, "num_experts": 3, "top_k": 2, "tokens": [5]},
    "duplicates of an expert": {
        "num_ranks": 2,
        "num_experts": 4,
        "top_k": 3,
        "tokens": [6, 7],
        "duplicates": True,
    },
    "a rank without tokens": {"num_ranks": 2, "num_experts": 6, "top_k": 4, "tokens": [0, 9]},
    "no tokens at all": {"num_ranks": 2, "num_experts": 4, "top_k": 2, "tokens": [0, 0]},
    "one hot expert": {
        "num_ranks": 4,
        "num_experts": 8,
        "top_k": 3,
        "tokens": [3, 1, 4, 0],
        "kind": "one_hot_expert",
    },
    "empty experts": {
        "num_ranks": 4,
        "num_experts": 12,
        "top_k": 4,
        "tokens": [3, 3, 3, 3],
        "kind": "empty_experts",
    },
    "fp32 rows": {
        "num_ranks": 2,
        "num_experts": 4,
        "top_k": 2,
        "tokens": [4, 5],
        "dtype": torch.float32,
        "width": 12,
    },
    "static": {"num_ranks": 4, "num_experts": 8, "top_k": 2, "tokens": [2, 3, 1, 3], "policy": "static"},
    "padding 24": {"num_ranks": 2, "num_experts": 4, "top_k": 2, "tokens": [3, 5], "padding": 24},
    "no padding": {"num_ranks": 2, "num_experts": 4, "top_k": 2, "tokens": [3, 5], "padding": 1},
}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Compares NaN with NaN."""
    return x.cpu().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def expected_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights of all shards after a dispatch into poison."""
    sizes = case.geometry
    rows = torch.full_like(case.regions["rows"], float("nan")).cpu()
    weights = torch.full_like(case.regions["weights"], float("nan")).cpu()
    for rank in range(sizes.num_ranks):
        begin = 0
        for group, end in enumerate(case.plan.offsets[rank].tolist()):
            first = begin + int(case.plan.group_rows[rank, group])
            rows[rank, first:end], weights[rank, first:end] = 0, 0
            begin = end
    for source, token, k, rank, row in case.entries():
        rows[rank, row] = case.x[source, token].cpu()
        weights[rank, row] = case.weights[source, token, k].cpu()
    return rows, weights


@pytest.mark.parametrize("name", CASES)
def test_rows_and_weights_lie_where_the_plan_says(name):
    case = make_case(**CASES[name])
    case.push()
    case.replicate()
    rows, weights = expected_rows(case)
    assert torch.equal(bits(case.regions["rows"]), bits(rows))
    assert torch.equal(bits(case.regions["weights"]), bits(weights))


@pytest.mark.parametrize("name", ["duplicates of an expert", "one hot expert"])
def test_a_row_crosses_to_a_rank_once(name):
    """Before replication a rank holds exactly one row of each token of another rank."""
    case = make_case(**CASES[name])
    case.push()
    rows, _ = expected_rows(case)
    arrived = (bits(case.regions["rows"]) == bits(rows)).all(-1)
    places: dict[tuple[int, int, int], list[bool]] = {}
    for source, token, _, rank, row in case.entries():
        places.setdefault((source, token, rank), []).append(bool(arrived[rank, row]))
    assert any(len(there) > 1 for there in places.values())
    for (source, _, rank), there in places.items():
        assert sum(there) == (len(there) if source == rank else 1)


def test_a_saved_plan_needs_no_records():
    """Dispatching other rows with records=False uses those the shard still holds; weights are optional."""
    case = make_case(**CASES["duplicates of an expert"])
    case.push()
    case.replicate()
    kept = {name: case.regions[name].clone() for name in ("weights", "origins", "lists")}
    case.x = torch.flip(case.x, (1,)).contiguous()
    case.regions["rows"].copy_(poisoned(tuple(case.regions["rows"].shape), case.x.dtype))
    transfer.push(
        case.shards,
        case.x,
        case.targets,
        None,
        case.offsets,
        case.group_rows,
        token_padding=case.padding,
        records=False,
    )
    case.replicate()
    assert torch.equal(bits(case.regions["rows"]), bits(expected_rows(case)[0]))
    for name, before in kept.items():
        assert torch.equal(bits(case.regions[name]), bits(before)), name


@pytest.mark.parametrize("name", ["a rank without tokens", "padding 24", "no padding"])
def test_weights_alone(name):
    case = make_case(**CASES[name])
    transfer.scatter_weights(
        case.shards, case.weights, case.targets, case.offsets, case.group_rows, token_padding=case.padding
    )
    assert torch.equal(bits(case.regions["weights"]), bits(expected_rows(case)[1]))


def test_ranks_one_at_a_time_give_the_same():
    """A launch for each rank, as between processes, fills the same shards as one launch for all."""
    sizes = CASES["duplicates of an expert"]
    together, apart = make_case(**sizes), make_case(**sizes)
    together.push()
    together.replicate()
    for step in ("push", "replicate"):
        for rank in range(2):
            one = transfer.Shards(
                apart.shards.addresses, apart.geometry.shard_rows, apart.geometry.top_k, first_rank=rank
            )
            if step == "replicate":
                transfer.replicate(one, apart.offsets, apart.x.shape[-1] * apart.x.element_size())
                continue
            transfer.push(
                one,
                apart.x[rank : rank + 1],
                apart.targets[rank : rank + 1],
                apart.weights[rank : rank + 1],
                apart.offsets,
                apart.group_rows,
                token_padding=apart.padding,
            )
    assert torch.equal(bits(together.regions["rows"]), bits(apart.regions["rows"]))


def test_rows_that_are_no_whole_vectors_are_refused():
    case = make_case(num_ranks=1, num_experts=2, top_k=1, tokens=[2], width=20)
    with pytest.raises(ValueError, match=r"40 bytes.*multiple of 16"):
        case.push()


def test_nothing_runs_after_an_abort():
    case = make_case(**CASES["one hot expert"])
    case.shards = transfer.Shards(
        case.shards.addresses, case.geometry.shard_rows, 3, played=4, controlled=True
    )
    case.regions["control"][2, 4] = 1  # the abort word of rank 2
    before = case.regions["rows"].clone()
    case.push()
    written = (bits(case.regions["rows"]) != bits(before)).any(-1)
    for source, _, _, rank, row in case.entries():
        if source == 2:
            assert not written[rank, row]
    assert written.any()
