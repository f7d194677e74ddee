"""Symmetric memory on GPUs of one host: peers' parts are plain device pointers, used by kernels.

Two ways to open a peer's part, behind one interface: torch's symmetric memory (its CUDA backend; multicast
is never used), and CUDA IPC handles where torch refuses (two ranks on one GPU, no peer-to-peer allocator).
Barriers are kernels with a bounded wait: nothing here waits for the device in good times. When a wait ends
in vain the device writes who was missing to pinned memory and tells the peers; the next call of any rank
raises.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kernels.backend import triton_available
from kernels.exchange import transfer
from moonep.errors import CapabilityError, MoonEPError, PeerFailure, PeerTimeout
from moonep.symmetric.base import Region, SymmetricMemory
from moonep.symmetric.meeting import meet, wait_for

CALIBRATION_POLLS = 20_000  # about 20 ms
GRACE_S = 2.0  # how long a rank that was told of a failure waits for the words of the one that saw it
SMALLEST_PART = 256  # bytes: parts are never empty, and keep their alignment
TOO_LATE, TOLD = 1, 2  # first status word, as kernels/exchange/barrier.py writes it


class CudaRegion(Region):
    """A region whose peers' parts may live on other devices; `pointers` are for kernels on this one."""

    def __init__(self, parts: dict[int, torch.Tensor], device: torch.device):
        super().__init__(parts)
        self._device = device

    def pointers(self) -> torch.Tensor:
        addresses = [part.data_ptr() for _, part in sorted(self._parts.items())]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)


