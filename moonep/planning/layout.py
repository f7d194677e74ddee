"""What follows from an allocation alone: shard sizes, groups, padded offsets, and where every token goes.

Shapes: R ranks, E experts, epn = E/R, K top-k, S token capacity a rank, s tokens of this call, NvS rows of a
shard, G = epn + slots groups of a rank (home experts first, then the copied ones). All integer arithmetic is
int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from moonep.errors import ContractError
from moonep.planning.allocation import EXACT, check_shape, check_slots, default_slots, tau_in_thousandths
from moonep.planning.policies import guaranteed_load


@dataclass(frozen=True)
class Geometry:
    """Every size of a layer that is known before a token is seen.

    load_thousandths: the rows a shard is sized for, per S*K, in thousandths: tau, or `max_imbalance`, or R
    for `static`.
    """

    num_ranks: int
    num_experts: int
    top_k: int
    capacity: int
    tau_thousandths: int
    slots: int
    token_padding: int
    load_thousandths: int

    @classmethod
    def build(
        cls,
        num_ranks: int,
        num_experts: int,
        top_k: int,
        capacity: int,
        *,
        policy: str = "bounded",
        tau: float = 1.0,
        slots: int | None = None,
        token_padding: int = 8,
        max_imbalance: float | None = None,
    ) -> Geometry:
        """Checks the sizes and works out the rest.

        `static` copies nothing and may receive everything, so its shard holds R*S*K rows and it has no slots.
        Fewer slots than ceil(E*(R-1)/R^2) need `max_imbalance`, the largest rank imbalance the shard is sized
        for, at least what `bounded` can guarantee with them; `moonep` always needs them all.

        Raises:
            ContractError: names the argument, what came and what is allowed.
        """
        check_shape(num_ranks, num_experts)
        for name, value in (("top_k", top_k), ("capacity", capacity), ("token_padding", token_padding)):
            if value < 1:
                raise ContractError(f"{name}={value} must be at least 1")
        if top_k > num_experts:
            raise ContractError(f"top_k={top_k} exceeds num_experts={num_experts}")
        if num_ranks * capacity * top_k >= 2**31:
            raise ContractError(
                f"R*S*K = {num_ranks * capacity * top_k} must stay below 2^31; lower capacity={capacity}"
            )
        tau_thousandths = tau_in_thousandths(tau)
        needed = default_slots(num_ranks, num_experts)
        if policy == "static":
            slots, load = 0, num_ranks * EXACT
        else:
            slots = check_slots(slots, num_ranks, num_experts)
            load = _sized_load(policy, num_ranks, num_experts, slots, needed, tau_thousandths, max_imbalance)
        return cls(num_ranks, num_experts, top_k, capacity, tau_thousandths, slots, token_padding, load)

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def num_groups(self) -> int:
        """Groups of a rank: epn home experts, then `slots` copied ones; at most 2*epn."""
        return self.experts_per_rank + self.slots

    @property
    def max_rows(self) -> int:
        """Routed rows a rank may compute, without padding."""
        spread = -(-self.load_thousandths * self.capacity * self.top_k // EXACT)
        return min(spread, self.num_ranks * self.capacity * self.top_k)

    @property
    def padding_rows(self) -> int:
        """Rows that padding may add: token_padding - 1 for each group."""
        return (self.token_padding - 1) * self.num_groups

    @property
    def shard_rows(self) -> int:
        """NvS, a multiple of `token_padding`: ceil(tau * S * K) + padding (`static`: R * S * K + padding)."""
        return -(-(self.max_rows + self.padding_rows) // self.token_padding) * self.token_padding


def _sized_load(
    policy: str,
    num_ranks: int,
    num_experts: int,
    slots: int,
    needed: int,
    tau: int,
    max_imbalance: float | None,
) -> int:
    if max_imbalance is None and slots >= needed:
        return tau
    if slots < needed and policy == "moonep":
        raise ContractError(
            f"slots={slots}: policy 'moonep' needs {needed} slots; raise slots or take policy 'bounded'"
        )
    # Rounded up: guaranteed_load of `total` is at most ceil(total/R * guaranteed/1000) for every total.
    guaranteed = guaranteed_load(EXACT * num_ranks, num_ranks, num_experts, slots, tau)
    if max_imbalance is None:
        raise ContractError(
            f"slots={slots} is fewer than the {needed} that exact balance may need; raise slots, or pass "
            f"max_imbalance={guaranteed / EXACT} (or more) so that the shard holds what may remain"
        )
    sized = tau_in_thousandths(max_imbalance)
    if sized < guaranteed:
        raise ContractError(
            f"max_imbalance={max_imbalance} is below {guaranteed / EXACT}, which {slots} slots may leave"
        )
    return sized


@dataclass(frozen=True)
class Layout:
    """Where the tokens of one plan lie. Tensors are int64 unless said; leading batch axes are allowed.

    Attributes:
        groups: `[R, G]` expert of each group, home experts first, then copied ones in expert order; -1: idle
        slot.
        group_rows: `[R, G]` real rows of a group; the rest up to its offset is padding.
        offsets: `[R, G]` int32 padded end of each group in the shard (cu_seqlens without the leading 0).
        first_row: `[R, E]` row of the shard where expert e begins on rank d; -1 where it has none.
        local: `[R, E]` tokens of source rank r for expert e that stay on r.
        source_start: `[R, E]` how many travelling tokens of e come from the ranks before r.
        receive_end: `[R, E]` how many travelling tokens of e go to the ranks up to and including d.
        source_travel: `[R, E]` travelling tokens of source rank r for expert e.
        geometry: the sizes behind it.
    """

    groups: torch.Tensor
    group_rows: torch.Tensor
    offsets: torch.Tensor
    first_row: torch.Tensor
    local: torch.Tensor
    source_start: torch.Tensor
    receive_end: torch.Tensor
    source_travel: torch.Tensor
    geometry: Geometry

    @cached_property
    def take(self) -> torch.Tensor:
        """`[R_src, R_dst, E]`: tokens of source r and expert e that go to rank d: local first, then in rank
        order.
        """
        receive = torch.diff(self.receive_end, dim=-2, prepend=torch.zeros_like(self.receive_end[..., :1, :]))
        start = self.source_start.unsqueeze(-2)
        end = start + self.source_travel.unsqueeze(-2)
        upper = self.receive_end.unsqueeze(-3)
        travel = (torch.minimum(end, upper) - torch.maximum(start, upper - receive.unsqueeze(-3))).clamp_min(
            0
        )
        eye = torch.eye(self.geometry.num_ranks, dtype=torch.int64, device=travel.device)
        return travel + eye[:, :, None] * self.local.unsqueeze(-2)


def layout(tokens_per_expert: torch.Tensor, alloc: torch.Tensor, geometry: Geometry) -> Layout:
    """Everything the exchange needs, as a pure function of the counts, the allocation `[..., R, E]` and the
    sizes.

    The allocation must satisfy `check_allocation(..., geometry=geometry)`; nothing here reads a value on the
    host.
    """
    counts, alloc = tokens_per_expert.to(torch.int64), alloc.to(torch.int64)
    groups = _groups(alloc, geometry)
    occupied = groups >= 0
    group_rows = alloc.gather(-1, groups.clamp_min(0)) * occupied
    pad = geometry.token_padding
    padded = (group_rows + pad - 1) // pad * pad
    ends = padded.cumsum(-1)
    # Idle slots and empty groups write into a spare column that is cut off again.
    column = torch.where(group_rows > 0, groups, geometry.num_experts)
    first_row = alloc.new_full((*alloc.shape[:-1], geometry.num_experts + 1), -1)
    first_row = first_row.scatter(-1, column, ends - padded)[..., :-1]
    local = torch.minimum(counts, alloc)
    travel, receive = counts - local, alloc - local
    return Layout(
        groups=groups,
        group_rows=group_rows,
        offsets=ends.to(torch.int32),
        first_row=first_row,
        local=local,
        source_start=travel.cumsum(-2) - travel,
        receive_end=receive.cumsum(-2),
        source_travel=travel,
        geometry=geometry,
    )


def _groups(alloc: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    num_ranks, num_experts, epn = geometry.num_ranks, geometry.num_experts, geometry.experts_per_rank
    expert = torch.arange(num_experts, device=alloc.device)
    rank = torch.arange(num_ranks, device=alloc.device)
    home = expert.view(num_ranks, epn).expand(*alloc.shape[:-1], epn)
    remote = (alloc > 0) & (expert // epn != rank[:, None])
    place = torch.where(remote, remote.cumsum(-1) - 1, geometry.slots)  # all others: the spare column
    copied = alloc.new_full((*alloc.shape[:-1], geometry.slots + 1), -1)
    copied = copied.scatter(-1, place, expert.expand_as(place))[..., : geometry.slots]
    return torch.cat([home, copied], dim=-1)


def destinations(layout: Layout, rank: int, expert_ids_sK: torch.Tensor) -> torch.Tensor:
    """Where each of this rank's routed entries goes.

    An expert's tokens keep their order (the sort is stable): the first `local[rank, e]` stay, the rest go to
    the other ranks in rank order. Of a token's entries that go to the same rank the first (smallest k)
    carries the row; the later ones are duplicates, to be replicated there, and are marked as `-destination -
    1`.

    Args:
        layout: of an unbatched plan.
        rank: the source rank.
        expert_ids_sK: `[s, K]` integers in `[0, E)`, whose histogram is row `rank` of the counts planned for.

    Returns:
        `[s, K]` int64: `destination rank * NvS + row`, or its mark.
    """
    sizes = layout.geometry
    ids = expert_ids_sK.reshape(-1).to(torch.int64)
    order = torch.argsort(ids, stable=True)
    sorted_ids = ids[order]
    counts = torch.zeros(sizes.num_experts, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, ids, torch.ones_like(ids))
    nth = torch.arange(ids.numel(), device=ids.device) - (counts.cumsum(0) - counts)[sorted_ids]
    stays = nth < layout.local[rank][sorted_ids]
    travel = nth - layout.local[rank][sorted_ids] + layout.source_start[rank][sorted_ids]
    # receive_end is sorted along ranks, so the receiver is the number of ranks already full.
    receiver = (layout.receive_end[:, sorted_ids] <= travel).sum(0).clamp_max(sizes.num_ranks - 1)
    receiver = torch.where(stays, rank, receiver)
    before = torch.where(receiver > 0, layout.receive_end[(receiver - 1).clamp_min(0), sorted_ids], 0)
    row = torch.where(stays, nth, layout.local[receiver, sorted_ids] + travel - before)
    row = row + layout.first_row[receiver, sorted_ids]
    target = (
        torch.empty_like(ids).scatter(0, order, receiver * sizes.shard_rows + row).view(expert_ids_sK.shape)
    )
    return mark_duplicates(target, sizes.shard_rows)


def mark_duplicates(target_sK: torch.Tensor, shard_rows: int) -> torch.Tensor:
    """Marks as `-target - 1` every entry whose token already has an earlier entry on the same destination
    rank.
    """
    receiver = target_sK // shard_rows
    top_k = receiver.shape[-1]
    earlier = torch.ones(top_k, top_k, dtype=torch.bool, device=receiver.device).tril(-1)
    duplicate = ((receiver[..., :, None] == receiver[..., None, :]) & earlier).any(-1)
    return torch.where(duplicate, -target_sK - 1, target_sK)
