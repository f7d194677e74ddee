"""Any process group, on one host or many: every rank holds its own regions, and data moves by all-to-all.

A peer's part cannot be viewed; `moonep.exchange.collective` moves rows instead, which needs split sizes on
the host. Failures are told through the group's key-value store, which works when the collective does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moonep.errors import CapabilityError, PeerFailure, PeerTimeout
from moonep.symmetric.base import Region, SymmetricMemory
from moonep.symmetric.meeting import meet

LOOK_EVERY = timedelta(seconds=0.5)  # between looks at the store while a collective does not end
GRACE_S = 2.0  # how long a failing rank waits for others to say that they failed too


class CollectiveMemory(SymmetricMemory):
    """Regions of this rank alone; ranks meet in collectives of `group` (None: the default group)."""

    name = "collective"
    addressable = False
    recovers = False  # collectives of the group that did not end still wait for their peers

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float = 60.0,
        reason: str = "",
    ):
        self.group, self.rank = group, dist.get_rank(group)
        super().__init__(dist.get_world_size(group), (self.rank,), device, timeout_s, reason)
        self._gloo = dist.get_backend(group) == "gloo"
        if self.device.type == "cpu" and not self._gloo:
            raise CapabilityError(
                f"memory='collective' on CPU tensors needs a gloo group, not {dist.get_backend(group)}; "
                "pass group=dist.new_group(backend='gloo')"
            )
        self._store = meet(group, timeout_s)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Region:
        self.check_alive()
        return Region({self.rank: torch.zeros(tuple(shape), dtype=dtype, device=self.device)})

    def barrier(self, phase: str) -> None:
        word = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._run(phase, lambda: dist.all_reduce(word, group=self.group, async_op=True))

    def gather(self, rows: Sequence[torch.Tensor], phase: str) -> torch.Tensor:
        (row,) = rows
        row = row.to(self.device).contiguous()
        parts = [torch.empty_like(row) for _ in range(self.num_ranks)]
        self._run(phase, lambda: dist.all_gather(parts, row, group=self.group, async_op=True))
        return torch.stack(parts)

    def all_to_all(
        self, send: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], phase: str
    ) -> torch.Tensor:
        """Rows of `send`, grouped by receiver, against the rows from every rank, in rank order."""
        received = torch.empty((sum(receive_counts), *send.shape[1:]), dtype=send.dtype, device=send.device)
        row_bytes = torch.Size(send.shape[1:]).numel() * send.element_size()
        self._run(
            phase,
            lambda: dist.all_to_all_single(
                _as_bytes(received),
                _as_bytes(send.contiguous()),
                [n * row_bytes for n in receive_counts],
                [n * row_bytes for n in send_counts],
                group=self.group,
                async_op=True,
            ),
        )
        return received

    def abort(self, reason: str) -> None:
        self._store.set("ended", f"{self.rank} {reason}")
        self.fail(PeerFailure(self.rank, reason))

    def _run(self, phase: str, start: Callable[[], Any]) -> None:
        self.check_alive()
        try:
            work = start()
            if not self._gloo:
                work.wait()
                return
            self._wait(work)
        except (RuntimeError, dist.DistError) as error:
            if self.failure is not None:
                raise
            raise self.fail(self._diagnose(phase)) from error

    def _wait(self, work: Any) -> None:
        deadline = time.monotonic() + self.timeout_s
        while True:
            slice_s = max(min(LOOK_EVERY.total_seconds(), deadline - time.monotonic()), 1e-3)
            try:
                work.wait(timedelta(seconds=slice_s))
                return
            except RuntimeError as error:
                if "timed out" not in str(error).lower() or time.monotonic() >= deadline:
                    raise
            if self._store.check(["ended"]):
                raise RuntimeError("another rank ended the exchange")

    def _diagnose(self, phase: str) -> PeerFailure | PeerTimeout:
        """Who ended it: a rank that said so, else those that leave no note of having failed themselves."""
        others = set(range(self.num_ranks)) - {self.rank}
        where = f"rank {self.rank} waited in {phase}"
        try:
            self._store.set(f"phase{self.rank}", phase)
            if self._store.check(["ended"]):
                rank, _, reason = self._store.get("ended").decode().partition(" ")
                return PeerFailure(int(rank), reason)
            until, silent = time.monotonic() + GRACE_S, others
            while silent and time.monotonic() < until:
                silent = {rank for rank in silent if not self._store.check([f"phase{rank}"])}
                time.sleep(0.05)
        except (RuntimeError, dist.DistError):
            where += "; the process that holds the job's store is gone too"
            silent = set()
        return PeerTimeout(dict.fromkeys(silent or others, "?"), self.timeout_s, where)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 `[bytes]`: gloo's all-to-all does not know bfloat16."""
    return rows.view(-1).view(torch.uint8)
