"""One case of the exchange on one device, all ranks in loopback: its plan, its memory, its steps and their
bytes.

Bytes are counted from the plan, not assumed. `moved` is what the steps must read and write as they are built
(a row that arrived is read once more to be replicated); `floor` is every input read once and every output
written once, whatever the method. Of combine `moved` adds the partial sums, written by one rank and read by
another.

Shapes: R ranks, s tokens of a rank, K top-k, H width, NvS rows of a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernels.exchange import plan as device_plan
from kernels.exchange import transfer
from moonep.planning import Geometry
from moonep.simulate import make_workload

RULES = {"static": device_plan.STATIC, "moonep": device_plan.MOONEP, "bounded": device_plan.BOUNDED}


@dataclass(frozen=True)
class Sizes:
    """Of one case. `ffn_hidden` and `parts` only matter to copies."""

    ranks: int
    experts: int
    top_k: int
    tokens: int
    hidden: int
    ffn_hidden: int
    maxvio: float
    policy: str = "bounded"
    tau: float = 1.0
    token_padding: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step."""

    moved: int
    floor: int


def route(sizes: Sizes, device: str) -> torch.Tensor:
    """Expert ids `[R, s, K]` int32 whose expected maxvio is the one asked for (lognormal popularity)."""
    workload = make_workload("lognormal", maxvio=sizes.maxvio)
    bound = workload.bind(sizes.ranks, sizes.experts, sizes.top_k, sizes.seed)
    ids = [bound.token_choices(0, 0, rank, sizes.tokens) for rank in range(sizes.ranks)]
    return torch.from_numpy(np.stack(ids)).to(torch.int32).to(device)


