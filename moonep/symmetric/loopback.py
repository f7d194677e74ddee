"""R virtual ranks inside one process, on one device: for tests, notebooks, and runs of a single process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moonep.errors import CapabilityError, ContractError, PeerFailure
from moonep.symmetric.base import Region, SymmetricMemory


class LoopbackGroup:
    """Stands where a process group would, for R ranks of which this process plays all.

    `MoonEPExperts(..., group=LoopbackGroup(R))` holds the experts of all R ranks and takes tensors of all of
    them; see there.
    """

    def __init__(self, num_ranks: int):
        if num_ranks < 1:
            raise ContractError(f"LoopbackGroup: num_ranks={num_ranks} must be at least 1")
        self.num_ranks = num_ranks

    def size(self) -> int:
        """R, as process groups say it."""
        return self.num_ranks


class LoopbackMemory(SymmetricMemory):
    """All parts are ordinary tensors of this process; nobody is ever waited for."""

    name = "loopback"

    def __init__(
        self,
        num_ranks: int,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        reason: str = "one process",
    ):
        super().__init__(num_ranks, range(num_ranks), device, timeout_s, reason)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Region:
        self.check_alive()
        try:
            stacked = torch.zeros((self.num_ranks, *shape), dtype=dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:
            size = self.num_ranks * dtype.itemsize * torch.Size(shape).numel()
            raise CapabilityError(
                f"no room for {size / 2**30:.2f} GiB on {self.device} ({self.num_ranks} loopback ranks); "
                f"lower the capacity, the number of ranks or tau: {str(error).splitlines()[0]}"
            ) from error
        return Region(dict(enumerate(stacked)), stacked)

    def barrier(self, phase: str) -> None:
        self.check_alive()

    def gather(self, rows: Sequence[torch.Tensor], phase: str) -> torch.Tensor:
        self.check_alive()
        return torch.stack(list(rows))

    def abort(self, reason: str) -> None:
        self.fail(PeerFailure(0, reason))
