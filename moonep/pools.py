"""Pools of copied experts and of their gradients, one set for all layers of a process.

Legend: R ranks, epn home experts of a rank; `out, in` the shape of one expert's weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moonep.buffer import Buffer
from moonep.errors import ContractError
from moonep.plan import Plan
from moonep.symmetric import Region


class ExpertPools:
    """For each projection `[2*epn, out, in]` rows a rank: its own experts, then the slots of copied ones.

    A layer copies its experts into `staging`, dispatches, calls `push(plan)` and computes on `weights`,
    whose groups are those of the plan's cu_seqlens. In backward it adds weight gradients to `grads`, calls
    `reduce(plan)`; `local_grads` then hold the sum over the group. Pools hold one layer at a time.

    Args:
        buffer: whose plans are served. Collective over its group, on every rank with the same shapes.
        group: the Buffer's group (or None).
        shapes: projection -> (out, in).
        dtype: of weights; None: the Buffer's. Gradients are fp32 (fp64 for fp64).

    With a `LoopbackGroup(R)` the accessors of one rank's rows return lists of R.

    Raises:
        ContractError: another group, or empty shapes. CapabilityError: no room.
        RankDisagreement: ranks ask for other shapes.
    """

    def __init__(
        self,
        buffer: Buffer,
        group: Any = None,
        shapes: Mapping[str, tuple[int, int]] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ):
        if group is not None and group is not buffer.group:
            raise ContractError(
                "group is not the Buffer's; pass group=None or the group the Buffer was made with"
            )
        if not shapes or any(len(shape) != 2 or min(shape) < 1 for shape in shapes.values()):
            raise ContractError(f"shapes={shapes!r}; expected {{'gate': (out, in), ...}} with positive sizes")
        self.buffer, self.shapes = buffer, dict(sorted(shapes.items()))
        self.dtype = dtype or buffer.dtype
        rows = 2 * buffer.geometry.experts_per_rank
        buffer.agree_on_pools(self.shapes, self.dtype)
        allocate = buffer.memory.allocate
        self._weights = {n: allocate((rows, *shape), self.dtype) for n, shape in self.shapes.items()}
        self._grads = {n: allocate((rows, *shape), buffer.scalar_dtype) for n, shape in self.shapes.items()}

    def weights(self, name: str) -> Any:
        """`[2*epn, out, in]`: staging rows, then slots; what the grouped FFN reads."""
        return self._own(self._weights, name, slice(None))

    def staging(self, name: str) -> Any:
        """`[epn, out, in]`: where a layer copies its own experts."""
        return self._own(self._weights, name, self._home)

    def prefetch_buffer(self, name: str) -> torch.Tensor | Region:
        """`[R, epn, out, in]`: the slots of every rank; a Region where peers cannot be addressed."""
        return self._slots(self._weights, name)

    def grads(self, name: str) -> Any:
        """`[2*epn, out, in]`: gradients of the own experts, then of the slots."""
        return self._own(self._grads, name, slice(None))

    def local_grads(self, name: str) -> Any:
        """`[epn, out, in]`: gradients of the own experts; after `reduce` those of the group's tokens."""
        return self._own(self._grads, name, self._home)

    def reduce_buffer(self, name: str) -> torch.Tensor | Region:
        """`[R, epn, out, in]`: the gradient slots of every rank; a Region where peers cannot be addressed."""
        return self._slots(self._grads, name)

    def push(self, plan: Plan) -> None:
        """Copies staged experts into the slots of ranks that compute them. Collective; raises as a Buffer."""
        pairs = {n: (self.staging(n), self._slot_region(self._weights, n)) for n in self._names()}
        self.buffer.copy_experts(plan, pairs)

    def reduce(self, plan: Plan) -> None:
        """Adds slot gradients to those at home and zeroes the slots. Collective; raises as Buffer."""
        pairs = {n: (self.local_grads(n), self._slot_region(self._grads, n)) for n in self._names()}
        self.buffer.return_gradients(plan, pairs)

    def destroy(self) -> None:
        """Lets go of the pools; views still held keep their memory. Later use raises ContractError."""
        self._weights, self._grads = {}, {}

    @property
    def _home(self) -> slice:
        return slice(0, self.buffer.geometry.experts_per_rank)

    def _names(self) -> list[str]:
        if not self._weights:
            raise ContractError("these pools were destroyed; make new ones")
        return list(self.shapes)

    def _region(self, pools: Mapping[str, Region], name: str) -> Region:
        if name not in self._names():
            raise ContractError(f"no projection {name!r}; choose one of {', '.join(self.shapes)}")
        return pools[name]

    def _own(self, pools: Mapping[str, Region], name: str, rows: slice) -> Any:
        region = self._region(pools, name)
        parts = [region.view(rank)[rows] for rank in self.buffer.local_ranks]
        return parts[0] if len(parts) == 1 else parts

    def _slots(self, pools: Mapping[str, Region], name: str) -> torch.Tensor | Region:
        region = self._slot_region(pools, name)
        return region if region.stacked is None else region.stacked

    def _slot_region(self, pools: Mapping[str, Region], name: str) -> Region:
        region, first = self._region(pools, name), self.buffer.geometry.experts_per_rank
        memory = self.buffer.memory
        ranks = range(memory.num_ranks) if memory.addressable else memory.local_ranks
        stacked = None if region.stacked is None else region.stacked[:, first:]
        return Region({rank: region.view(rank)[first:] for rank in ranks}, stacked)
