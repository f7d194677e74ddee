"""The walkthrough of upstream's README on a Buffer and ExpertPools, for the ranks that a process plays."""

from __future__ import annotations

import torch
from moe_cases import Case

from kernels.moe import naive_situ_glu
from moonep import Buffer, ExpertPools

PROJECTIONS = ("gate", "up", "down")


def make_buffer(case: Case, dtype: torch.dtype, group=None, **options) -> Buffer:
    return Buffer(
        case.capacity,
        case.hidden,
        case.top_k,
        case.num_experts,
        case.num_ranks,
        group=group,
        **{"token_padding": 4, "dtype": dtype, "device": "cpu", **options},
    )


def make_pools(buffer: Buffer, case: Case) -> ExpertPools:
    wide, narrow = (case.ffn_hidden, case.hidden), (case.hidden, case.ffn_hidden)
    return ExpertPools(buffer, shapes={"gate": wide, "up": wide, "down": narrow})


def draw_experts(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All E experts: gate, up `[E, Hi, H]`, down `[E, H, Hi]`."""
    generator = torch.Generator().manual_seed(11)
    shapes = [(case.ffn_hidden, case.hidden)] * 2 + [(case.hidden, case.ffn_hidden)]
    return {
        name: (torch.randn(case.num_experts, *shape, generator=generator, dtype=torch.float64) / 3).to(dtype)
        for name, shape in zip(PROJECTIONS, shapes, strict=True)
    }


def listed(value) -> list:
    return value if isinstance(value, list) else [value]


def grouped(rows, scalars, ends, weights) -> torch.Tensor:
    """Each group's rows through its expert, times their route weights; nothing after the last end is read."""
    out, first = rows * 0, 0  # a graph even where no group has rows; undefined rows stay undefined
    for g, end in enumerate(ends.tolist()):
        if end > first:
            x = rows[first:end]
            gate, up, down = (weights[name][g] for name in PROJECTIONS)
            y = naive_situ_glu(x @ gate.T, x @ up.T) @ down.T
            out = torch.index_put(out, (torch.arange(first, end),), scalars[first:end, None] * y)
            first = end
    return out


def walkthrough(
    buffer: Buffer, pools: ExpertPools, ranks: list, experts, zero_copy: bool, total: int | None = None
) -> dict[str, list]:
    """Forward and backward by hand; results are named as those of `moe_cases.dense_results`.

    `total`: tokens of all ranks, where not all ranks are here.
    """
    alone = len(ranks) == 1
    total = sum(len(r[0]) for r in ranks) if total is None else total
    x, ids, w, d_y = ([r[i].detach() for r in ranks] for i in range(4))
    give = (lambda ts: ts[0]) if alone else (lambda ts: ts)
    epn = buffer.geometry.experts_per_rank
    for view in listed(buffer.hidden_nvsh_buffer_view) + listed(buffer.router_weight_buffer_view):
        view.fill_(torch.nan)
    for name in PROJECTIONS:
        for place, rank in enumerate(buffer.local_ranks):
            listed(pools.weights(name))[place].fill_(torch.nan)
            listed(pools.staging(name))[place].copy_(experts[name][rank * epn : (rank + 1) * epn])
            listed(pools.local_grads(name))[place].zero_()
    counts = [torch.bincount(i.flatten(), minlength=buffer.geometry.num_experts).int() for i in ids]
    rows, scalars, ends, plan = buffer.dispatch(
        give(x), give(w), give(ids), give(counts), zero_copy=zero_copy, total_num_tokens=total
    )
    pools.push(plan)
    saved, outputs = [], []
    for place, (h, s, e) in enumerate(zip(listed(rows), listed(scalars), listed(ends), strict=True)):
        weights = {n: listed(pools.weights(n))[place].clone().requires_grad_() for n in PROJECTIONS}
        leaf, scalar = h.detach().clone().requires_grad_(), s.detach().clone().requires_grad_()
        with torch.enable_grad():
            out = grouped(leaf, scalar, e, weights)
        saved.append((out, leaf, scalar, weights))
        if zero_copy:
            h.copy_(out.detach())
        outputs.append(h if zero_copy else out.detach())
    y, gathered, event = buffer.combine(
        plan=plan, hidden_nvsh=give(outputs), route_weights_nvs=scalars, zero_copy=zero_copy
    )
    assert event is None and all(torch.equal(a, b) for a, b in zip(listed(gathered), w, strict=True))
    grads, _, none, same = buffer.dispatch(give(d_y), plan=plan)
    assert none is None and same is plan
    d_rows, d_scalars = [], []
    for place, ((out, leaf, scalar, weights), g) in enumerate(zip(saved, listed(grads), strict=True)):
        leaves = (leaf, scalar, *weights.values())
        d_out = defined(g, listed(ends)[place])
        found = torch.autograd.grad(out, leaves, d_out, materialize_grads=True)
        d_rows.append(found[0])
        d_scalars.append(found[1])
        for name, gradient in zip(weights, found[2:], strict=True):
            listed(pools.grads(name))[place].add_(gradient)
    d_x, d_w, _ = buffer.combine(plan=plan, hidden_nvsh=give(d_rows), route_weights_nvs=give(d_scalars))
    pools.reduce(plan)
    for name in PROJECTIONS:
        assert all(not tail[epn:].any() for tail in listed(pools.grads(name)))
    return {
        "y": listed(y),
        "d_x": listed(d_x),
        "d_w": listed(d_w),
        "d_parameters": [torch.cat(listed(pools.local_grads(n))).clone() for n in PROJECTIONS],
        "views": [len(h) for h in listed(rows)],
        "plan": plan,
    }


def defined(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows outside the groups are undefined: an FFN over the whole view must mask them."""
    rows = rows.clone()
    rows[int(ends[-1]) :] = 0
    return rows
