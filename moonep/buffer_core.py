"""What stands behind the calls of a Buffer: its regions, its plans, and what ranks tell each other first.

Every call begins with an agreement of all ranks: it is the barrier after which peers have left the regions,
it carries the histograms of a plan, and through it a rank with wrong arguments is named by all.

Legend: R ranks, E experts, epn = E/R, K top-k, s tokens of a rank, H width, NvS rows of a shard.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from kernels.precision import accumulation_dtype
from moonep.agreement import Agreement
from moonep.buffer_checks import (
    DTYPES,
    check_hidden,
    check_ids,
    check_pairs,
    check_pool,
    check_rows,
    check_weights,
    problem,
)
from moonep.errors import ContractError, MoonEPError
from moonep.exchange import make_exchange
from moonep.plan import Plan, make_plan
from moonep.planning import Geometry, registered_policies
from moonep.planning.allocation import EXACT
from moonep.symmetric import Region, open_memory
from moonep.views import ViewGuard, bare_tensor, same_memory

OPERATIONS = ("dispatch", "dispatch with a plan", "combine", "prefetch_weight", "reduce_grad")

Tensors = torch.Tensor | Sequence[torch.Tensor]
_numbers = itertools.count()


@dataclass(frozen=True)
class BufferPlan(Plan):
    """A plan of one Buffer.

    Attributes:
        nvs_s: rows of the views that `dispatch` returns: what so many tokens may fill, padding included.
            The same on every rank, a function of sizes and `total_num_tokens` alone, at most NvS.
        owner: the Buffer that made it. serial: how many plans it made before.
    """

    nvs_s: int = 0
    owner: int = -1
    serial: int = -1


class BufferCore:
    """Regions, agreement and exchange of a Buffer; see there for arguments. Collective to make."""

    def __init__(
        self,
        geometry: Geometry,
        hidden: int,
        dtype: torch.dtype,
        policy: str,
        group: Any,
        memory: str,
        device: torch.device | str,
        timeout_s: float,
        debug: bool,
    ):
        self.geometry, self.hidden, self.dtype, self.policy = geometry, hidden, dtype, policy
        self.group, self.destroyed = group, False
        self.memory = open_memory(memory, group, device, timeout_s)
        self.local_ranks = self.memory.local_ranks
        self.scalar_dtype = accumulation_dtype(torch.empty(0, dtype=dtype))
        self._number, self._plans = next(_numbers), 0
        policies = registered_policies()
        sizes = {
            **asdict(geometry),
            "hidden": hidden,
            "dtype": DTYPES.index(dtype),
            "policy": policies.index(policy),
        }
        self._agreement = Agreement(
            self.memory,
            geometry.num_experts,
            sizes,
            ("operation", "plan", "number of tensors", "total_num_tokens (-1: not given)", "num_tokens"),
            {"dtype": [str(d) for d in DTYPES], "policy": policies, "operation": OPERATIONS},
            private=1,
        )
        self._agreement.greet()
        self.exchange = make_exchange(self.memory, geometry)
        self._rows = self.exchange.row_region(hidden, dtype)
        self._weights = self.exchange.scalar_region(self.scalar_dtype)
        self._guard = ViewGuard() if debug else None

    def destroy(self) -> None:
        """Frees the shard. Collective at the first call. Later use raises ContractError."""
        if self.destroyed:
            return
        self.destroyed = True
        del self._rows, self._weights
        if self.memory.failure is None:
            self.memory.barrier("destroy")

    def cu_seqlens(self, plan: Plan) -> Any:
        """int32 `[2*epn]` padded end offsets of the groups; slots that no plan uses are empty groups."""
        ends = plan.layout.offsets
        idle = 2 * self.geometry.experts_per_rank - ends.shape[-1]
        whole = torch.cat([ends, ends[:, -1:].expand(-1, idle)], dim=-1)
        return self._give([whole[rank] for rank in self.local_ranks])

    def agree_on_pools(self, shapes: Mapping[str, tuple[int, int]], dtype: torch.dtype) -> None:
        """That all ranks make pools of the same shapes. Collective; raises RankDisagreement."""
        self._check_open()
        sizes = {
            "number of projections": len(shapes),
            "names of projections (checksum)": zlib.crc32(" ".join(shapes).encode()),
            "bytes of a weight": dtype.itemsize,
        }
        for name, (rows, columns) in shapes.items():
            sizes |= {f"out of {name}": rows, f"in of {name}": columns}
        Agreement(self.memory, 1, sizes, (), {}, private=0).greet()

    def copy_experts(self, plan: Plan, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Local experts `[epn, ...]` into the slots of peers, for each name -> (local, slots). Collective."""
        given = self._pairs("prefetch_weight", plan, pairs)
        with self.telling_peers():
            for local, slots in given:
                self.exchange.put_weights(plan, [t.detach() for t in local], slots)
            self.exchange.complete("prefetch_weight")

    def return_gradients(self, plan: Plan, pairs: Mapping[str, tuple[Any, Any]]) -> None:
        """Gradients in the slots of peers onto the local ones, then zeroes the slots used. Collective."""
        given = self._pairs("reduce_grad", plan, pairs)
        with self.telling_peers():
            for local, slots in given:
                self.exchange.take_gradients(plan, slots, [t.detach() for t in local])
            self.exchange.complete("reduce_grad")
            own = [(rank, slot) for rank, slot, _ in plan.copies if rank in self.local_ranks]
            for _, slots in given:
                for rank, slot in own:
                    slots.view(rank)[slot].zero_()

    def _pairs(
        self, operation: str, plan: Plan, pairs: Mapping[str, tuple[Any, Any]]
    ) -> list[tuple[list[torch.Tensor], Region]]:
        """Checked (local tensors, slots), agreed on by all ranks."""
        self._check_open()
        taken: dict[str, tuple[list[torch.Tensor], Any]] = {}

        def check() -> None:
            self._check_plan(plan)
            check_pairs(pairs)
            for name, (local, slots) in pairs.items():
                if local is not None:
                    tensors = self._take(local) or []
                    self._check_lists(**{f"local {name}": tensors})
                    check_pool(name, tensors, slots, self.geometry, self.memory)
                    if operation == "reduce_grad" and slots.dtype not in (torch.float32, torch.float64):
                        raise ContractError(
                            f"{name} gradients are {slots.dtype}; expected float32 or float64"
                        )
                    taken[name] = (tensors, slots)

        error = problem(check)
        self._agree(operation, error, plan, len(taken))
        return [(local, _as_region(slots)) for local, slots in taken.values()]

    def _plan(
        self, ids: Sequence[torch.Tensor], tensors: int, total: int, error: ContractError | None
    ) -> BufferPlan:
        """A fresh plan of all ranks' tokens."""
        geometry, E = self.geometry, self.geometry.num_experts
        private, counts = self._exchange(
            "dispatch",
            error,
            (-1, tensors, total),
            [(len(i), torch.bincount(i.reshape(-1), minlength=E)) for i in ids] if error is None else [],
            alike=total < 0,
        )
        each = private[:, 0].tolist()
        if total >= 0 and sum(each) != total:
            listing = ", ".join(f"rank {rank}: {s}" for rank, s in enumerate(each))
            raise ContractError(f"total_num_tokens={total}, but the ranks hold {sum(each)} ({listing})")
        made = make_plan(geometry, self.policy, counts, ids, self.local_ranks)
        values = {f.name: getattr(made, f.name) for f in fields(Plan)}
        plan = BufferPlan(
            **values, nvs_s=_view_rows(geometry, sum(each)), owner=self._number, serial=self._plans
        )
        self._plans += 1
        self.exchange.prepare(plan)
        return plan

    def _agree(self, operation: str, error: ContractError | None, plan: Any, tensors: int) -> None:
        """That all ranks make the same call with the same plan."""
        serial = plan.serial if error is None else -1
        nothing = torch.zeros(self.geometry.num_experts, dtype=torch.int64)
        rows = [(0, nothing)] * len(self.local_ranks)
        self._exchange(operation, error, (serial, tensors, -1), rows, alike=False)

    def _exchange(
        self,
        operation: str,
        error: ContractError | None,
        values: tuple[int, int, int],
        ranks: Sequence[tuple[int, torch.Tensor]],
        alike: bool,
    ) -> Any:
        """(s of every rank `[R, 1]`, histograms `[R, E]`). `alike`: ranks must have the same s."""
        agreement = self._agreement
        if error is not None:
            rows = [agreement.refusal(error) for _ in self.local_ranks]
        else:
            word = OPERATIONS.index(operation)
            rows = [agreement.row((word, *values, s if alike else -1), (s,), counts) for s, counts in ranks]
        return agreement.exchange(rows, error, operation)

    def _check_fresh(self, hidden: Any, weights: Any, ids: Any, counts: Any, total: int) -> None:
        if ids is None:
            raise ContractError("topk_experts_sk is missing; pass it, or the plan of an earlier dispatch")
        if total < -1:
            raise ContractError(f"total_num_tokens={total} must not be negative")
        self._check_lists(topk_experts_sk=ids, tokens_per_expert=counts)
        self._check_sources(hidden, weights)
        for place, (rows, own) in enumerate(zip(hidden, ids, strict=True)):
            check_ids(own, counts and counts[place], len(rows), self.geometry)

    def _check_again(self, plan: Any, hidden: Any, weights: Any, ids: Any) -> None:
        self._check_plan(plan)
        if ids is not None:
            raise ContractError(
                "topk_experts_sk came with a plan, which holds the choice already; pass one of them"
            )
        self._check_sources(hidden, weights)
        for route, rows in zip(plan.routes, hidden, strict=True):
            if len(rows) != route.num_tokens:
                raise ContractError(
                    f"hidden_sh has {len(rows)} tokens, the plan was made for {route.num_tokens}; dispatch "
                    "without a plan for other tokens"
                )

    def _check_sources(self, hidden: Any, weights: Any) -> None:
        self._check_lists(hidden_sh=hidden or [None], route_weights_sk=weights)
        for place, rows in enumerate(hidden):
            check_hidden("hidden_sh", rows, self._rows.view(self.local_ranks[place]), None)
            if len(rows) > self.geometry.capacity:
                raise ContractError(
                    f"{len(rows)} tokens exceed S={self.geometry.capacity}; split the call or raise S"
                )
            if weights is not None:
                check_weights(weights[place], len(rows), self.geometry.top_k)

    def _check_combine(
        self, plan: Any, rows: Any, scalars: Any, zero_copy: bool, scalars_zero_copy: bool
    ) -> None:
        self._check_plan(plan)
        self._check_lists(hidden_nvsh=rows or [None], route_weights_nvs=scalars)
        lengths = (plan.nvs_s, self.geometry.shard_rows)
        for place, rank in enumerate(self.local_ranks):
            shard, weights = self._rows.view(rank), self._weights.view(rank)
            check_hidden("hidden_nvsh", rows[place], shard, lengths)
            if zero_copy and not same_memory(rows[place], shard):
                raise ContractError("zero_copy=True, but hidden_nvsh is not the view that dispatch returned")
            if scalars is None:
                continue
            check_rows("route_weights_nvs", scalars[place], weights, lengths)
            if scalars_zero_copy and not same_memory(scalars[place], weights):
                raise ContractError(
                    "router_weights_zero_copy=True, but route_weights_nvs is not the view of dispatch"
                )

    def _check_plan(self, plan: Any) -> None:
        if not isinstance(plan, BufferPlan) or plan.owner != self._number:
            raise ContractError("the plan was not made by this Buffer; pass the one its dispatch returned")

    def _check_open(self) -> None:
        if self.destroyed:
            raise ContractError("this Buffer was destroyed; make a new one")
        self.memory.check_alive()

    def _take(self, tensors: Tensors | None) -> list[torch.Tensor] | None:
        """A list of one tensor for each local rank; `_check_lists` says whether it is."""
        if tensors is None:
            return None
        return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]  # type: ignore[list-item]

    def _check_lists(self, **lists: list[torch.Tensor] | None) -> None:
        for name, given in lists.items():
            for tensor in given or ():
                if not isinstance(tensor, torch.Tensor):
                    raise ContractError(f"{name} is a {type(tensor).__name__}; expected a tensor")
            if given is not None and len(given) != len(self.local_ranks):
                raise ContractError(
                    f"{name}: {len(given)} tensors came; this process plays {len(self.local_ranks)} ranks: "
                    "pass one for each"
                )

    def _give(self, tensors: Sequence[torch.Tensor]) -> Any:
        return tensors[0] if len(self.local_ranks) == 1 else list(tensors)

    def _fill(self, region: Region, plan: Plan, given: Sequence[torch.Tensor]) -> None:
        """What a rank computed into its own part; the rows after the last group are not read."""
        for rank, rows in zip(self.local_ranks, given, strict=True):
            used = plan.used_rows[rank]
            region.view(rank)[:used].copy_(bare_tensor(rows)[:used])

    def _hand_out(self, region: Region, plan: BufferPlan, zero_copy: bool) -> Any:
        views = [region.view(rank)[: plan.nvs_s] for rank in self.local_ranks]
        if not zero_copy:
            return self._give([view.clone() for view in views])
        return self._give([self._guard.hand_out(v) if self._guard else v for v in views])

    def _overwritten(self) -> None:
        """Views handed out before are stale from here on."""
        if self._guard:
            self._guard.generation += 1

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """Tells the other ranks when this one fails inside an exchange, so that none waits for it."""
        try:
            yield
        except MoonEPError:
            raise
        except BaseException as error:
            self.memory.abort(f"{type(error).__name__}: {error}")
            raise


def _view_rows(geometry: Geometry, total: int) -> int:
    """Rows of a rank that `total` tokens of all ranks may fill: nvs_s."""
    entries = total * geometry.top_k
    spread = -(-geometry.load_thousandths * entries // (EXACT * geometry.num_ranks))
    rows = min(spread, entries) + geometry.padding_rows
    return min(-(-rows // geometry.token_padding) * geometry.token_padding, geometry.shard_rows)


def _as_region(slots: torch.Tensor | Region) -> Region:
    return slots if isinstance(slots, Region) else Region(dict(enumerate(slots)), slots)
