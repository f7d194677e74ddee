"""Times whole expert layers of the runtime on the ranks of this process group, for calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moonep.simulate import make_workload
from moonep.simulate.calibration import LayerPoint
from moonep.simulate.cost import LayerShape
from moonep.simulate.microbenchmarks import Bench
from moonep.simulate.traffic import analyse


@dataclass(frozen=True)
class LayerCase:
    """One layer to run."""

    num_experts: int
    top_k: int
    hidden: int
    ffn_hidden: int
    tokens: int
    sigma: float
    policy: str

    @property
    def name(self) -> str:
        sizes = f"E={self.num_experts} K={self.top_k} H={self.hidden} S={self.tokens}"
        return f"layer {sizes} sigma={self.sigma:g} {self.policy}"


def run_case(case: LayerCase, bench: Bench, precision: str, tile_rows: int) -> LayerPoint:
    """Builds the layer, forces the routing, times forward and forward + backward (slowest rank, least of
    repeats)."""
    from moonep.experts import MoonEPExperts

    rank, ranks = dist.get_rank(), dist.get_world_size()
    bound = make_workload("lognormal", sigma=case.sigma).bind(ranks, case.num_experts, case.top_k, seed=0)
    all_ids = [bound.token_choices(0, 0, r, case.tokens) for r in range(ranks)]
    layer = MoonEPExperts(
        case.num_experts,
        case.hidden,
        case.ffn_hidden,
        case.top_k,
        case.tokens,
        policy=case.policy,
        dtype=bench.dtype,
        device=bench.device,
    )
    ids = torch.from_numpy(all_ids[rank]).to(bench.device)
    x = torch.randn(case.tokens, case.hidden, device=bench.device).to(bench.dtype).requires_grad_()
    weights = torch.full((case.tokens, case.top_k), 1 / case.top_k, device=bench.device)
    with torch.no_grad():
        forward = _timed(bench, lambda: layer(x, ids, weights))

    def both() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        layer(x, ids, weights).sum().backward()

    total = _timed(bench, both)
    close = getattr(layer, "destroy", None)
    if close is not None:
        close()
    return _point(case, all_ids, precision, tile_rows, forward, total)


def _timed(bench: Bench, work: Any) -> float:
    """Seconds of a collective call: the slowest rank, least of the repeats."""
    import time

    for _ in range(2):
        work()
    best = float("inf")
    for _ in range(bench.repeats):
        dist.barrier()
        bench.synchronize()
        start = time.perf_counter()
        work()
        bench.synchronize()
        spent = torch.tensor([time.perf_counter() - start], device=bench.device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        best = min(best, float(spent))
    return best


def _point(
    case: LayerCase, ids: list[np.ndarray], precision: str, tile_rows: int, forward: float, total: float
) -> LayerPoint:
    from moonep.planning import plan_allocation

    counts = np.stack([np.bincount(one.ravel(), minlength=case.num_experts) for one in ids])
    alloc = plan_allocation(torch.from_numpy(counts), policy=case.policy).numpy()
    traffic = analyse(counts, alloc, top_k=case.top_k, tile_rows=tile_rows)
    shape = LayerShape(
        case.hidden,
        case.ffn_hidden,
        precision=precision,
        payload=precision,
        combine_payload=precision,
        copy_payload=precision,
        in_graph=False,
    )
    return LayerPoint(case.name, traffic, shape, forward, total)
