"""What every symmetric memory offers: equal regions on all ranks, a barrier that names its phase, one end.

A memory knows `num_ranks` R and the `local_ranks` that this process stands for: one, or all R of them in
loopback. The runtime is written over lists of local ranks, in lock-step, so the same code runs R processes or
R virtual ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from moonep.errors import MoonEPError


class Region:
    """An array of the same shape on every rank.

    Attributes:
        shape, dtype: of one rank's part.
        stacked: `[R, *shape]`, all parts side by side, where this process can address them so; else None.
    """

    def __init__(self, parts: dict[int, torch.Tensor], stacked: torch.Tensor | None = None):
        self._parts = parts
        self.stacked = stacked
        first = next(iter(parts.values()))
        self.shape, self.dtype = first.shape, first.dtype

    def view(self, rank: int) -> torch.Tensor:
        """Rank `rank`'s part, read and written in place. KeyError where it is out of reach."""
        return self._parts[rank]

    def pointers(self) -> torch.Tensor:
        """int64 `[R]`: the address of every rank's part, for kernels that reach peers by pointer."""
        addresses = [part.data_ptr() for _, part in sorted(self._parts.items())]
        return torch.tensor(addresses, dtype=torch.int64, device=next(iter(self._parts.values())).device)


class SymmetricMemory(ABC):
    """Regions shared by the ranks of one group.

    Attributes:
        name: "shm", "collective", "loopback" or "cuda".
        reason: why this memory was chosen.
        num_ranks: R.
        local_ranks: the ranks of this process.
        device: where regions live.
        timeout_s: longest wait for a peer.
        addressable: whether every rank's part of a region can be viewed here.
        recovers: whether the group can open another one after a failure.
    """

    name: str
    addressable = True
    recovers = True

    def __init__(
        self,
        num_ranks: int,
        local_ranks: Sequence[int],
        device: torch.device | str,
        timeout_s: float,
        reason: str = "",
    ):
        self.num_ranks, self.local_ranks = num_ranks, tuple(local_ranks)
        self.device, self.timeout_s, self.reason = torch.device(device), timeout_s, reason
        self.failure: MoonEPError | None = None

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Region:
        """A zeroed region. Collective: all ranks, same order, same shape.

        Raises:
            CapabilityError: there is no room; says how to make some.
        """

    @abstractmethod
    def barrier(self, phase: str) -> None:
        """Returns when every rank has arrived; what they wrote before is then visible.

        Args:
            phase: what this rank is doing, for the message of a peer that waits in vain.

        Raises:
            PeerTimeout: a rank did not arrive within `timeout_s`; on every rank, with ranks and phases.
            PeerFailure: a rank called `abort`; on every other rank.
        """

    @abstractmethod
    def gather(self, rows: Sequence[torch.Tensor], phase: str) -> torch.Tensor:
        """`[R, W]` int64: the row `[W]` of every rank, given for each local one. Waits as `barrier` does."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends this memory for all ranks: peers that wait now or later raise PeerFailure with `reason`."""

    def check_alive(self) -> None:
        """Raises what ended this memory, if something did."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: MoonEPError) -> MoonEPError:
        """Remembers what ended this memory, for later calls; returns it."""
        self.failure = self.failure or error
        return error

    def describe(self) -> dict[str, Any]:
        """For reports: name, reason, ranks, device."""
        return {
            "memory": self.name,
            "reason": self.reason,
            "num_ranks": self.num_ranks,
            "device": str(self.device),
        }
