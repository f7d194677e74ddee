"""Plans and poisoned regions of R virtual ranks in one process, for the tests of the exchange kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.exchange import transfer
from moonep.planning import Geometry, Layout, destinations, layout, plan_allocation
from tests.moonep.planning.routing import histogram, popularity, routed_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POISON = float("nan")


@dataclass
class Case:
    """One exchange: its plan on the CPU, what the kernels take, and the regions they write (stacked,
    poisoned).
    """

    geometry: Geometry
    plan: Layout
    alloc: torch.Tensor
    tokens: list[int]
    targets: torch.Tensor  # [R, s, K], ABSENT where a rank has fewer tokens
    x: torch.Tensor  # [R, s, H]
    weights: torch.Tensor  # [R, s, K]
    regions: dict[str, torch.Tensor]
    shards: transfer.Shards

    @property
    def offsets(self) -> torch.Tensor:
        return self.plan.offsets.to(DEVICE)

    @property
    def group_rows(self) -> torch.Tensor:
        return self.plan.group_rows.to(torch.int32).to(DEVICE)

    @property
    def padding(self) -> int:
        return self.geometry.token_padding

    def push(self, **options) -> None:
        transfer.push(
            self.shards,
            self.x,
            self.targets,
            self.weights,
            self.offsets,
            self.group_rows,
            token_padding=self.padding,
            **options,
        )

    def replicate(self) -> None:
        transfer.replicate(self.shards, self.offsets, self.x.shape[-1] * self.x.element_size())

    def entries(self):
        """(source rank, token, k, computing rank, row) of every routed entry."""
        targets = self.targets.cpu()
        plain = torch.where(targets < 0, -targets - 1, targets)
        for source, s in enumerate(self.tokens):
            for token in range(s):
                for k in range(self.geometry.top_k):
                    rank, row = divmod(int(plain[source, token, k]), self.geometry.shard_rows)
                    yield source, token, k, rank, row


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    fill = POISON if dtype.is_floating_point else -7
    return torch.full(shape, fill, dtype=dtype, device=DEVICE)


def make_regions(
    geometry: Geometry, width: int, dtype: torch.dtype, partial_dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    R = geometry.num_ranks
    shapes = transfer.region_shapes(geometry.shard_rows, geometry.top_k, R, geometry.capacity, width)
    dtypes = {
        "rows": dtype,
        "weights": torch.float32,
        "origins": torch.int64,
        "lists": torch.int32,
        "partials": partial_dtype,
        "control": torch.int64,
    }
    regions = {name: poisoned((R, *shape), dtypes[name]) for name, shape in shapes.items()}
    regions["control"].zero_()
    return regions


def addresses_of(stacked: torch.Tensor) -> torch.Tensor:
    """int64 [R] addresses of the parts of `[R, ...]`, on their device."""
    return torch.tensor([part.data_ptr() for part in stacked], dtype=torch.int64, device=stacked.device)


def make_case(
    num_ranks: int,
    num_experts: int,
    top_k: int,
    tokens: list[int],
    *,
    kind: str = "power_law",
    width: int = 24,
    dtype: torch.dtype = torch.bfloat16,
    partial_dtype: torch.dtype | None = None,
    policy: str = "bounded",
    padding: int = 3,
    duplicates: bool = False,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry.build(
        num_ranks, num_experts, top_k, max(*tokens, 1), policy=policy, token_padding=padding
    )
    ids = routed_ids(popularity(kind, num_ranks, num_experts, seed), tokens, top_k, duplicates, seed)
    counts = histogram(ids, num_experts)
    alloc = plan_allocation(counts, policy=policy)
    plan = layout(counts, alloc, geometry)
    most = max(tokens)
    targets = torch.full((num_ranks, most, top_k), transfer.ABSENT, dtype=torch.int64)
    for rank, s in enumerate(tokens):
        targets[rank, :s] = destinations(plan, rank, ids[rank])
    x = torch.randn(num_ranks, most, width, generator=generator).to(dtype)
    weights = torch.rand(num_ranks, most, top_k, generator=generator)
    regions = make_regions(geometry, width, dtype, partial_dtype or dtype)
    shards = transfer.Shards(
        transfer.region_addresses([addresses_of(region) for region in regions.values()]),
        geometry.shard_rows,
        top_k,
        played=num_ranks,
    )
    return Case(
        geometry,
        plan,
        alloc,
        tokens,
        targets.to(DEVICE),
        x.to(DEVICE),
        weights.to(DEVICE),
        regions,
        shards,
    )
