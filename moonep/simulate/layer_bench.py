"""Times whole expert layers of the runtime on the ranks of this process group, for calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

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


def run_case(case: LayerCase, bench: Bench, precision: str, tile_rows: int, virtual: int = 0) -> LayerPoint:
    """Builds the layer, forces the routing, times forward and forward + backward (slowest rank, least of
    repeats).

    Args:
        virtual: ranks this process plays on its one device (0: the process group's own).
    """
    from moonep import MoonEPExperts
    from moonep.symmetric import LoopbackGroup

    ranks = virtual or dist.get_world_size()
    bound = make_workload("lognormal", sigma=case.sigma).bind(ranks, case.num_experts, case.top_k, seed=0)
    all_ids = [bound.token_choices(0, 0, r, case.tokens) for r in range(ranks)]
    layer = MoonEPExperts(
        case.num_experts,
        case.hidden,
        case.ffn_hidden,
        case.top_k,
        case.tokens,
        group=LoopbackGroup(ranks) if virtual else None,
        policy=case.policy,
        dtype=bench.dtype,
        device=bench.device,
    )
    mine = range(ranks) if virtual else [dist.get_rank()]
    ids = [torch.from_numpy(all_ids[r]).to(bench.device) for r in mine]
    x = [
        torch.randn(case.tokens, case.hidden, device=bench.device).to(bench.dtype).requires_grad_()
        for _ in mine
    ]
    weights = [torch.full((case.tokens, case.top_k), 1 / case.top_k, device=bench.device) for _ in mine]
    with torch.no_grad():
        forward = _timed(bench, lambda: layer(x, ids, weights), bool(virtual))

    def both() -> None:
        for leaf in (*x, *layer.parameters()):
            leaf.grad = None
        torch.stack([y.sum() for y in layer(x, ids, weights)]).sum().backward()

    total = _timed(bench, both, bool(virtual))
    return _point(case, all_ids, precision, tile_rows, forward, total)


def _timed(bench: Bench, work: Callable[[], object], alone: bool) -> float:
    """Seconds of a call; over the process group: of the slowest rank, all starting together. Least of the
    repeats."""
    if alone:
        return bench.seconds(work)
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
