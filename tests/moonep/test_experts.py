"""MoonEPExperts against the dense computation, in loopback; fp64 sums of about 100 terms agree to 1e-12."""

from __future__ import annotations

import pytest
import torch
from moe_cases import PATTERNS, Case, dense_results, draw, run_layer

from moonep import ContractError, LoopbackGroup, MoonEPExperts

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def build(case: Case, dtype=torch.float64, **options) -> MoonEPExperts:
    torch.manual_seed(5)
    sizes = (case.num_experts, case.hidden, case.ffn_hidden, case.top_k, case.capacity)
    return MoonEPExperts(*sizes, group=LoopbackGroup(case.num_ranks), dtype=dtype, **options)


def poison(layer: MoonEPExperts) -> None:
    """NaN everywhere in the shared regions: whatever is read must have been written before."""
    space = layer.workspace()
    gradients = space.training_regions()
    for region in (space.rows, space.weights, *space.copies, *gradients[:2], *gradients[2]):
        region.stacked.fill_(torch.nan)


def assert_same(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    for name, values in want.items():
        for a, b in zip(got[name], values, strict=True):
            scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("policy", ["bounded", "moonep", "static"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_equals_dense_in_fp64(num_ranks, policy, pattern):
    case = Case(num_ranks, pattern=pattern)
    layer = build(case, policy=policy)
    poison(layer)
    for seed in range(2):
        ranks = draw(case, torch.float64, seed)
        assert_same(run_layer(layer, ranks), dense_results(ranks, layer.parameters()), torch.float64)
    total, fullest = layer.last_plan.read_statistics.total, layer.last_plan.read_statistics.max_after
    if policy != "static":
        assert fullest == -(-total // num_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_dense_in_narrow_types(num_ranks, dtype):
    case = Case(num_ranks, num_experts=8, hidden=16, ffn_hidden=24, top_k=4, capacity=24)
    layer = build(case, dtype)
    poison(layer)
    ranks = draw(case, dtype)
    got = run_layer(layer, ranks)
    assert {t.dtype for name in ("y", "d_x") for t in got[name]} == {dtype}
    assert_same(got, dense_results(ranks, layer.parameters()), dtype)


def test_slack_fewer_slots_and_padding():
    case = Case(4, num_experts=16, capacity=20, pattern="one_rank_hot")
    for options in ({"tau": 1.2}, {"slots": 1, "max_imbalance": 4.0}, {"slots": 0, "max_imbalance": 4.0}):
        layer = build(case, **options)
        poison(layer)
        ranks = draw(case, torch.float64)
        assert_same(run_layer(layer, ranks), dense_results(ranks, layer.parameters()), torch.float64)


def test_no_tokens_anywhere_and_a_single_token():
    for tokens in ((0, 0, 0, 0), (0, 1, 0, 0)):
        case = Case(4, tokens=tokens)
        layer = build(case)
        ranks = draw(case, torch.float64)
        assert_same(run_layer(layer, ranks), dense_results(ranks, layer.parameters()), torch.float64)


def test_results_do_not_change_from_run_to_run():
    case = Case(4, hidden=16, capacity=20)
    layer = build(case, torch.float32)
    ranks = draw(case, torch.float32)
    first = run_layer(layer, ranks)
    first = {name: [t.clone() for t in values] for name, values in first.items()}
    for _ in range(20):
        again = run_layer(layer, ranks)
        assert all(torch.equal(a, b) for name in first for a, b in zip(first[name], again[name], strict=True))


def test_the_same_seed_gives_the_same_layer_at_any_number_of_ranks():
    one, four = build(Case(1)), build(Case(4))
    for a, b in zip(one.parameters(), four.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(5)
    assert not torch.equal(build(Case(1)).gate_weight, MoonEPExperts(8, 8, 12, 3, 20).gate_weight)


def test_one_tensor_is_cut_over_the_virtual_ranks():
    case = Case(4, tokens=(20, 20, 20, 20))
    layer = build(case)
    ranks = draw(case, torch.float64)
    x, ids, weights = (torch.cat([rank[i].detach() for rank in ranks]) for i in range(3))
    assert layer.capacity == 80
    assert torch.equal(layer(x, ids, weights), torch.cat(layer(*([r[i] for r in ranks] for i in range(3)))))
    few = layer(x[:3], ids[:3], weights[:3])
    assert torch.allclose(few, layer(x, ids, weights)[:3], atol=1e-12)


def test_a_frozen_layer_and_no_grad():
    case = Case(2)
    layer = build(case)
    ranks = draw(case, torch.float64)
    with torch.no_grad():
        y = layer(*([r[i] for r in ranks] for i in range(3)))
    assert not y[0].requires_grad
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    y = layer(*([r[i] for r in ranks] for i in range(3)))
    torch.autograd.backward(y, [r[3] for r in ranks])
    assert all(p.grad is None for p in layer.parameters()) and ranks[0][0].grad is not None


def test_weights_moved_between_forward_and_backward_are_read_where_they_are():
    """DeepSpeed moves p.data into flat buffers: addresses taken at construction would be stale."""
    case = Case(2)
    layer, ranks = build(case), draw(case, torch.float64)
    for parameter in layer.parameters():
        moved = torch.empty(parameter.numel() + 3, dtype=parameter.dtype)[3:].view_as(parameter)
        moved.copy_(parameter.data)
        parameter.data.fill_(torch.nan)
        parameter.data = moved
    assert_same(run_layer(layer, ranks), dense_results(ranks, layer.parameters()), torch.float64)


def test_layers_of_one_size_share_their_regions():
    case = Case(2)
    first, second = build(case), build(case)
    assert first.workspace() is second.workspace()
    x, ids, weights, d_y = (list(column) for column in zip(*draw(case, torch.float64), strict=True))
    middle = first(x, ids, weights)
    torch.autograd.backward(second(middle, ids, weights), d_y)
    want = [t.grad.clone() for t in (*x, *weights, *first.parameters(), *second.parameters())]
    alone = build(Case(2, capacity=21))
    alone.load_state_dict(second.state_dict())
    for leaf in (*x, *weights, *first.parameters()):
        leaf.grad = None
    torch.autograd.backward(alone(first(x, ids, weights), ids, weights), d_y)
    got = [t.grad for t in (*x, *weights, *first.parameters(), *alone.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, i, w: (x[:, :4], i, w), "expected [T, 8]"),
        (lambda x, i, w: (x.float(), i, w), "torch.float32 on cpu"),
        (lambda x, i, w: (x, i[:3], w), "expert_ids has shape [3, 3]; expected [20, 3]"),
        (lambda x, i, w: (x, i.float(), w), "expert_ids is torch.float32"),
        (lambda x, i, w: (x, i, w.long()), "route_weights is torch.int64"),
        (lambda x, i, w: (x, i + 8, w), "is outside 0 to 7"),
        (lambda x, i, w: (x, i - 8, w), "expert id -8"),
        (lambda x, i, w: (x.repeat(2, 1), i.repeat(2, 1), w.repeat(2, 1)), "40 tokens exceed capacity=20"),
    ],
)
def test_bad_arguments_are_named_and_the_next_call_works(change, message):
    case = Case(1, pattern="uniform")
    layer = build(case)
    x, ids, weights, _ = draw(case, torch.float64)[0]
    with pytest.raises(ContractError) as raised:
        layer(*change(x.detach(), ids, weights.detach()))
    assert message in str(raised.value)
    assert layer(x, ids, weights).shape == (20, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy='best'"),
        ({"activation": "relu"}, "activation='relu'"),
        ({"tau": 0.9}, "tau=0.9"),
        ({"slots": 1}, "max_imbalance"),
        ({"memory": "disk"}, "memory='disk'"),
        ({"timeout_s": 0}, "timeout_s=0"),
    ],
)
def test_bad_settings_are_refused_at_construction(options, message):
    with pytest.raises(ContractError) as raised:
        build(Case(4, num_experts=16), **options)
    assert message in str(raised.value)
