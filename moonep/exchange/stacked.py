"""The exchange where every rank's part of a region can be addressed: shared memory, and loopback on a CPU.

A source writes its rows to their final places in the shards of all ranks and reads results from there; a run
of consecutive rows is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from moonep.exchange.base import Exchange, sum_groups
from moonep.plan import Plan, Route
from moonep.symmetric import Region

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flat(region: Region) -> torch.Tensor:
    """All shards below each other: `[R * NvS, ...]`."""
    assert region.stacked is not None
    stacked = region.stacked
    return stacked.view(-1, *stacked.shape[2:])


def _array(rows: torch.Tensor) -> np.ndarray:
    """The same memory as integers of equal size: numpy copies short runs faster, and knows no bf16."""
    return rows.view(_WORDS[rows.element_size()]).numpy()


class StackedExchange(Exchange):
    """Direct reads and writes on the stacked parts of a region; CPU tensors."""

    def put_rows(self, plan: Plan, rows: Sequence[torch.Tensor], into: Region) -> None:
        shard = _array(_flat(into))
        for route, own in zip(plan.routes, rows, strict=True):
            _put(route, own.index_select(0, route.tokens), shard)
        _clear_padding(plan, shard)

    def put_scalars(self, plan: Plan, scalars: Sequence[torch.Tensor], into: Region) -> None:
        shard = _array(_flat(into))
        for route, own in zip(plan.routes, scalars, strict=True):
            _put(route, own.reshape(-1).index_select(0, route.order), shard)
        _clear_padding(plan, shard)

    def put_weights(self, plan: Plan, weights: Sequence[torch.Tensor], into: Region) -> None:
        epn = self.geometry.experts_per_rank
        own = dict(zip(self.local_ranks, weights, strict=True))
        for rank, slot, expert in plan.copies:
            home = expert // epn
            if home in own:
                into.view(rank)[slot].copy_(own[home][expert - home * epn])

    def sum_rows(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        shard = _flat(source)
        sums = []
        for route in plan.routes:
            of_ranks = sum_groups(shard, route.sorted.view(-1), route.partials)
            if len(of_ranks) > route.num_tokens:
                order = torch.arange(len(of_ranks))
                of_ranks = sum_groups(of_ranks, order, route.partials_before)
            sums.append(of_ranks)
        return sums

    def take_scalars(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        shard = _flat(source)
        return [
            shard.index_select(0, r.destinations.view(-1)).view(r.destinations.shape) for r in plan.routes
        ]

    def take_gradients(self, plan: Plan, source: Region, into: Sequence[torch.Tensor]) -> None:
        epn = self.geometry.experts_per_rank
        own = dict(zip(self.local_ranks, into, strict=True))
        for rank, slot, expert in plan.copies:
            home = expert // epn
            if home in own:
                own[home][expert - home * epn].add_(source.view(rank)[slot])


def _put(route: Route, in_order: torch.Tensor, shard: np.ndarray) -> None:
    given, begin = _array(in_order), 0
    for first, length in route.runs:
        shard[first : first + length] = given[begin : begin + length]
        begin += length


def _clear_padding(plan: Plan, shard: np.ndarray) -> None:
    for first, end in plan.padding:
        shard[first:end] = 0
