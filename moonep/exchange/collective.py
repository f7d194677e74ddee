"""The exchange where a peer's memory cannot be addressed: rows travel by all-to-all.

A token's row goes to a rank once, with the list of places it takes there; its rows are summed there and come
back as one. Results are bit for bit those of the stacked exchange. Cost beside the rows: three small
all-to-alls and one host read a plan, since all-to-all wants its split sizes on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moonep.exchange.base import Exchange, sum_groups
from moonep.plan import Plan
from moonep.planning import Geometry
from moonep.symmetric import CollectiveMemory, Region


@dataclass(frozen=True)
class _Traffic:
    """What one rank sends and receives for a plan. A pair is (token, rank that computes some of its entries).

    Attributes:
        pair_token: tokens of the pairs sent, grouped by rank, tokens ascending.
        place: where the pair of (token ascending, rank ascending) order lies among those sent.
        entry: flat entries (token * K + k) in the order sent: grouped by pair, rows ascending.
        pairs_out, pairs_in, entries_out, entries_in: how many go to and come from each rank.
        rows, starts: places of the entries received, and where each pair received begins among them.
    """

    pair_token: torch.Tensor
    place: torch.Tensor
    entry: torch.Tensor
    pairs_out: list[int]
    pairs_in: list[int]
    entries_out: list[int]
    entries_in: list[int]
    rows: torch.Tensor
    starts: torch.Tensor


class CollectiveExchange(Exchange):
    """All-to-all over `CollectiveMemory`; one local rank."""

    memory: CollectiveMemory

    def __init__(self, memory: CollectiveMemory, geometry: Geometry):
        super().__init__(memory, geometry)
        (self.rank,) = memory.local_ranks

    def prepare(self, plan: Plan) -> None:
        plan.extra["traffic"] = self._traffic(plan)

    def enter(self, phase: str) -> None:
        """Nobody writes into this rank's regions but itself."""

    def complete(self, phase: str) -> None:
        """An all-to-all has arrived when it returns."""

    def put_rows(self, plan: Plan, rows: Sequence[torch.Tensor], into: Region) -> None:
        traffic: _Traffic = plan.extra["traffic"]
        (own,) = rows
        sent = own.index_select(0, traffic.pair_token)
        received = self.memory.all_to_all(sent, traffic.pairs_out, traffic.pairs_in, "dispatch rows")
        copies = torch.diff(traffic.starts, append=torch.tensor([len(traffic.rows)]))
        shard = into.view(self.rank)
        shard.index_copy_(0, traffic.rows, received.repeat_interleave(copies, dim=0))
        self._clear_padding(plan, shard)

    def put_scalars(self, plan: Plan, scalars: Sequence[torch.Tensor], into: Region) -> None:
        traffic: _Traffic = plan.extra["traffic"]
        (own,) = scalars
        sent = own.reshape(-1).index_select(0, traffic.entry)
        received = self.memory.all_to_all(sent, traffic.entries_out, traffic.entries_in, "dispatch weights")
        shard = into.view(self.rank)
        shard.index_copy_(0, traffic.rows, received)
        self._clear_padding(plan, shard)

    def put_weights(self, plan: Plan, weights: Sequence[torch.Tensor], into: Region) -> None:
        if not plan.copies:
            return
        epn = self.geometry.experts_per_rank
        (own,) = weights
        sent = own[[e - self.rank * epn for _, _, e in plan.copies if e // epn == self.rank]]
        # Slots are filled in expert order, so copies arrive, owner by owner, in slot order.
        out, incoming = self._copies_by_peer(plan)
        received = self.memory.all_to_all(sent, out, incoming, "weight copies")
        into.view(self.rank)[: len(received)].copy_(received)

    def sum_rows(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        traffic: _Traffic = plan.extra["traffic"]
        (route,) = plan.routes
        sums = sum_groups(source.view(self.rank), traffic.rows, traffic.starts)
        received = self.memory.all_to_all(sums, traffic.pairs_in, traffic.pairs_out, "combine rows")
        return [sum_groups(received, traffic.place, route.partials_before)]

    def take_scalars(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        traffic: _Traffic = plan.extra["traffic"]
        (route,) = plan.routes
        sent = source.view(self.rank).index_select(0, traffic.rows)
        received = self.memory.all_to_all(sent, traffic.entries_in, traffic.entries_out, "combine weights")
        taken = torch.empty_like(received).index_copy_(0, traffic.entry, received)
        return [taken.view(route.destinations.shape)]

    def take_gradients(self, plan: Plan, source: Region, into: Sequence[torch.Tensor]) -> None:
        if not plan.copies:
            return
        epn = self.geometry.experts_per_rank
        out, incoming = self._copies_by_peer(plan)
        received = self.memory.all_to_all(
            source.view(self.rank)[: sum(incoming)], incoming, out, "gradients of copies"
        )
        experts = [e - self.rank * epn for _, _, e in plan.copies if e // epn == self.rank]
        for gradient, expert in zip(received, experts, strict=True):
            into[0][expert].add_(gradient)

    def _copies_by_peer(self, plan: Plan) -> tuple[list[int], list[int]]:
        """(copies this rank sends to each rank, copies it holds from each owner)."""
        epn, ranks = self.geometry.experts_per_rank, range(self.geometry.num_ranks)
        out = [sum(r == peer and e // epn == self.rank for r, _, e in plan.copies) for peer in ranks]
        incoming = [sum(r == self.rank and e // epn == peer for r, _, e in plan.copies) for peer in ranks]
        return out, incoming

    def _clear_padding(self, plan: Plan, shard: torch.Tensor) -> None:
        base = self.rank * self.geometry.shard_rows
        for first, end in plan.padding:
            shard[first - base : end - base].zero_()

    def _traffic(self, plan: Plan) -> _Traffic:
        (route,) = plan.routes
        sizes, top_k = self.geometry, route.destinations.shape[1]
        ascending, entry = route.destinations.sort(dim=1)
        entry = (entry + torch.arange(route.num_tokens)[:, None] * top_k).view(-1)
        receiver = (ascending // sizes.shard_rows).view(-1)
        pair_rank = receiver[route.partials]
        by_rank = torch.argsort(pair_rank, stable=True)
        place = torch.empty_like(by_rank)
        place[by_rank] = torch.arange(len(by_rank))
        entry_by_rank = torch.argsort(receiver, stable=True)
        per_pair = torch.diff(route.partials, append=torch.tensor([len(receiver)]))
        pairs_out = torch.bincount(pair_rank, minlength=sizes.num_ranks)
        pairs_in = self._swap(pairs_out, [1] * sizes.num_ranks, [1] * sizes.num_ranks)
        out, incoming = pairs_out.tolist(), pairs_in.tolist()
        sent_rows = (ascending % sizes.shard_rows).view(-1)[entry_by_rank]
        take = plan.layout.take.sum(-1)
        entries_out, entries_in = take[self.rank].tolist(), take[:, self.rank].tolist()
        rows = self._swap(sent_rows, entries_out, entries_in)
        lengths = self._swap(per_pair[by_rank], out, incoming)
        return _Traffic(
            pair_token=(route.partials // top_k)[by_rank],
            place=place,
            entry=entry[entry_by_rank],
            pairs_out=out,
            pairs_in=incoming,
            entries_out=entries_out,
            entries_in=entries_in,
            rows=rows,
            starts=lengths.cumsum(0) - lengths,
        )

    def _swap(self, values: torch.Tensor, out: list[int], incoming: list[int]) -> torch.Tensor:
        return self.memory.all_to_all(values, out, incoming, "dispatch places")