class Exchange:
    """Regions, plan and steps of a case. Every step is a function without arguments that a graph can
    capture.
    """

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str):
        self.sizes, self.device = sizes, device
        self.geometry = Geometry.build(
            sizes.ranks,
            sizes.experts,
            sizes.top_k,
            sizes.tokens,
            policy=sizes.policy,
            tau=sizes.tau,
            token_padding=sizes.token_padding,
        )
        self.ids = route(sizes, device)
        R, s = sizes.ranks, sizes.tokens
        generator = torch.Generator(device=device).manual_seed(sizes.seed)
        self.x = torch.randn(R, s, sizes.hidden, dtype=dtype, device=device, generator=generator)
        self.weights = torch.rand(R, s, sizes.top_k, device=device, generator=generator)
        self.counts = self.histograms()
        self.tables = self.plan()
        self.targets = self.destinations()
        self.out = torch.empty_like(self.x)
        self._make_regions(dtype)
        self.y = self.regions["rows"]  # experts write their outputs over their inputs

    def _make_regions(self, dtype: torch.dtype) -> None:
        R, sizes = self.sizes.ranks, self.sizes
        shapes = transfer.region_shapes(self.geometry.shard_rows, sizes.top_k, R, sizes.tokens, sizes.hidden)
        dtypes = {
            "weights": torch.float32,
            "lists": torch.int32,
            "origins": torch.int64,
            "control": torch.int64,
        }
        self.regions = {
            name: torch.zeros(R, *shape, dtype=dtypes.get(name, dtype), device=self.device)
            for name, shape in shapes.items()
        }
        addresses = transfer.region_addresses([addresses_of(r) for r in self.regions.values()])
        self.shards = transfer.Shards(addresses, self.geometry.shard_rows, sizes.top_k, played=R)

    @cached_property
    def used_rows(self) -> list[int]:
        return self.tables.offsets[:, -1].tolist()

    # -- the plan

    def histograms(self) -> torch.Tensor:
        return torch.stack([device_plan.sort_entries(i, self.sizes.experts).histogram for i in self.ids])

    def plan(self) -> device_plan.PlanTables:
        return device_plan.plan_tables(
            self.counts,
            rule=RULES[self.sizes.policy],
            tau_thousandths=self.geometry.tau_thousandths,
            slots=self.geometry.slots,
            token_padding=self.geometry.token_padding,
        )

    def destinations(self) -> torch.Tensor:
        rows = self.geometry.shard_rows
        return torch.stack(
            [
                device_plan.destinations(
                    device_plan.sort_entries(ids, self.sizes.experts), self.tables, rank=rank, shard_rows=rows
                )
                for rank, ids in enumerate(self.ids)
            ]
        )

    def plan_one_rank(self) -> None:
        """What one rank does: its sort, the plan, its destinations, the lists of copies."""
        entries = device_plan.sort_entries(self.ids[0], self.sizes.experts)
        tables = self.plan()
        device_plan.destinations(entries, tables, rank=0, shard_rows=self.geometry.shard_rows)
        transfer.find_holders(tables.first_row, self.geometry.slots)

    # -- rows

    def dispatch(self) -> None:
        tables = self.tables
        transfer.push(
            self.shards,
            self.x,
            self.targets,
            self.weights,
            tables.offsets,
            tables.group_rows,
            token_padding=self.geometry.token_padding,
        )
        transfer.replicate(self.shards, tables.offsets, self.row_bytes)

    def combine(self) -> None:
        width, dtype, partial = self.sizes.hidden, self.x.dtype, self.regions["partials"].dtype
        transfer.presum(self.shards, self.tables.offsets, width, dtype, weighted=True, partial_dtype=partial)
        sources = transfer.find_sources(self.shards, self.targets, width, dtype, partial)
        transfer.final_sum(
            self.shards, sources, self.weights, width, dtype, partial_dtype=partial, out=self.out
        )

    @property
    def row_bytes(self) -> int:
        return self.x.shape[-1] * self.x.element_size()

    @cached_property
    def rows(self) -> dict[str, int]:
        """How many rows: tokens, entries, first ones of a token on another rank, those of them that are not
        the only ones, padding.
        """
        targets, sizes = self.targets, self.sizes
        plain = torch.where(targets < 0, -targets - 1, targets)
        rank = torch.arange(sizes.ranks, device=targets.device)[:, None, None]
        receiver = plain // self.geometry.shard_rows
        remote = (receiver != rank) & (targets >= 0)
        same = (receiver[..., :, None] == receiver[..., None, :]).sum(-1)
        return {
            "tokens": sizes.ranks * sizes.tokens,
            "entries": targets.numel(),
            "crossing": int(remote.sum()),
            "replicated": int((remote & (same > 1)).sum()),
            "padding": sum(self.used_rows) - targets.numel(),
        }

    @property
    def dispatch_traffic(self) -> Traffic:
        n = self.rows
        floor = n["tokens"] + n["entries"] + n["padding"]
        return Traffic((floor + n["replicated"]) * self.row_bytes, floor * self.row_bytes)

    @property
    def combine_traffic(self) -> Traffic:
        n = self.rows
        floor = n["tokens"] + n["entries"]
        return Traffic((floor + 2 * n["replicated"]) * self.row_bytes, floor * self.row_bytes)

    def check_dispatch(self) -> str:
        """Rows bitwise, padding zero, weights; "" or what is wrong. Poisons the shard first."""
        for name in ("rows", "weights"):
            self.regions[name].fill_(float("nan"))
        self.dispatch()
        flat = self.regions["rows"].flatten(0, 1)
        plain = torch.where(self.targets < 0, -self.targets - 1, self.targets).flatten(0, 1)
        x, weights = self.x.flatten(0, 1), self.weights.flatten(0, 1)
        for k in range(self.sizes.top_k):
            if not torch.equal(flat[plain[:, k]], x):
                return f"rows of entry k={k} differ from their tokens"
            if not torch.equal(self.regions["weights"].flatten()[plain[:, k]], weights[:, k]):
                return f"weights of entry k={k} differ"
        written = ~torch.isnan(self.regions["rows"][..., 0])
        if written.sum(1).tolist() != self.used_rows:
            return f"{written.sum(1).tolist()} rows written, expected {self.used_rows}"
        flat.index_fill_(0, plain.flatten(), float("nan"))
        rest = self.regions["rows"][written]
        return "" if not rest.nan_to_num(0).any() else "padding is not zero"

    def check_combine(self) -> str:
        """Against fp32 sums of whole columns, on random outputs; the records must be those of a dispatch.
        Tails are poisoned, for no step may read them.
        """
        self.y.fill_(float("nan"))
        for rank, used in enumerate(self.used_rows):
            self.y[rank, :used].normal_()
        self.regions["partials"].fill_(float("nan"))
        self.out.fill_(float("nan"))
        self.combine()
        plain = torch.where(self.targets < 0, -self.targets - 1, self.targets).flatten(0, 1)
        total = torch.zeros(len(plain), self.sizes.hidden, device=self.device)
        for k in range(self.sizes.top_k):
            total += self.y.flatten(0, 1)[plain[:, k]].float() * self.weights.flatten(0, 1)[:, k, None]
        error = float((self.out.flatten(0, 1).float() - total).norm() / total.norm())
        first = self.out.clone()
        self.combine()
        if not torch.equal(first, self.out):
            return "two runs differ"
        return "" if error < 4e-3 else f"relative error {error:.2e}"


