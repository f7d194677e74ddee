"""A plan of one exchange: who computes which tokens, and where each of this process's tokens goes.

Shapes: R ranks, E experts, epn = E/R, G = epn + slots groups of a rank, K top-k, s tokens of a rank, NvS rows
of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from moonep.planning import (
    Geometry,
    Layout,
    PlanStatistics,
    layout,
    mark_duplicates,
    plan_allocation,
    plan_statistics,
)
from moonep.planning.allocation import EXACT


@dataclass(frozen=True)
class Route:
    """Where the routed entries (token, k) of one source rank go. A destination is `rank * NvS + row`.

    Attributes:
        rank: the source rank.
        num_tokens: s.
        destinations: `[s, K]` int64, duplicates not marked.
        order: `[N]` entries sorted by expert; consecutive entries lie in consecutive rows within a run.
        runs: `(destination, length)` of each run, in the order of `order`.
        sorted: `[s, K]` destinations of a token in ascending order: the order in which its rows are summed.
        partials: `[P]` places in `sorted.flatten()` where the rows of one (token, rank) pair begin.
        partials_before: `[s]` how many such pairs the tokens before have.
    """

    rank: int
    num_tokens: int
    destinations: torch.Tensor
    order: torch.Tensor
    tokens: torch.Tensor
    runs: list[tuple[int, int]]
    sorted: torch.Tensor
    partials: torch.Tensor
    partials_before: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """What `dispatch` decides and `combine` and the backward pass take again.

    Attributes:
        counts: `[R, E]` int64 tokens by source rank and expert.
        alloc: `[R, E]` int32 tokens of expert e computed on rank d.
        layout: groups, offsets and tables of all ranks' shards.
        statistics: `[10]` int64 in the order of `planning.PlanStatistics`.
        local_ranks: the ranks this process stands for; `routes` holds one entry for each.
        extra: what an exchange keeps with the plan.
    """

    geometry: Geometry
    counts: torch.Tensor
    alloc: torch.Tensor
    layout: Layout
    statistics: torch.Tensor
    local_ranks: tuple[int, ...]
    routes: list[Route]
    extra: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of this process."""
        return sum(route.num_tokens for route in self.routes)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 `[G]` padded end offsets of this rank's groups (`[R, G]` where it plays several)."""
        return self._own(self.layout.offsets)

    @property
    def experts_to_copy(self) -> torch.Tensor:
        """int64 `[slots]` expert copied into each slot of this rank, -1 idle (`[R, slots]` likewise)."""
        return self._own(self.layout.groups[:, self.geometry.experts_per_rank :])

    @property
    def destinations(self) -> torch.Tensor:
        """int64 `[s, K]`: `rank * NvS + row`; a token's later entries on a rank as `-that - 1`."""
        (route,) = self.routes
        return mark_duplicates(route.destinations, self.geometry.shard_rows)

    @cached_property
    def read_statistics(self) -> PlanStatistics:
        """The statistics on the host."""
        return PlanStatistics.unpack(self.statistics)

    @cached_property
    def copies(self) -> list[tuple[int, int, int]]:
        """(computing rank, slot, expert) of every copy, in this order."""
        experts = self.layout.groups[:, self.geometry.experts_per_rank :].cpu().numpy()
        ranks, slots = np.nonzero(experts >= 0)
        return list(zip(ranks.tolist(), slots.tolist(), experts[ranks, slots].tolist(), strict=True))

    @cached_property
    def used_rows(self) -> list[int]:
        """Rows in use of each rank's shard, padding included."""
        return self.layout.offsets[:, -1].tolist()

    @cached_property
    def padding(self) -> list[tuple[int, int]]:
        """Half-open ranges of padding rows of the local ranks, as `rank * NvS + row`."""
        ranks = np.array(self.local_ranks)
        ends = self.layout.offsets.numpy()[ranks].astype(np.int64)
        filled = self.layout.group_rows.numpy()[ranks]
        starts = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1) + filled
        base = (ranks * self.geometry.shard_rows)[:, None]
        some = starts < ends
        return list(zip((starts + base)[some].tolist(), (ends + base)[some].tolist(), strict=True))

    def _own(self, table: torch.Tensor) -> torch.Tensor:
        return table[self.local_ranks[0]] if len(self.local_ranks) == 1 else table[list(self.local_ranks)]


