"""POSIX shared memory between processes of one host: a plain file in /dev/shm for each region, mapped by all.

A file is created and given its pages by rank 0 (`posix_fallocate` reports a full tmpfs; `ftruncate` would
succeed and the first write die of SIGBUS), mapped by everyone, and unlinked at once, so a crash leaves
nothing behind. Barriers are words in a control page: a socket collective costs milliseconds where flags cost
microseconds.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moonep.errors import CapabilityError, MoonEPError, PeerFailure, PeerTimeout
from moonep.symmetric.base import Region, SymmetricMemory
from moonep.symmetric.meeting import meet, wait_for

SHM_DIRECTORY = "/dev/shm"
PHASE_BYTES = 64
REASON_BYTES = 512
SPINS = 200  # looks at the flags before a waiting rank starts to sleep between looks
_RUNNING, _FAILED, _TIMED_OUT = 0, 1, 2


class SharedMemory(SymmetricMemory):
    """Regions in /dev/shm for the processes of one host.

    Args:
        group: a torch.distributed process group (None: the default one). Its store serves to open files; no
            data passes through it.
        timeout_s: longest wait for a peer.
        reason: why this memory was chosen.
        directory: a tmpfs all ranks see.
    """

    name = "shm"

    def __init__(
        self,
        group: Any = None,
        *,
        timeout_s: float = 60.0,
        reason: str = "",
        directory: str = SHM_DIRECTORY,
    ):
        self.group, self.directory = group, directory
        self.rank = dist.get_rank(group)
        super().__init__(dist.get_world_size(group), (self.rank,), "cpu", timeout_s, reason)
        self._store, self._files = meet(group, timeout_s), 0
        self._epoch = 0
        self._fence = threading.Lock()
        self._gather_words: Region | None = None
        self._control = _Control(self._map_file(_Control.size(self.num_ranks)), self.num_ranks)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Region:
        self.check_alive()
        elements = self.num_ranks * torch.Size(shape).numel()
        if not elements:
            stacked = torch.zeros((self.num_ranks, *shape), dtype=dtype)
        else:
            mapped = self._map_file(elements * dtype.itemsize)
            stacked = torch.frombuffer(mapped, dtype=dtype, count=elements).view(self.num_ranks, *shape)
        return Region(dict(enumerate(stacked)), stacked)

    def barrier(self, phase: str) -> None:
        self.check_alive()
        self._epoch += 1
        self._control.set_phase(self.rank, phase)
        # x86 keeps stores in order; elsewhere the lock's release orders the data before the flag.
        with self._fence:
            self._control.arrived[self.rank] = self._epoch
        self._wait()
        with self._fence:
            pass

    def gather(self, rows: Sequence[torch.Tensor], phase: str) -> torch.Tensor:
        (row,) = rows
        if self._gather_words is None or self._gather_words.shape[1] < row.numel():
            # Two alternating slots: a fast rank may start the next gather while a slow one still reads.
            self._gather_words = self.allocate((2, row.numel()), torch.int64)
        slot = self._epoch % 2
        assert self._gather_words.stacked is not None
        words = self._gather_words.stacked[:, slot, : row.numel()]
        words[self.rank].copy_(row)
        self.barrier(phase)
        return words.clone()

    def abort(self, reason: str) -> None:
        self._control.end(self.rank, _FAILED, reason)
        self.fail(PeerFailure(self.rank, reason))

    def _wait(self) -> None:
        arrived, epoch = self._control.arrived, self._epoch
        looks, deadline = 0, time.monotonic() + self.timeout_s
        while int(arrived.min()) < epoch:
            if self._control.state[0] != _RUNNING:
                raise self.fail(self._ended())
            looks += 1
            if looks < SPINS:
                os.sched_yield()
                continue
            time.sleep(20e-6 if looks < 10 * SPINS else 500e-6)
            if looks % 16 == 0 and time.monotonic() > deadline:
                self._control.end(self.rank, _TIMED_OUT, "")
                raise self.fail(self._timeout())

    def _ended(self) -> MoonEPError:
        state, rank, reason = self._control.ending()
        return PeerFailure(rank, reason) if state == _FAILED else self._timeout()

    def _timeout(self) -> PeerTimeout:
        late = np.flatnonzero(self._control.arrived < self._epoch)
        phases = {int(rank): self._control.phase(int(rank)) for rank in late}
        waiting = self._control.phase(self.rank)
        return PeerTimeout(phases, self.timeout_s, f"rank {self.rank} waited in {waiting}")

    def _map_file(self, size: int) -> mmap.mmap:
        """A zeroed file of `size` bytes mapped by every rank. Collective; all ranks raise or none."""
        serial, self._files = self._files, self._files + 1
        descriptor = -1
        if self.rank == 0:
            path, descriptor, refused = _create(self.directory, size)
            self._store.set(f"file{serial}", f"{path}\n{refused}")
        (told,) = wait_for(self._store, {0: f"file{serial}"}, self.timeout_s, "making shared memory")
        path, _, refused = told.partition("\n")
        if refused:
            raise CapabilityError(refused)
        error = ""
        try:
            if descriptor < 0:
                descriptor = os.open(path, os.O_RDWR)
            mapped = mmap.mmap(descriptor, size)
            os.close(descriptor)
        except OSError as problem:
            error = (
                f"rank {self.rank} cannot map {path} ({problem}); are all ranks on one host? "
                "If not, use memory='collective'"
            )
        self._store.set(f"mapped{serial}_{self.rank}", error)
        keys = {rank: f"mapped{serial}_{rank}" for rank in range(self.num_ranks)}
        try:
            errors = wait_for(self._store, keys, self.timeout_s, "making shared memory")
        finally:
            if self.rank == 0:
                os.unlink(path)
        problems = [text for text in errors if text]
        if problems:
            raise CapabilityError(problems[0])
        return mapped


class _Control:
    """The page of flags: arrived [R], state, the rank that ended it; then phases and a reason."""

    def __init__(self, mapped: mmap.mmap, num_ranks: int):
        words = np.frombuffer(mapped, dtype=np.int64, count=8 * (num_ranks + 2))
        self.arrived = words[: 8 * num_ranks : 8]  # a cache line each
        self.state = words[8 * num_ranks :][:2]
        text = np.frombuffer(mapped, dtype=np.uint8, offset=words.nbytes)
        self._phases = text[: num_ranks * PHASE_BYTES].reshape(num_ranks, PHASE_BYTES)
        self._reason = text[num_ranks * PHASE_BYTES :][:REASON_BYTES]

    @staticmethod
    def size(num_ranks: int) -> int:
        return 64 * (num_ranks + 2) + num_ranks * PHASE_BYTES + REASON_BYTES

    def set_phase(self, rank: int, phase: str) -> None:
        _write_text(self._phases[rank], phase)

    def phase(self, rank: int) -> str:
        return _read_text(self._phases[rank]) or "start-up"

    def end(self, rank: int, state: int, reason: str) -> None:
        if self.state[0] == _RUNNING:
            _write_text(self._reason, reason)
            self.state[1] = rank
            self.state[0] = state

    def ending(self) -> tuple[int, int, str]:
        return int(self.state[0]), int(self.state[1]), _read_text(self._reason)


def _write_text(target: np.ndarray, text: str) -> None:
    encoded = text.encode()[: target.size - 1] + b"\0"
    target[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)


def _read_text(source: np.ndarray) -> str:
    return source.tobytes().split(b"\0", 1)[0].decode(errors="replace")


def _create(directory: str, size: int) -> tuple[str, int, str]:
    """(path, descriptor, "") of a new file with all its pages, or what is wrong and how to mend it."""
    path, descriptor = "", -1
    try:
        descriptor, path = tempfile.mkstemp(prefix="moonep_", dir=directory)
        os.posix_fallocate(descriptor, 0, size)
        return path, descriptor, ""
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
            os.unlink(path)
        if error.errno != errno.ENOSPC:
            return (
                "",
                -1,
                f"{directory} cannot be used ({error}); use memory='collective' (parallel.memory=collective)",
            )
        space = os.statvfs(directory)
        free = space.f_bavail * space.f_frsize
        return (
            "",
            -1,
            f"shared memory is too small: {size / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free in "
            f"{directory}; enlarge it (mount -o remount,size={-(-2 * (size + free) // 2**30)}G {directory}; "
            "docker run --shm-size=8g), lower the tokens of a micro-batch, or use memory='collective' "
            "(parallel.memory=collective)",
        )
