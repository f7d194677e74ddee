"""The exchange by kernels gives what the exchange by torch gives: bitwise, but for the rounding of sums."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import experts
from moonep import workspace
from moonep.errors import CapabilityError, ContractError
from moonep.exchange import device
from moonep.exchange.device import DeviceExchange
from moonep.exchange.stacked import StackedExchange
from moonep.experts import MoonEPExperts
from moonep.plan import Plan, make_plan
from moonep.planning import Geometry
from moonep.symmetric.loopback import LoopbackGroup, LoopbackMemory
from tests.moonep.moe_cases import Case, dense, draw
from tests.moonep.planning.routing import histogram, popularity, routed_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "one hot expert": (4, 8, 2, [2, 1, 3, 0], "one_hot_expert"),
    "one rank": (1, 4, 2, [3], "uniform"),
    "hot home group": (2, 6, 3, [4, 2], "one_hot_home_group"),
}
WIDTH = 8


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs programs one after another."""
    if DEVICE == "cpu":
        monkeypatch.setattr(experts, "PROGRAMS", 3)


def plan_of(name: str) -> Plan:
    num_ranks, num_experts, top_k, tokens, kind = CASES[name]
    geometry = Geometry.build(num_ranks, num_experts, top_k, max(tokens), token_padding=2)
    ids = routed_ids(popularity(kind, num_ranks, num_experts, 3), tokens, top_k, True, 3)
    counts = histogram(ids, num_experts).to(torch.int64)
    return make_plan(geometry, "bounded", counts, ids, range(num_ranks))


def both(plan: Plan) -> list[StackedExchange | DeviceExchange]:
    ranks = plan.geometry.num_ranks
    reference = StackedExchange(LoopbackMemory(ranks), plan.geometry)
    tested = DeviceExchange(LoopbackMemory(ranks, DEVICE), plan.geometry)
    for exchange in (reference, tested):
        exchange.prepare(plan)
    return [reference, tested]


def used(plan: Plan, region) -> list[torch.Tensor]:
    """The rows of every rank that a plan defines."""
    return [region.view(rank)[:rows].cpu() for rank, rows in enumerate(plan.used_rows)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_and_scalars(name, dtype):
    plan = plan_of(name)
    tokens, top_k = CASES[name][3], plan.geometry.top_k
    scalar = torch.float64 if dtype == torch.float64 else torch.float32
    rows = [torch.randn(s, WIDTH).to(dtype) for s in tokens]
    scalars = [torch.rand(s, top_k).to(scalar) for s in tokens]
    shards, weights, sums, taken = [], [], [], []
    for exchange in both(plan):
        device = exchange.memory.device
        shard, places = exchange.row_region(WIDTH, dtype), exchange.scalar_region(scalar)
        exchange.put_rows(plan, [x.to(device) for x in rows], shard)
        exchange.put_scalars(plan, [w.to(device) for w in scalars], places)
        exchange.complete("dispatch")
        shards.append(used(plan, shard))
        weights.append(used(plan, places))
        sums.append([s.double().cpu() for s in exchange.sum_rows(plan, shard)])
        taken.append(exchange.take_scalars(plan, places))
    assert equal(*shards) and equal(*weights) and equal(*taken)
    # Each token's sum is top_k times its row; bf16 partial sums and results round once each.
    tolerance = 2 * 2**-8 if dtype == torch.bfloat16 else 1e-14
    for ours, theirs, x in zip(sums[1], sums[0], rows, strict=True):
        assert (ours - theirs).abs().le(tolerance * top_k * x.double().abs()).all()


@pytest.mark.parametrize("name", CASES)
def test_weights_and_gradients(name):
    plan = plan_of(name)
    sizes = plan.geometry
    weights = [torch.randn(sizes.experts_per_rank, 4, WIDTH) for _ in range(sizes.num_ranks)]
    pools, gradients = [], []
    for exchange in both(plan):
        device = exchange.memory.device
        own = [w.to(device) for w in weights]
        pool = exchange.memory.allocate((sizes.slots, 4, WIDTH), torch.float32)
        exchange.put_weights(plan, own, pool)
        exchange.complete("copies")
        pools.append([pool.view(rank) for rank in range(sizes.num_ranks)])
        into = [w.clone() for w in own]
        exchange.take_gradients(plan, pool, into)
        gradients.append(into)
    assert equal(*pools) and equal(*gradients)


def test_rows_that_are_no_whole_vectors_are_refused():
    plan = plan_of("one rank")
    with pytest.raises(ContractError, match=r"hidden=6 .* divisible by 8"):
        both(plan)[1].row_region(6, torch.bfloat16)


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(device, "triton_available", lambda: False)
    with pytest.raises(CapabilityError, match=r"needs Triton.*pip install"):
        DeviceExchange(LoopbackMemory(1), Geometry.build(1, 2, 1, 4))


def test_the_layer_on_these_kernels_matches_the_dense_computation(monkeypatch):
    """MoonEPExperts in loopback, forward and backward, through this exchange; fp64, so to 1e-12."""
    monkeypatch.setattr(workspace, "make_exchange", DeviceExchange)
    monkeypatch.setattr(workspace, "_workspaces", {})
    case = Case(num_ranks=2, num_experts=4, top_k=2, capacity=4, tokens=(4, 3))
    layer = MoonEPExperts(
        case.num_experts,
        case.hidden,
        case.ffn_hidden,
        case.top_k,
        case.capacity,
        group=LoopbackGroup(2),
        dtype=torch.float64,
        device=DEVICE,
    )
    ranks = [tuple(t.detach().to(DEVICE) for t in rank) for rank in draw(case, torch.float64)]
    x, weights = ([rank[i].requires_grad_() for rank in ranks] for i in (0, 2))
    y = layer(x, [rank[1] for rank in ranks], weights)
    sum((out * rank[3]).sum() for out, rank in zip(y, ranks, strict=True)).backward()
    parameters = [layer.gate_weight, layer.up_weight, layer.down_weight]
    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    for place, (_, ids, _, d_y) in enumerate(ranks):
        x_leaf, w_leaf = (t[place].detach().clone().requires_grad_() for t in (x, weights))
        expected = dense(x_leaf, ids, w_leaf, *leaves)
        (expected * d_y).sum().backward()
        torch.testing.assert_close(y[place], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x[place].grad, x_leaf.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weights[place].grad, w_leaf.grad, rtol=1e-12, atol=1e-12)
    for parameter, leaf in zip(parameters, leaves, strict=True):
        torch.testing.assert_close(parameter.grad, leaf.grad, rtol=1e-12, atol=1e-12)


def test_two_regions_arrive_together():
    """As in the backward pass: rows and their gradients by one plan before one barrier."""
    plan = plan_of("hot home group")
    tokens = CASES["hot home group"][3]
    first = [torch.randn(s, WIDTH) for s in tokens]
    second = [torch.randn(s, WIDTH) for s in tokens]
    shards = []
    for exchange in both(plan):
        device = exchange.memory.device
        regions = [exchange.row_region(WIDTH, torch.float32) for _ in range(2)]
        for rows, region in zip((first, second), regions, strict=True):
            exchange.put_rows(plan, [x.to(device) for x in rows], region)
        exchange.complete("backward dispatch")
        shards.append([part for region in regions for part in used(plan, region)])
    assert equal(*shards)
