"""The exchange by Triton kernels: ranks whose memory can be addressed, on GPUs (or interpreted, in loopback).

A row crosses to another rank once and is replicated there; a token's rows on a rank are summed there and
cross as one, unless it has only one, which is read in place. No step reads a value on the host.

Shapes: R ranks, n local ranks, NvS rows of a shard, H width, K top-k, s tokens of a rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.backend import triton_available
from kernels.exchange import transfer
from moonep.errors import CapabilityError, ContractError
from moonep.exchange.base import Exchange
from moonep.plan import Plan
from moonep.planning import Geometry, mark_duplicates
from moonep.symmetric import Region, SymmetricMemory


@dataclass(frozen=True)
class DeviceTables:
    """What the kernels read of a plan, on the device.

    targets: int64 `[1, s, K]` of each local rank, later entries of a token on a rank marked.
    offsets, group_rows: int32 `[R, G]`.
    """

    targets: list[torch.Tensor]
    offsets: torch.Tensor
    group_rows: torch.Tensor
    holders: transfer.Holders

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> DeviceTables:
        """From a plan made on the CPU."""
        rows = plan.geometry.shard_rows
        targets = [mark_duplicates(r.destinations, rows)[None].to(device) for r in plan.routes]
        first_row = plan.layout.first_row.to(device, torch.int32)
        return cls(
            targets,
            plan.layout.offsets.to(device, torch.int32).contiguous(),
            plan.layout.group_rows.to(device, torch.int32).contiguous(),
            transfer.find_holders(first_row, plan.geometry.slots),
        )


def require_triton() -> None:
    """Raises CapabilityError where Triton cannot be imported."""
    if not triton_available():
        raise CapabilityError(
            "expert parallelism on a GPU needs Triton, which is not installed: pip install 'triton>=3.6' "
            "(Linux), or keep the experts on a CPU"
        )


class DeviceExchange(Exchange):
    """Rows, scalars, weights and gradients through tables of peer addresses.

    Raises:
        CapabilityError: Triton is not installed.
    """

    def __init__(self, memory: SymmetricMemory, geometry: Geometry):
        super().__init__(memory, geometry)
        require_triton()
        rows, top_k = geometry.shard_rows, geometry.top_k
        self._origins = memory.allocate((rows,), torch.int64)
        self._lists = memory.allocate((rows, top_k), torch.int32)
        # Where peers are waited for, a wait that ended in vain stops every later kernel.
        self._control: Region | None = getattr(memory, "control", None)
        self._partials: dict[tuple[int, torch.dtype], Region] = {}
        self._addresses: dict[tuple[int, ...], torch.Tensor] = {}
        self._pointers: dict[int, tuple[Region, torch.Tensor]] = {}
        self._arriving: list[tuple[DeviceTables, Region]] = []

    def row_region(self, width: int, dtype: torch.dtype) -> Region:
        """As the base; partial sums of such rows get their place at the same time. Collective.

        Raises:
            ContractError: rows that are not whole 16-byte vectors.
        """
        if width * dtype.itemsize % 16:
            raise ContractError(
                f"hidden={width} in {dtype} makes rows of {width * dtype.itemsize} bytes; the exchange on a "
                f"GPU needs a multiple of 16 bytes: choose hidden divisible by {16 // dtype.itemsize}"
            )
        if (width, dtype) not in self._partials:
            sizes = self.geometry
            shapes = transfer.region_shapes(
                sizes.shard_rows, sizes.top_k, sizes.num_ranks, sizes.capacity, width
            )
            self._partials[width, dtype] = self.memory.allocate(shapes["partials"], dtype)
        return super().row_region(width, dtype)

    def prepare(self, plan: Plan) -> None:
        if "device" not in plan.extra:
            plan.extra["device"] = DeviceTables.of(plan, self.memory.device)

    def complete(self, phase: str) -> None:
        super().complete(phase)
        for tables, region in self._arriving:
            row_bytes = region.shape[-1] * region.dtype.itemsize
            for rank in self.local_ranks:
                transfer.replicate(self._shards(rank, rows=region), tables.offsets, row_bytes)
        self._arriving.clear()

    def put_rows(self, plan: Plan, rows: Sequence[torch.Tensor], into: Region) -> None:
        tables: DeviceTables = plan.extra["device"]
        for place, rank in enumerate(self.local_ranks):
            transfer.push(
                self._shards(rank, rows=into),
                rows[place].contiguous()[None],
                tables.targets[place],
                None,
                tables.offsets,
                tables.group_rows,
                token_padding=self.geometry.token_padding,
            )
        self._arriving.append((tables, into))

    def put_scalars(self, plan: Plan, scalars: Sequence[torch.Tensor], into: Region) -> None:
        tables: DeviceTables = plan.extra["device"]
        for place, rank in enumerate(self.local_ranks):
            transfer.scatter_weights(
                self._shards(rank, weights=into),
                scalars[place].contiguous()[None],
                tables.targets[place],
                tables.offsets,
                tables.group_rows,
                token_padding=self.geometry.token_padding,
            )

    def put_weights(self, plan: Plan, weights: Sequence[torch.Tensor], into: Region) -> None:
        if not self.geometry.slots:
            return
        tables: DeviceTables = plan.extra["device"]
        part_bytes = into.shape[1:].numel() * into.dtype.itemsize
        for place, rank in enumerate(self.local_ranks):
            home, pool = weights[place].contiguous(), self._pointers_of(into)[:, None]
            transfer.push_copies(self._shards(rank, rows=into), tables.holders, home, pool, part_bytes)

    def sum_rows(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        """As the base; a rank's rows of a token are added in the order of k, and what stays on the token's
        own rank is not rounded in between.
        """
        tables: DeviceTables = plan.extra["device"]
        width, dtype = source.shape[-1], source.dtype
        partials = self._partials[width, dtype]
        shards = [self._shards(rank, rows=source, partials=partials) for rank in self.local_ranks]
        for shard in shards:
            transfer.presum(shard, tables.offsets, width, dtype, weighted=False, partial_dtype=dtype)
        sources = [
            transfer.find_sources(shard, targets, width, dtype, dtype)
            for shard, targets in zip(shards, tables.targets, strict=True)
        ]
        self.memory.barrier("combine sums")
        return [
            transfer.final_sum(shard, found, None, width, dtype, partial_dtype=dtype)[0]
            for shard, found in zip(shards, sources, strict=True)
        ]

    def take_scalars(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        tables: DeviceTables = plan.extra["device"]
        return [
            transfer.gather_weights(self._shards(rank, weights=source), targets, source.dtype)[0]
            for rank, targets in zip(self.local_ranks, tables.targets, strict=True)
        ]

    def take_gradients(self, plan: Plan, source: Region, into: Sequence[torch.Tensor]) -> None:
        if not self.geometry.slots:
            return
        tables: DeviceTables = plan.extra["device"]
        for place, rank in enumerate(self.local_ranks):
            transfer.return_gradients(
                self._shards(rank, rows=source),
                tables.holders,
                into[place],
                self._pointers_of(source)[:, None],
                source.shape[1:].numel(),
                home_dtype=into[place].dtype,
                slot_dtype=source.dtype,
            )

    def _shards(
        self,
        rank: int,
        *,
        rows: Region | None = None,
        weights: Region | None = None,
        partials: Region | None = None,
    ) -> transfer.Shards:
        """The regions of one call, as played by `rank`."""
        regions = (rows, weights, self._origins, self._lists, partials, self._control)
        key = tuple(0 if region is None else id(region) for region in regions)
        if key not in self._addresses:
            pointers = [None if region is None else self._pointers_of(region) for region in regions]
            self._addresses[key] = transfer.region_addresses(pointers)
        return transfer.Shards(
            self._addresses[key],
            self.geometry.shard_rows,
            self.geometry.top_k,
            first_rank=rank,
            controlled=self._control is not None,
        )

    def _pointers_of(self, region: Region) -> torch.Tensor:
        # The region is kept with its addresses, so that its identity stays its own.
        if id(region) not in self._pointers:
            self._pointers[id(region)] = (region, region.pointers())
        return self._pointers[id(region)][1]