def addresses_of(stacked: torch.Tensor) -> torch.Tensor:
    """int64 `[R]` addresses of the parts of `[R, ...]`, on their device."""
    return torch.tensor([part.data_ptr() for part in stacked], dtype=torch.int64, device=stacked.device)


class Copies:
    """Expert weights, slots and gradients of a case, as parts of `hidden * ffn_hidden` elements."""

    def __init__(self, exchange: Exchange, parts: int, dtype: torch.dtype):
        self.exchange, self.parts = exchange, parts
        sizes, geometry = exchange.sizes, exchange.geometry
        self.elements, self.dtype = sizes.hidden * sizes.ffn_hidden, dtype
        self.holders = transfer.find_holders(exchange.tables.first_row, geometry.slots)
        R, epn = sizes.ranks, geometry.experts_per_rank
        self.home = [self._empty(R, epn) for _ in range(parts)]
        self.pool = [self._empty(R, geometry.slots) for _ in range(parts)]
        self.home_at, self.pool_at = (
            torch.stack([addresses_of(part) for part in tensors], 1) for tensors in (self.home, self.pool)
        )

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.elements, dtype=self.dtype, device=self.exchange.device)

    @cached_property
    def copied(self) -> tuple[int, int]:
        """(copies, experts that have any)."""
        return int(self.holders.counts.sum()), int((self.holders.counts > 0).sum())

    def describe(self) -> str:
        copies, experts = self.copied
        return f"{copies} copies of {experts} experts, {self.parts} projections"

    def push(self) -> None:
        size = self.elements * self.dtype.itemsize
        transfer.push_copies(self.exchange.shards, self.holders, self.home_at, self.pool_at, size)

    def give_back(self) -> None:
        transfer.return_gradients(
            self.exchange.shards,
            self.holders,
            self.home_at,
            self.pool_at,
            self.elements,
            home_dtype=self.dtype,
            slot_dtype=self.dtype,
        )

    @property
    def push_bytes(self) -> int:
        copies, experts = self.copied
        return (copies + experts) * self.parts * self.elements * self.dtype.itemsize

    @property
    def give_back_bytes(self) -> int:
        copies, experts = self.copied
        return (copies + 2 * experts) * self.parts * self.elements * self.dtype.itemsize

    def _each_copy(self):
        """(rank, slot, home rank, local expert) of each copy."""
        epn = self.exchange.geometry.experts_per_rank
        slots = self.exchange.tables.groups[:, epn:]
        for rank, slot in (slots >= 0).nonzero().tolist():
            expert = int(slots[rank, slot])
            yield rank, slot, expert // epn, expert % epn

    def check_push(self) -> str:
        for pool in self.pool:
            pool.fill_(float("nan"))
        self.push()
        for rank, slot, home, expert in self._each_copy():
            for part, pool in zip(self.home, self.pool, strict=True):
                if not torch.equal(pool[rank, slot], part[home, expert]):
                    return f"slot {slot} of rank {rank} differs from expert {expert} of rank {home}"
        return ""

    def check_give_back(self) -> str:
        """Of one part: bit for bit the same additions in torch."""
        expected: dict[tuple[int, int], torch.Tensor] = {}
        for rank, slot, home, expert in self._each_copy():
            total = expected.setdefault((home, expert), self.home[0][home, expert].clone())
            total += self.pool[0][rank, slot]
        self.give_back()
        same = all(torch.equal(total, self.home[0][place]) for place, total in expected.items())
        return "" if same else "gradients differ from the sum in torch"


class TorchPermutation:
    """Static expert parallelism on torch's own operators: sort, gather rows, gather and sum back.

    Everything on one device, no rank boundary: a lower bound of what the path through a library's all-to-all,
    which also sends the rows, can cost here.
    """

    def __init__(self, exchange: Exchange):
        self.x = exchange.x.flatten(0, 1)
        self.ids = exchange.ids.flatten(0, 1)
        self.weights = exchange.weights.flatten(0, 1).to(self.x.dtype)
        self.rows = self.permute()

    def permute(self) -> torch.Tensor:
        order = torch.argsort(self.ids.flatten(), stable=True)
        self.inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return self.x.index_select(0, order // self.ids.shape[1])

    def unpermute(self) -> torch.Tensor:
        tokens, top_k = self.ids.shape
        rows = self.rows.index_select(0, self.inverse).view(tokens, top_k, -1)
        return torch.bmm(self.weights[:, None], rows)[:, 0]