def make_plan(
    geometry: Geometry,
    policy: str,
    counts: torch.Tensor,
    expert_ids: Sequence[torch.Tensor],
    local_ranks: Sequence[int],
) -> Plan:
    """Plans on the CPU. `counts [R, E]` int64; `expert_ids` has `[s, K]` integers for each local rank."""
    tau = geometry.tau_thousandths / EXACT
    alloc = plan_allocation(counts, policy=policy, tau=tau, slots=geometry.slots)
    placed = layout(counts, alloc, geometry)
    tables = _Tables.of(placed)
    routes = [_route(tables, rank, ids) for rank, ids in zip(local_ranks, expert_ids, strict=True)]
    statistics = plan_statistics(counts, alloc, tau=tau)
    return Plan(geometry, counts, alloc, placed, statistics, tuple(local_ranks), routes)


@dataclass(frozen=True)
class _Tables:
    """The tables of a layout as numpy arrays: on small ones numpy is several times as fast."""

    geometry: Geometry
    first_row: np.ndarray
    local: np.ndarray
    source_start: np.ndarray
    source_travel: np.ndarray
    receive_end: np.ndarray
    receive: np.ndarray

    @classmethod
    def of(cls, placed: Layout) -> _Tables:
        receive_end = placed.receive_end.numpy()
        return cls(
            placed.geometry,
            placed.first_row.numpy(),
            placed.local.numpy(),
            placed.source_start.numpy(),
            placed.source_travel.numpy(),
            receive_end,
            np.diff(receive_end, axis=0, prepend=0),
        )


def _runs(tables: _Tables, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(destination of the first entry, length) of every run of one source rank, experts ascending.

    An expert's entries stay at home first, then go to the other ranks in rank order (planning.destinations).
    """
    sizes = tables.geometry
    base = (np.arange(sizes.num_ranks) * sizes.shard_rows)[:, None]
    start = tables.source_start[rank]
    begin = tables.receive_end - tables.receive
    low = np.maximum(start, begin)
    length = np.minimum(start + tables.source_travel[rank], tables.receive_end) - low
    first = base + tables.first_row + tables.local + low - begin
    lengths = np.concatenate([tables.local[rank][None], np.maximum(length, 0)])
    firsts = np.concatenate([(base[rank] + tables.first_row[rank])[None], first])
    # Column by column: an expert's local run, then its runs to ranks 0, 1, ...
    some = lengths.T > 0
    return firsts.T[some], lengths.T[some]


def _route(tables: _Tables, rank: int, ids_sK: torch.Tensor) -> Route:
    sizes = tables.geometry
    s, top_k = ids_sK.shape
    small = np.int16 if sizes.num_experts < 2**15 else np.int32  # 16 bits are sorted by radix
    order = np.argsort(ids_sK.reshape(-1).cpu().numpy().astype(small), kind="stable")
    firsts, lengths = _runs(tables, rank)
    begin = np.cumsum(lengths) - lengths
    in_order = np.repeat(firsts - begin, lengths) + np.arange(s * top_k)
    target = np.empty(s * top_k, dtype=np.int64)
    target[order] = in_order
    ascending = np.sort(target.reshape(s, top_k), axis=1)
    new = np.ones((s, top_k), dtype=bool)
    receiver = ascending // sizes.shard_rows
    np.not_equal(receiver[:, 1:], receiver[:, :-1], out=new[:, 1:])
    per_token = new.sum(axis=1)
    return Route(
        rank,
        s,
        torch.from_numpy(target).view(s, top_k),
        torch.from_numpy(order),
        torch.from_numpy(order // top_k),
        list(zip(firsts.tolist(), lengths.tolist(), strict=True)),
        torch.from_numpy(ascending),
        torch.from_numpy(np.flatnonzero(new)),
        torch.from_numpy(np.cumsum(per_token) - per_token),
    )
