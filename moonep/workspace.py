"""The memory behind a layer: shard, route weights and pools of copied experts, shared by layers of one size.

Legend: R ranks, E experts, epn = E/R, G = epn + slots groups, NvS rows of a shard, H width, Hi FFN width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.precision import accumulation_dtype
from moonep.agreement import Agreement
from moonep.exchange import make_exchange
from moonep.plan import Plan, make_plan
from moonep.planning import Geometry, registered_policies
from moonep.symmetric import Region, SymmetricMemory, open_memory

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Sizes:
    """What makes two layers able to share one workspace."""

    geometry: Geometry
    hidden: int
    ffn_hidden: int
    dtype: torch.dtype

    def bytes_of_rank(self, training: bool = True) -> dict[str, int]:
        """Bytes a rank reserves, by what for."""
        sizes, row = self.geometry, self.hidden * self.dtype.itemsize
        scalar = self.hidden and accumulation_bytes(self.dtype)
        expert = 3 * self.hidden * self.ffn_hidden
        shards = 2 if training else 1
        return {
            "shard": shards * sizes.shard_rows * row,
            "route_weights": shards * sizes.shard_rows * scalar,
            "copies": sizes.slots * expert * self.dtype.itemsize,
            "copy_gradients": sizes.slots * expert * scalar if training else 0,
        }


def accumulation_bytes(dtype: torch.dtype) -> int:
    """Bytes of the dtype in which sums of `dtype` are taken."""
    return 8 if dtype == torch.float64 else 4


class Workspace:
    """Regions for one layer at a time; layers of equal sizes take turns. Collective to make.

    Attributes:
        rows, row_gradients: `[NvS, H]`. weights, weight_gradients: `[NvS]` route weights, accumulation dtype.
        copies: pools (gate, up, down), `[slots, ...]`. copy_gradients: the same in the accumulation dtype.
    """

    def __init__(self, memory: SymmetricMemory, sizes: Sizes):
        self.memory, self.sizes = memory, sizes
        geometry = sizes.geometry
        self.policies = registered_policies()
        self.agreement = Agreement(
            memory,
            geometry.num_experts,
            {
                **asdict(geometry),
                "hidden": sizes.hidden,
                "ffn_hidden": sizes.ffn_hidden,
                "dtype": DTYPES.index(sizes.dtype),
            },
            ("gradient mode", "policy"),
            {"dtype": [str(d) for d in DTYPES], "gradient mode": ("off", "on"), "policy": self.policies},
            private=1,
        )
        self.agreement.greet()
        self.exchange = make_exchange(memory, geometry)
        scalar = accumulation_dtype(torch.empty(0, dtype=sizes.dtype))
        self.rows = self.exchange.row_region(sizes.hidden, sizes.dtype)
        self.weights = self.exchange.scalar_region(scalar)
        self.copies = self._pools(sizes.dtype)
        self._scalar = scalar
        self._training: tuple[Region, Region, tuple[Region, Region, Region]] | None = None

    def training_regions(self) -> tuple[Region, Region, tuple[Region, Region, Region]]:
        """(row_gradients, weight_gradients, copy_gradients), allocated when first wanted. Collective then."""
        if self._training is None:
            self._training = (
                self.exchange.row_region(self.sizes.hidden, self.sizes.dtype),
                self.exchange.scalar_region(self._scalar),
                self._pools(self._scalar),
            )
        return self._training

    def plan(
        self,
        policy: str,
        expert_ids: Sequence[torch.Tensor],
        needs_gradient: bool,
        error: Exception | None = None,
    ) -> Plan:
        """Tells all ranks this rank's histogram and plans. Collective.

        Args:
            expert_ids: `[s, K]` for each local rank, checked; not read if there is an error.
            error: what is wrong with this rank's arguments; raised here after every rank has been told.

        Raises:
            error; PeerFailure where a peer had one; RankDisagreement.
        """
        geometry, agreement = self.sizes.geometry, self.agreement
        if error is not None:
            rows = [agreement.refusal(error) for _ in self.memory.local_ranks]
        else:
            values = (int(needs_gradient), self.policies.index(policy))
            rows = [
                agreement.row(
                    values,
                    (len(ids),),
                    torch.bincount(ids.reshape(-1), minlength=geometry.num_experts).cpu(),
                )
                for ids in expert_ids
            ]
        _, counts = agreement.exchange(rows, error, "plan")
        plan = make_plan(geometry, policy, counts, expert_ids, self.memory.local_ranks)
        self.exchange.prepare(plan)
        return plan

    def copied(self, rank: int, pools: tuple[Region, Region, Region]) -> Any:
        """(gate, up, down) slots of a local rank, or None where there are none."""
        return tuple(pool.view(rank) for pool in pools) if self.sizes.geometry.slots else None

    def _pools(self, dtype: torch.dtype) -> tuple[Region, Region, Region]:
        slots, H, Hi = self.sizes.geometry.slots, self.sizes.hidden, self.sizes.ffn_hidden
        allocate = self.memory.allocate
        return (
            allocate((slots, Hi, H), dtype),
            allocate((slots, Hi, H), dtype),
            allocate((slots, H, Hi), dtype),
        )


_workspaces: dict[tuple[int, Sizes], Workspace] = {}


def shared_workspace(
    memory: str, group: Any, device: torch.device, timeout_s: float, sizes: Sizes
) -> Workspace:
    """The workspace all layers of these sizes share, made at the first call. Collective then."""
    opened = open_memory(memory, group, device, timeout_s)
    key = (id(opened), sizes)
    found = _workspaces.get(key)
    if found is None or found.memory is not opened:
        _workspaces[key] = found = Workspace(opened, sizes)
    return found
