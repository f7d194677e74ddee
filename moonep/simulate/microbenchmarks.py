"""Small measurements of one device and its links, each the least of several repeats: what tools.calibrate
runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Bench:
    """Where and how carefully to measure."""

    device: torch.device
    dtype: torch.dtype
    repeats: int = 5
    least_s: float = 0.02  # a sample repeats the work until it lasts this long

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    @property
    def clock(self) -> Callable[[], float]:
        """Wall time; on one CPU thread the thread's own time, which other programs on the machine do not
        lengthen."""
        return time.perf_counter if self.cuda or torch.get_num_threads() > 1 else time.thread_time

    def seconds(self, work: Callable[[], object]) -> float:
        """Least seconds of one call of `work`, warm."""
        work()
        self.synchronize()
        count, best = 1, float("inf")
        for repeat in range(self.repeats + 1):
            start = self.clock()
            for _ in range(count):
                work()
            self.synchronize()
            spent = self.clock() - start
            if repeat == 0:
                count = max(1, min(1000, int(self.least_s / max(spent, 1e-7))))
            else:
                best = min(best, spent / count)
        return best


def copy_rate(bench: Bench, megabytes: int = 0) -> float:
    """Device memory: GB/s read plus written by a copy much larger than any cache."""
    size = (megabytes or (1024 if bench.cuda else 128)) * 1_000_000
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * size / bench.seconds(lambda: target.copy_(source)) / 1e9


def launch_times(bench: Bench, kernels: int = 200) -> tuple[float, float]:
    """Microseconds of a small kernel: (inside a CUDA graph, launched by Python). On CPU both are a small
    operator."""
    value = torch.zeros(64, device=bench.device)

    def chain() -> None:
        for _ in range(kernels):
            value.add_(1.0)

    eager = bench.seconds(chain) / kernels * 1e6
    if not bench.cuda:
        return eager, eager
    graph = torch.cuda.CUDAGraph()
    chain()
    with torch.cuda.graph(graph):
        chain()
    return bench.seconds(graph.replay) / kernels * 1e6, eager


@dataclass(frozen=True)
class ProductPoint:
    """One measured grouped FFN: `groups` experts of `rows` rows each."""

    groups: int
    rows: int
    hidden: int
    ffn_hidden: int
    forward_s: float
    backward_s: float


def products(bench: Bench, groups: int, rows: int, hidden: int, ffn_hidden: int) -> ProductPoint:
    """Forward and backward of the runtime's own grouped FFN."""
    from kernels.moe import grouped_ffn

    generator = torch.Generator(device="cpu").manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        values = torch.empty(*shape, dtype=bench.dtype)
        values.normal_(generator=generator) if values.numel() < 1 << 22 else values.uniform_(-1, 1)
        return (values * hidden**-0.5).to(bench.device).requires_grad_()

    gate, up = tensor(groups, ffn_hidden, hidden), tensor(groups, ffn_hidden, hidden)
    down = tensor(groups, hidden, ffn_hidden)
    x = tensor(groups * rows, hidden)
    offsets = torch.arange(1, groups + 1, dtype=torch.int32, device=bench.device) * rows
    gradient = torch.ones_like(x)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return grouped_ffn(x, offsets, (gate, up, down))

    def both() -> None:
        for leaf in (x, gate, up, down):
            leaf.grad = None
        grouped_ffn(x, offsets, (gate, up, down)).backward(gradient)

    alone = bench.seconds(forward)
    return ProductPoint(groups, rows, hidden, ffn_hidden, alone, max(bench.seconds(both) - alone, 1e-9))


def barrier_time(bench: Bench) -> float:
    """Microseconds of a barrier of the process group."""
    return _agreed(bench, lambda: dist.barrier()) * 1e6


def exchange_rate(bench: Bench, megabytes: int = 0) -> float:
    """GB/s each way and rank of an all-to-all with equal parts, the part for oneself left out."""
    ranks = dist.get_world_size()
    size = (megabytes or (256 if bench.cuda else 16)) * 1_000_000 // ranks * ranks
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    if dist.get_backend() == "gloo":
        pieces, received = list(source.chunk(ranks)), list(target.chunk(ranks))
        seconds = _agreed(bench, lambda: _pairwise(pieces, received))
    else:
        seconds = _agreed(bench, lambda: dist.all_to_all_single(target, source))
    return size * (ranks - 1) / ranks / seconds / 1e9


def _pairwise(pieces: list[torch.Tensor], received: list[torch.Tensor]) -> None:
    """All-to-all by sends and receives, for backends without one."""
    me = dist.get_rank()
    waits = []
    for peer in range(dist.get_world_size()):
        if peer != me:
            waits.append(dist.irecv(received[peer], peer))
    for peer in range(dist.get_world_size()):
        if peer != me:
            dist.send(pieces[peer], peer)
    for wait in waits:
        assert wait is not None
        wait.wait()


def _agreed(bench: Bench, work: Callable[[], object]) -> float:
    """Seconds of a collective: a fixed number of calls on every rank, the slowest rank's least."""
    for _ in range(3):
        work()
    best = float("inf")
    for _ in range(bench.repeats):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(5):
            work()
        bench.synchronize()
        best = min(best, (time.perf_counter() - start) / 5)
    slowest = torch.tensor([best], device=bench.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
