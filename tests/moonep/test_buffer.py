"""Buffer and ExpertPools in one process: upstream's walkthrough against a dense computation; misuse."""

from __future__ import annotations

import pytest
import torch
from buffer_cases import PROJECTIONS, draw_experts, make_buffer, make_pools, walkthrough
from moe_cases import PATTERNS, Case, dense_results, draw

from moonep import Buffer, ContractError, LoopbackGroup, RankDisagreement


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("policy", ["static", "moonep", "bounded"])
def test_walkthrough_equals_dense(num_ranks, pattern, policy):
    case = Case(num_ranks, pattern=pattern)
    buffer = make_buffer(case, torch.float64, LoopbackGroup(num_ranks), policy=policy)
    experts, ranks, pools = (
        draw_experts(case, torch.float64),
        draw(case, torch.float64),
        make_pools(buffer, case),
    )
    truth = dense_results(ranks, [experts[name] for name in PROJECTIONS])
    for zero_copy in (False, True):
        found = walkthrough(buffer, pools, ranks, experts, zero_copy)
        for name, values in truth.items():
            for got, want in zip(found[name], values, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_views_follow_the_tokens_of_the_step_not_the_capacity():
    case = Case(2, capacity=64, tokens=(64, 64), pattern="uniform")
    buffer = make_buffer(case, torch.float32, LoopbackGroup(2))
    experts, pools = draw_experts(case, torch.float32), make_pools(buffer, case)
    sizes = {}
    for tokens in ((64, 64), (3, 5), (0, 0)):
        ranks = draw(Case(2, capacity=64, tokens=tokens, pattern="uniform"), torch.float32)
        found = walkthrough(buffer, pools, ranks, experts, False)
        assert found["views"] == [found["plan"].nvs_s] * 2
        assert max(found["plan"].used_rows) <= found["plan"].nvs_s
        sizes[tokens] = found["plan"].nvs_s
    assert sizes[64, 64] == buffer.geometry.shard_rows
    # 8 tokens x top-3 over two ranks are 12 rows; 8 groups of 4 pad by at most 24: both multiples of 4.
    assert sizes[3, 5] == 12 + 24 and sizes[0, 0] == 24


@pytest.mark.parametrize("policy", ["static", "bounded"])
def test_rows_lie_in_their_experts_group_and_padding_is_zero(policy):
    case = Case(2, pattern="mixed", tokens=(20, 13))
    buffer = make_buffer(case, torch.float32, LoopbackGroup(2), policy=policy)
    x, ids, w, _ = zip(*draw(case, torch.float32), strict=True)
    for view in buffer.hidden_nvsh_buffer_view + buffer.router_weight_buffer_view:
        view.fill_(torch.nan)
    rows, scalars, ends, plan = buffer.dispatch(x, w, ids, total_num_tokens=33)
    flat_rows, flat_scalars = torch.stack(rows).flatten(0, 1), torch.stack(scalars).flatten()
    taken = torch.zeros(len(flat_rows), dtype=torch.bool)
    for route, own, own_ids, own_weights in zip(plan.routes, x, ids, w, strict=True):
        rank = route.destinations // buffer.geometry.shard_rows
        row = route.destinations % buffer.geometry.shard_rows
        place = rank * plan.nvs_s + row
        taken[place.flatten()] = True
        assert torch.equal(flat_rows[place], own.detach()[:, None].expand(-1, case.top_k, -1))
        assert torch.equal(flat_scalars[place], own_weights.detach())
        for r in range(2):
            group = torch.searchsorted(ends[r], row[rank == r], right=True)
            assert torch.equal(plan.layout.groups[r][group], own_ids[rank == r].long())
    assert int(taken.sum()) == 33 * case.top_k, "every entry has a row of its own"
    for r in range(2):
        assert ends[r].shape == (case.num_experts,) and ends[r].dtype == torch.int32
        inside = slice(r * plan.nvs_s, r * plan.nvs_s + int(ends[r][-1]))
        padding = ~taken[inside]
        assert not flat_rows[inside][padding].any() and not flat_scalars[inside][padding].any()


def test_stale_views_are_refused_in_debug_mode():
    case = Case(1, pattern="uniform")
    buffer = make_buffer(case, torch.float32, debug=True)
    ((x, ids, w, _),) = draw(case, torch.float32)
    rows, scalars, _, plan = buffer.dispatch(x, w, ids, zero_copy=True, router_weights_zero_copy=True)
    part = rows[2:4]
    rows.mul_(2)
    y, _, _ = buffer.combine(plan, rows, scalars, zero_copy=True, router_weights_zero_copy=True)
    torch.testing.assert_close(y, 2 * case.top_k * x.detach())
    for use in (
        lambda: rows + 1,
        lambda: torch.relu(part),
        lambda: torch.cat([part, part]),
        lambda: scalars.sum(),
        lambda: buffer.combine(plan, rows, zero_copy=True),
    ):
        with pytest.raises(ContractError, match="stale view: dispatch 1 returned it"):
            use()
    fresh, *_ = buffer.dispatch(x, plan=plan, zero_copy=True)
    assert type(fresh + 0) is torch.Tensor


def test_async_finish_appends_an_event_that_is_done():
    case = Case(1)
    buffer = make_buffer(case, torch.bfloat16)
    ((x, ids, w, _),) = draw(case, torch.bfloat16)
    *_, plan, event = buffer.dispatch(x, w, ids, async_finish=True)
    event.wait()
    event.synchronize()
    assert event.query()
    rows, _, _, _ = buffer.dispatch(x, plan=plan)
    y, weights, event = buffer.combine(plan, rows, async_finish=True)
    assert event.query() and weights is None and y.dtype == torch.bfloat16


def test_real_tensors_serve_as_pools_in_one_process():
    case = Case(2, pattern="one_hot", tokens=(20, 0))
    buffer = make_buffer(case, torch.float32, LoopbackGroup(2))
    experts = draw_experts(case, torch.float32)
    x, ids, w, _ = zip(*draw(case, torch.float32), strict=True)
    *_, plan = buffer.dispatch(x, w, ids, total_num_tokens=20)
    copied = {n: torch.zeros(2, 4, *experts[n].shape[1:]) for n in PROJECTIONS}
    halves = {n: list(experts[n].chunk(2)) for n in PROJECTIONS}
    buffer.prefetch_weight(
        plan=plan,
        **{f"local_{n}_weight": halves[n] for n in PROJECTIONS},
        **{f"{n}_prefetch_buffer": copied[n] for n in PROJECTIONS},
    )
    assert plan.copies
    for rank, slot, expert in plan.copies:
        assert all(torch.equal(copied[n][rank, slot], experts[n][expert]) for n in PROJECTIONS)
    grads = {n: [torch.zeros_like(half) for half in halves[n]] for n in PROJECTIONS}
    buffer.reduce_grad(
        plan=plan,
        **{f"local_{n}_grad": grads[n] for n in PROJECTIONS},
        **{f"{n}_reduce_buffer": copied[n] for n in PROJECTIONS},
    )
    moved = [e for _, _, e in plan.copies]
    for n in PROJECTIONS:
        assert not copied[n].any(), "consumed slots are zeroed"
        for e in range(case.num_experts):
            torch.testing.assert_close(grads[n][e // 4][e % 4], moved.count(e) * experts[n][e])
    with pytest.raises(ContractError, match="down: the buffer is missing"):
        buffer.copy_experts(plan, {"down": (halves["down"], None)})
    with pytest.raises(ContractError, match="same shape and dtype"):
        buffer.copy_experts(plan, {"down": (halves["down"], copied["down"].double())})
    with pytest.raises(ContractError, match="slots a rank; expected at least 4"):
        buffer.copy_experts(plan, {"down": (halves["down"], copied["down"][:, :1])})


BAD_CALLS = {
    "expert id 8 is outside 0 to 7": lambda b, x, w, i: b.dispatch(x, w, i * 0 + 8),
    "expert id -1 is outside": lambda b, x, w, i: b.dispatch(x, w, i * 0 - 1),
    "topk_experts_sk is torch.float32": lambda b, x, w, i: b.dispatch(x, w, i.float()),
    "topk_experts_sk has shape [19, 3]": lambda b, x, w, i: b.dispatch(x, w, i[:-1]),
    "topk_experts_sk is missing": lambda b, x, w, i: b.dispatch(x, w),
    "tokens_per_expert[0]=0, but": lambda b, x, w, i: b.dispatch(x, w, i * 0, torch.zeros(8).int()),
    "tokens_per_expert is torch.float32": lambda b, x, w, i: b.dispatch(x, w, i, torch.zeros(8)),
    "hidden_sh has shape [20, 7]; expected [s, 8]": lambda b, x, w, i: b.dispatch(x[:, 1:], w, i),
    "hidden_sh is torch.float64": lambda b, x, w, i: b.dispatch(x.double(), w, i),
    "hidden_sh is a NoneType": lambda b, x, w, i: b.dispatch(None, w, i),
    "route_weights_sk has shape": lambda b, x, w, i: b.dispatch(x, w[:, 1:], i),
    "route_weights_sk is torch.int32": lambda b, x, w, i: b.dispatch(x, w.int(), i),
    "40 tokens exceed S=20": lambda b, x, w, i: b.dispatch(*(t.repeat(2, 1) for t in (x, w, i))),
    "total_num_tokens=7, but the ranks hold 20": lambda b, x, w, i: b.dispatch(x, w, i, total_num_tokens=7),
    "total_num_tokens=-5": lambda b, x, w, i: b.dispatch(x, w, i, total_num_tokens=-5),
    "the plan was made for 20": lambda b, x, w, i: b.dispatch(x[:5], plan=b.dispatch(x, w, i)[3]),
    "came with a plan": lambda b, x, w, i: b.dispatch(x, w, i, plan=b.dispatch(x, w, i)[3]),
    "hidden_nvsh has shape": lambda b, x, w, i: b.combine(b.dispatch(x, w, i)[3], x[1:]),
    "hidden_nvsh is not the view": lambda b, x, w, i: b.combine(*b.dispatch(x, w, i)[3::-3], zero_copy=True),
    "not made by this Buffer": lambda b, x, w, i: b.combine("plan", x),
    "2 tensors came": lambda b, x, w, i: b.dispatch([x, x], w, i),
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_bad_arguments_are_named_and_the_buffer_goes_on(words):
    case = Case(1, pattern="uniform")
    buffer = make_buffer(case, torch.float32)
    ((x, ids, w, _),) = draw(case, torch.float32)
    with pytest.raises(ContractError) as raised:
        BAD_CALLS[words](buffer, x, w, ids)
    assert words in str(raised.value)
    rows, _, _, plan = buffer.dispatch(x, w, ids)
    torch.testing.assert_close(buffer.combine(plan, rows)[0], case.top_k * x.detach())


def test_plans_belong_to_one_buffer():
    case = Case(1)
    first, second = (make_buffer(case, torch.float32) for _ in range(2))
    ((x, ids, w, _),) = draw(case, torch.float32)
    plan = first.dispatch(x, w, ids)[3]
    with pytest.raises(ContractError, match="not made by this Buffer"):
        second.dispatch(x, plan=plan)


def test_ranks_with_different_s_must_say_how_many_tokens_there_are():
    case = Case(2, tokens=(4, 3))
    buffer = make_buffer(case, torch.float32, LoopbackGroup(2))
    x, ids, w, _ = zip(*draw(case, torch.float32), strict=True)
    with pytest.raises(RankDisagreement, match=r"num_tokens.*rank 0: 4, rank 1: 3"):
        buffer.dispatch(x, w, ids)
    assert buffer.dispatch(x, w, ids, total_num_tokens=7)[3].num_tokens == 7


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ep_ranks": 2}, "num_ep_ranks=2, but the group has 1"),
        ({"E": 0}, "num_experts=0"),
        ({"H": 0}, "H=0"),
        ({"K": 9}, "top_k=9 exceeds"),
        ({"S": 0}, "capacity=0"),
        ({"policy": "best"}, "policy='best' is unknown"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"memory": "ram"}, "memory='ram' is unknown"),
        ({"token_padding": 0}, "token_padding=0"),
    ],
)
def test_construction_names_what_is_wrong(options, words):
    with pytest.raises(ContractError, match=words):
        Buffer(**{"S": 8, "H": 4, "K": 2, "E": 8, "num_ep_ranks": 1, "device": "cpu", **options})


def test_pools_and_buffers_refuse_wrong_names_shapes_and_use_after_destroy():
    case = Case(1)
    buffer = make_buffer(case, torch.float32)
    with pytest.raises(ContractError, match="shapes="):
        make_pools(buffer, Case(1, ffn_hidden=0))
    pools = make_pools(buffer, case)
    with pytest.raises(ContractError, match="no projection 'gat'"):
        pools.weights("gat")
    pools.destroy()
    with pytest.raises(ContractError, match="pools were destroyed"):
        pools.weights("gate")
    buffer.destroy()
    buffer.destroy()
    assert buffer.destroyed
    with pytest.raises(ContractError, match="Buffer was destroyed"):
        buffer.dispatch(torch.zeros(1, 8))
    with pytest.raises(ContractError, match="Buffer was destroyed"):
        _ = buffer.hidden_nvsh_buffer_view
