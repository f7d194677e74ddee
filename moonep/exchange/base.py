"""Moving rows, route weights, expert weights and their gradients between ranks, as a plan says.

The order of use, each step for all local ranks: `enter` (peers have left the regions), any of `put_rows`,
`put_scalars`, `put_weights`, then `complete` (what was put has arrived), then work on the own parts,
`complete` again (peers may read), and `sum_rows`, `take_scalars`, `take_gradients`.

Shapes: R ranks, NvS rows of a shard, H width, K top-k, s tokens of a rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from moonep.plan import Plan
from moonep.planning import Geometry
from moonep.symmetric import Region, SymmetricMemory


class Exchange(ABC):
    """Rows `[NvS, H]` and scalars `[NvS]` of one geometry over one memory.

    Args:
        memory: where regions live.
        geometry: sizes of the layer.
    """

    def __init__(self, memory: SymmetricMemory, geometry: Geometry):
        self.memory, self.geometry = memory, geometry
        self.local_ranks = memory.local_ranks

    def row_region(self, width: int, dtype: torch.dtype) -> Region:
        """A region of `[NvS, width]` rows. Collective."""
        return self.memory.allocate((self.geometry.shard_rows, width), dtype)

    def scalar_region(self, dtype: torch.dtype) -> Region:
        """A region of `[NvS]` scalars. Collective."""
        return self.memory.allocate((self.geometry.shard_rows,), dtype)

    def prepare(self, plan: Plan) -> None:
        """Whatever this exchange must agree on before it moves the first row of a plan. Collective."""
        return None

    def enter(self, phase: str) -> None:
        """Waits until every rank has left the regions that will be written next."""
        self.memory.barrier(phase)

    def complete(self, phase: str) -> None:
        """Waits until what every rank put is in place."""
        self.memory.barrier(phase)

    @abstractmethod
    def put_rows(self, plan: Plan, rows: Sequence[torch.Tensor], into: Region) -> None:
        """Row t of `rows[i] [s, H]` to every place that its K entries go; padding rows become zero."""

    @abstractmethod
    def put_scalars(self, plan: Plan, scalars: Sequence[torch.Tensor], into: Region) -> None:
        """`scalars[i] [s, K]` to the places of the entries; padding becomes zero."""

    @abstractmethod
    def put_weights(self, plan: Plan, weights: Sequence[torch.Tensor], into: Region) -> None:
        """Expert weights `weights[i] [epn, ...]` into the slots `[slots, ...]` of ranks that hold a copy."""

    @abstractmethod
    def sum_rows(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        """`[s, H]` for each local rank: the sum of its tokens' rows.

        A rank's rows of a token are summed first, in ascending order of rows, accumulated in fp32 (fp64 for
        fp64) and rounded to the rows' dtype; then the ranks' sums, in rank order.
        """

    @abstractmethod
    def take_scalars(self, plan: Plan, source: Region) -> list[torch.Tensor]:
        """`[s, K]` for each local rank: the scalars at the places of its entries."""

    @abstractmethod
    def take_gradients(self, plan: Plan, source: Region, into: Sequence[torch.Tensor]) -> None:
        """Adds the gradients of copies, `[slots, ...]` on the ranks that held them, to `into[i] [epn, ...]`.

        In order of (rank, slot): the same sum at every repetition.
        """


def sum_groups(rows: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """`[len(starts), H]`: sums of `rows[order[starts[i] : starts[i + 1]]]`, in order, rounded once."""
    if not len(starts):
        return rows.new_zeros(0, rows.shape[1])
    return torch.embedding_bag(rows, order, starts)[0]
