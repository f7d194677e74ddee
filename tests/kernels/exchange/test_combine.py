"""Combine against a sum in fp64: every token's rows, weighted, over ranks; bits equal at every repetition."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import transfer
from tests.kernels.exchange.loopback import DEVICE, Case, make_case

CASES = {
    "one rank": {"num_ranks": 1, "num_experts": 3, "top_k": 2, "tokens": [4]},
    "duplicates of an expert": {
        "num_ranks": 2,
        "num_experts": 4,
        "top_k": 3,
        "tokens": [4, 5],
        "duplicates": True,
    },
    "a rank without tokens": {"num_ranks": 2, "num_experts": 6, "top_k": 4, "tokens": [0, 5]},
    "one hot expert": {
        "num_ranks": 4,
        "num_experts": 8,
        "top_k": 3,
        "tokens": [3, 1, 2, 0],
        "kind": "one_hot_expert",
    },
    "fp32 sums of bf16 rows": {
        "num_ranks": 4,
        "num_experts": 8,
        "top_k": 3,
        "tokens": [2, 3, 1, 2],
        "partial_dtype": torch.float32,
    },
    "fp32": {
        "num_ranks": 2,
        "num_experts": 4,
        "top_k": 2,
        "tokens": [3, 4],
        "dtype": torch.float32,
        "width": 12,
    },
    "fp64": {
        "num_ranks": 2,
        "num_experts": 4,
        "top_k": 2,
        "tokens": [3, 4],
        "dtype": torch.float64,
        "width": 6,
    },
}
# One rounding of each partial sum and one of the result, to the rows' dtype; sums themselves in fp32.
TOLERANCE = {torch.bfloat16: 2 * 2**-8, torch.float32: 8 * 2**-24, torch.float64: 1e-14}


def outputs(case: Case) -> torch.Tensor:
    """Experts' outputs [R, NvS, H]: random in used rows, zero in padding, NaN in the tails."""
    rows = case.regions["rows"]
    y = torch.full(rows.shape, float("nan"), dtype=torch.float64)
    for rank in range(case.geometry.num_ranks):
        used = int(case.plan.offsets[rank, -1])
        y[rank, :used] = torch.randn(used, rows.shape[-1], dtype=torch.float64)
    return y.to(rows.dtype).to(DEVICE)


def combine(case: Case, y: torch.Tensor, weighted: bool) -> torch.Tensor:
    case.regions["rows"].copy_(y)
    width, dtype, partial = y.shape[-1], y.dtype, case.regions["partials"].dtype
    transfer.presum(case.shards, case.offsets, width, dtype, weighted=weighted, partial_dtype=partial)
    sources = transfer.find_sources(case.shards, case.targets, width, dtype, partial)
    weights = case.weights if weighted else None
    return transfer.final_sum(case.shards, sources, weights, width, dtype, partial_dtype=partial)


def reference(case: Case, y: torch.Tensor, weighted: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in fp64 and the sum of magnitudes, which scales its rounding error."""
    y = y.double().cpu()
    total = torch.zeros(case.x.shape, dtype=torch.float64)
    size = torch.zeros_like(total)
    for source, token, k, rank, row in case.entries():
        value = y[rank, row] * (case.weights[source, token, k].double().cpu() if weighted else 1)
        total[source, token] += value
        size[source, token] += value.abs()
    return total, size


@pytest.mark.parametrize("name", ["a rank without tokens", "one hot expert"])
def test_only_several_rows_are_summed_and_sent(name):
    """A token's only row on another rank is read there: no sum of it is sent."""
    case = make_case(**CASES[name])
    case.push()
    combine(case, outputs(case), weighted=False)
    sent = int((~case.regions["partials"].isnan()).any(-1).sum())
    places: dict[tuple[int, int, int], int] = {}
    for source, token, _, rank, _ in case.entries():
        if source != rank:
            places[source, token, rank] = places.get((source, token, rank), 0) + 1
    assert sent == sum(n > 1 for n in places.values()) < len(places)


@pytest.mark.parametrize("name", CASES)
def test_sums_match_fp64(name):
    case = make_case(**CASES[name])
    case.push()
    y = outputs(case)
    for weighted in (True, False) if name in ("one hot expert", "fp32 sums of bf16 rows") else (True,):
        out = combine(case, y, weighted)
        expected, size = reference(case, y, weighted)
        assert out.dtype == y.dtype
        error = (out.double().cpu() - expected).abs()
        assert (error <= TOLERANCE[y.dtype] * size).all(), error.max()


def test_fp32_partial_sums_round_once():
    """With fp32 partial sums a bf16 result is the fp64 sum rounded once, up to the rounding of fp32 sums."""
    case = make_case(**CASES["fp32 sums of bf16 rows"])
    case.push()
    y = outputs(case)
    expected, size = reference(case, y, True)
    error = (combine(case, y, True).double().cpu() - expected).abs()
    assert (error <= 2**-8 * (1 + 2**-8) * expected.abs() + 8 * 2**-24 * size).all()


def test_repeats_bitwise_and_leaves_the_outputs_alone():
    case = make_case(**CASES["duplicates of an expert"])
    case.push()
    y = outputs(case)
    first = combine(case, y, True)
    assert torch.equal(case.regions["rows"].nan_to_num(7), y.nan_to_num(7))
    case.regions["partials"].fill_(float("nan"))
    assert torch.equal(first, combine(case, y, True))


def test_absent_tokens_become_zero():
    case = make_case(**CASES["a rank without tokens"])
    case.push()
    assert not combine(case, outputs(case), True)[0].any()


@pytest.mark.parametrize("name", ["duplicates of an expert", "a rank without tokens"])
def test_weights_come_back(name):
    """What the places of the entries hold, in the order of the entries: the gradients of route weights."""
    case = make_case(**CASES[name])
    values = torch.randn(case.regions["weights"].shape)
    case.regions["weights"].copy_(values)
    got = transfer.gather_weights(case.shards, case.targets)
    expected = torch.zeros(got.shape)
    for source, token, k, rank, row in case.entries():
        expected[source, token, k] = values[rank, row]
    assert torch.equal(got.cpu(), expected)