class CudaMemory(SymmetricMemory):
    """Regions that kernels of every rank address directly.

    Args:
        group: a torch.distributed process group of one host (None: the default one).
        device: this rank's GPU.
        timeout_s: longest wait for a peer.
        reason: why this memory was chosen.

    Attributes:
        transport: "symmetric" or "ipc". control: `[R + 1]` int64 arrival counters and abort word, for
        kernels that must do nothing once it is set.

    Raises:
        CapabilityError: Triton is missing, or there is no room. PeerTimeout.
    """

    name = "cuda"

    def __init__(
        self,
        group: Any = None,
        *,
        device: torch.device | str = "cuda",
        timeout_s: float = 60.0,
        reason: str = "",
    ):
        if not triton_available():
            raise CapabilityError(
                "memory='cuda' needs Triton, which is not installed: pip install 'triton>=3.6' (Linux), or "
                "use memory='collective'"
            )
        self.group, self.rank = group, dist.get_rank(group)
        device = torch.device(device)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(dist.get_world_size(group), (self.rank,), device, timeout_s, reason)
        self._store = meet(group, timeout_s)
        self._meetings = 0
        self._phases: list[str] = []
        self.transport, why = self._choose_transport()
        self.reason = f"{reason}; {why}" if reason else why
        self._epochs = torch.zeros(1, dtype=torch.int64, device=device)
        self._status = torch.zeros(1, 4, dtype=torch.int64, pin_memory=True)
        self._max_polls = self._calibrate()
        self.control = self.allocate((self.num_ranks + 1,), torch.int64)
        self._shards = self._barrier_shards(self.control.pointers())
        self._words: Region | None = None
        self._gathers = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Region:
        self.check_alive()
        count = torch.Size(shape).numel()
        elements = max(count, SMALLEST_PART // dtype.itemsize)
        try:
            open_parts = self._open_symmetric if self.transport == "symmetric" else self._open_ipc
            flat = open_parts(elements, dtype)
        except torch.OutOfMemoryError as error:
            self.abort(f"out of memory: {str(error).splitlines()[0]}")
            raise CapabilityError(
                f"no room for {elements * dtype.itemsize / 2**30:.2f} GiB on {self.device}; lower the "
                f"capacity, slots or tau: {str(error).splitlines()[0]}"
            ) from error
        return CudaRegion({r: p[:count].view(*shape) for r, p in flat.items()}, self.device)

    def barrier(self, phase: str) -> None:
        """As the base, for the stream: kernels launched after it see what peers launched before theirs."""
        self.check_alive()
        transfer.barrier(self._shards, self._epochs, self._status, self._phase(phase), self._max_polls)

    def gather(self, rows: Sequence[torch.Tensor], phase: str) -> torch.Tensor:
        """As the base; on the host, so it waits for the device."""
        (row,) = rows
        if self._words is None or self._words.shape[1] < row.numel():
            self._words = self.allocate((2, row.numel()), torch.int64)
        # Two alternating slots: a fast rank may start the next gather while a slow one still reads.
        slot, self._gathers = self._gathers % 2, self._gathers + 1
        words = [self._words.view(rank)[slot, : row.numel()] for rank in range(self.num_ranks)]
        words[self.rank].copy_(row)
        self.barrier(phase)
        table = torch.stack([w.to(self.device) for w in words]).cpu()
        self.check_alive()
        return table

    def abort(self, reason: str) -> None:
        self._tell(f"failed {self.rank} {reason}")
        for rank in range(self.num_ranks) if hasattr(self, "control") else ():
            self.control.view(rank)[self.num_ranks :].fill_(1)
        self.fail(PeerFailure(self.rank, reason))

    def check_alive(self) -> None:
        super().check_alive()
        if hasattr(self, "_status") and int(self._status[0, 0]):
            raise self.fail(self._ended())

    def close(self) -> None:
        self._words = None

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "transport": self.transport}

    def _ended(self) -> MoonEPError:
        """What the status words say; a rank that was told reads the words of the one that saw it."""
        kind, phase, missing, _ = self._status[0].tolist()
        waited = f"rank {self.rank} waited in {self._phases[phase]}"
        if kind == TOO_LATE:
            self._tell(f"late {missing} {waited}")
            return PeerTimeout({missing: "?"}, self.timeout_s, waited)
        until = time.monotonic() + GRACE_S
        while not self._store.check(["ended"]) and time.monotonic() < until:
            time.sleep(0.01)
        if not self._store.check(["ended"]):
            return PeerTimeout({}, self.timeout_s, f"another rank gave up; {waited}")
        return failure_from(self._store.get("ended").decode(), self.timeout_s)

    def _tell(self, words: str) -> None:
        """The first rank to end this memory leaves its words."""
        self._store.compare_set("ended", "", words)

    def _phase(self, phase: str) -> int:
        if phase not in self._phases:
            self._phases.append(phase)
        return self._phases.index(phase)

    def _barrier_shards(self, control: torch.Tensor) -> transfer.Shards:
        addresses = transfer.region_addresses([None] * (transfer.REGIONS - 1) + [control])
        return transfer.Shards(addresses, 1, 1, first_rank=self.rank)

    def _calibrate(self) -> int:
        """Looks a barrier takes in `timeout_s`, from a wait for nobody on words of its own; compiles it,
        too.
        """
        alone = torch.zeros(2, dtype=torch.int64, device=self.device)
        addresses = transfer.region_addresses(
            [None] * (transfer.REGIONS - 1) + [torch.tensor([alone.data_ptr()], device=self.device)]
        )
        shards = transfer.Shards(addresses, 1, 1)
        expected, status = torch.ones_like(self._epochs), torch.zeros_like(self._status, pin_memory=True)
        times = []
        for polls in (1, CALIBRATION_POLLS):
            alone.zero_()
            status.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            transfer.barrier(shards, expected, status, 0, polls, arrive=False)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        # The barrier that will be used, compiled before any peer can wait for this rank.
        transfer.barrier(shards, expected.zero_(), status.zero_(), 0, 1)
        torch.cuda.synchronize(self.device)
        return max(int(self.timeout_s * CALIBRATION_POLLS / max(times[1], 1e-6)), 1)

    def _swap(self, text: bytes) -> list[bytes]:
        """Every rank's bytes, through the store."""
        self._meetings += 1
        keys = {rank: f"swap{self._meetings}/{rank}" for rank in range(self.num_ranks)}
        self._store.set(keys[self.rank], text.hex())
        return [bytes.fromhex(t) for t in wait_for(self._store, keys, self.timeout_s, "opening memory")]

    def _choose_transport(self) -> tuple[str, str]:
        """(transport, why): torch's symmetric memory if all ranks can use it, else IPC handles."""
        uuids = [
            t.decode() for t in self._swap(str(torch.cuda.get_device_properties(self.device).uuid).encode())
        ]
        if len(set(uuids)) < len(uuids):
            return "ipc", "CUDA IPC: several ranks share a GPU, which torch's symmetric memory refuses"
        problems = [t.decode() for t in self._swap(self._attempt(self._probe).encode())]
        if any(problems):
            first = next(p for p in problems if p)
            return "ipc", f"CUDA IPC: torch's symmetric memory cannot be used ({first})"
        return "symmetric", "torch's symmetric memory"

    def _attempt(self, work: Callable[[], object]) -> str:
        try:
            work()
        except (ImportError, AttributeError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return ""

    def _probe(self) -> None:
        """Raises here, on this rank alone, what is missing for torch's symmetric memory."""
        import torch.distributed._symmetric_memory as symmetric

        symmetric.empty(64, dtype=torch.int32, device=self.device)
        for peer in range(torch.cuda.device_count()):
            if peer != self.device.index and not torch.cuda.can_device_access_peer(self.device.index, peer):
                raise RuntimeError(f"GPU {self.device.index} has no peer access to GPU {peer}")

    def _open_symmetric(self, elements: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(elements, dtype=dtype, device=self.device).zero_()
        group: Any = self.group if self.group is not None else dist.group.WORLD
        handle = symmetric.rendezvous(own, group)
        parts = {rank: handle.get_buffer(rank, (elements,), dtype) for rank in range(self.num_ranks)}
        self._zeroed()
        return {**parts, self.rank: own}

    def _open_ipc(self, elements: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        from torch.multiprocessing.reductions import reduce_tensor

        own = torch.zeros(elements, dtype=dtype, device=self.device)
        self._zeroed()
        handles = self._swap(pickle.dumps(reduce_tensor(own)))
        parts = {self.rank: own}
        for rank, handle in enumerate(handles):
            if rank != self.rank:
                # From this host's own ranks, through the group's store.
                rebuild, arguments = pickle.loads(handle)
                parts[rank] = rebuild(*arguments)
                parts[rank][:1].to(self.device)  # opens peer access
        self._zeroed()
        return parts

    def _zeroed(self) -> None:
        """Returns when every rank's new part is zero: peers may write to it."""
        torch.cuda.synchronize(self.device)
        self._swap(b"")


def failure_from(words: str, timeout_s: float) -> MoonEPError:
    """The error that the words of the rank that ended a memory stand for: "late RANK TEXT" or "failed RANK
    TEXT".
    """
    kind, rank, text = words.split(" ", 2)
    if kind == "late":
        return PeerTimeout({int(rank): "?"}, timeout_s, text)
    return PeerFailure(int(rank), text)
