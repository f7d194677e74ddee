"""Measures the expert-parallel exchange on one GPU, all ranks in loopback memory, and checks it as it goes.

    python -m tools.bench target=ep ranks=[2,8] maxvio=[0.2,3,10]

For each R and each imbalance (maxvio, reached by the spread of a lognormal popularity): plan, dispatch,
combine, weight copies, gradient return; bytes read and written over time as a share of a device-to-device
copy of the same run; static expert parallelism on torch's operators and on these kernels beside it. Writes
OUT/summary.json.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moonep.command import CommandFailure, bytes_text, command, progress, table, write_json
from moonep.errors import CapabilityError, ConfigError
from tools.ep_workbench import RULES, Copies, Exchange, Sizes, TorchPermutation

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COPY_BYTES = 4 << 30  # of the reference copy: many times the cache


@dataclass
class BenchEpConfig:
    """`python -m tools.bench target=ep`. Lists are swept."""

    ranks: list[int] = field(default_factory=lambda: [2, 8])
    maxvio: list[float] = field(default_factory=lambda: [0.2, 3.0, 10.0])
    experts: int = 256
    top_k: int = 8
    tokens: int = 4096  # of a rank
    hidden: int = 7168
    ffn_hidden: int = 2048
    policy: str = "bounded"
    tau: float = 1.0
    dtype: str = "bf16"
    token_padding: int = 8
    repeats: int = 15
    check: bool = True
    copies: bool = True  # weight copies and gradient return
    baselines: bool = True
    memory_gb: float = 100.0  # at most this much for expert weights; else fewer of the three projections
    seed: int = 0
    out: str = "runs/bench_ep"


def milliseconds(work: Callable[[], object], repeats: int, device: str, *, graph: bool = True) -> float:
    """Median time of one call; on a GPU replayed from a graph, or launched as it is."""
    work()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times)
    torch.cuda.synchronize()
    replay = work
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            work()
        replay = captured.replay
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):
        replay()
    for first, last in events:
        first.record()
        replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in events)


def copy_rate(repeats: int, device: str) -> float:
    """Bytes read and written in a second by a large copy within the device: the fastest of torch's ways."""
    size = COPY_BYTES if device != "cpu" else 1 << 24
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.bitwise_not(source, out=target))
    best = min(milliseconds(way, repeats, device, graph=graph) for way in ways for graph in (False, True))
    return 2 * size / best * 1e3


@dataclass
class Row:
    """One step of one case. Times in ms, bytes of all ranks; share: moved bytes over time, of the copy
    rate.
    """

    ranks: int
    maxvio: float
    policy: str
    step: str
    ms: float
    moved_bytes: int | None = None
    floor_bytes: int | None = None
    share: float | None = None
    floor_share: float | None = None
    note: str = ""


class Bench:
    """Runs the cases of a configuration and keeps their rows."""

    def __init__(self, config: BenchEpConfig, device: str):
        self.config, self.device = config, device
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.copy_rate = copy_rate(config.repeats, device)

    def sizes(self, ranks: int, maxvio: float, policy: str) -> Sizes:
        c = self.config
        sizes = (ranks, c.experts, c.top_k, c.tokens, c.hidden, c.ffn_hidden)
        return Sizes(*sizes, maxvio, policy, c.tau, c.token_padding, c.seed)

    def add(
        self,
        sizes: Sizes,
        step: str,
        work: Callable[[], object],
        moved: int | None = None,
        floor: int | None = None,
        note: str = "",
    ) -> None:
        ms = milliseconds(work, self.config.repeats, self.device)
        moved_share, floor_share = (
            None if n is None else n / (ms * 1e-3) / self.copy_rate for n in (moved, floor)
        )
        name = "torch" if step.startswith("torch") else sizes.policy
        row = Row(sizes.ranks, sizes.maxvio, name, step, ms, moved, floor, moved_share, floor_share, note)
        self.rows.append(row)

    def check(self, sizes: Sizes, step: str, problem: Callable[[], str]) -> None:
        if self.config.check and (text := problem()):
            self.failures.append(f"R={sizes.ranks} maxvio={sizes.maxvio} {sizes.policy} {step}: {text}")

    def case(self, ranks: int, maxvio: float) -> None:
        """All steps of our policy, then the baselines with the same routing."""
        sizes = self.sizes(ranks, maxvio, self.config.policy)
        exchange = Exchange(sizes, DTYPES[self.config.dtype], self.device)
        self.add(sizes, "plan", exchange.plan_one_rank)
        self.rows_of(exchange)
        if self.config.copies and exchange.geometry.slots:
            self.copies_of(exchange)
        if self.config.baselines:
            torch_path = TorchPermutation(exchange)
            self.add(sizes, "torch permute", torch_path.permute)
            self.add(sizes, "torch unpermute", torch_path.unpermute)
            del exchange, torch_path
            self.rows_of(
                Exchange(self.sizes(ranks, maxvio, "static"), DTYPES[self.config.dtype], self.device)
            )

    def rows_of(self, exchange: Exchange) -> None:
        sizes, used = exchange.sizes, exchange.used_rows
        counts = exchange.counts.sum(0).double()
        shard = bytes_text(exchange.geometry.shard_rows * exchange.row_bytes)
        maxvio = float(counts.max() / counts.mean()) - 1
        note = f"rows of a rank {min(used):,} to {max(used):,}, shard {shard}, maxvio {maxvio:.2f}"
        self.check(sizes, "dispatch", exchange.check_dispatch)
        traffic = exchange.dispatch_traffic
        self.add(sizes, "dispatch", exchange.dispatch, traffic.moved, traffic.floor, note)
        self.check(sizes, "combine", exchange.check_combine)
        traffic = exchange.combine_traffic
        self.add(sizes, "combine", exchange.combine, traffic.moved, traffic.floor)

    def copies_of(self, exchange: Exchange) -> None:
        self.weight_copies(exchange, DTYPES[self.config.dtype])
        self.gradient_return(exchange)

    def weight_copies(self, exchange: Exchange, dtype: torch.dtype) -> None:
        copies = Copies(exchange, self.parts(exchange, dtype), dtype)
        self.check(exchange.sizes, "weight copies", copies.check_push)
        if size := copies.push_bytes:
            self.add(exchange.sizes, "weight copies", copies.push, size, size, copies.describe())

    def gradient_return(self, exchange: Exchange) -> None:
        copies = Copies(exchange, self.parts(exchange, torch.float32), torch.float32)
        self.check(exchange.sizes, "gradient return", copies.check_give_back)
        if size := copies.give_back_bytes:
            self.add(exchange.sizes, "gradient return", copies.give_back, size, size, copies.describe())

    def parts(self, exchange: Exchange, dtype: torch.dtype) -> int:
        """Projections that fit the memory allowed: 3, else 1."""
        sizes, geometry = exchange.sizes, exchange.geometry
        experts = sizes.experts + sizes.ranks * geometry.slots
        part = experts * sizes.hidden * sizes.ffn_hidden * dtype.itemsize
        return 3 if 3 * part <= self.config.memory_gb * 1e9 else 1

    def summary(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self.device != "cpu" else "cpu (interpreter)"
        return {
            "device": name,
            "torch": torch.__version__,
            "config": asdict(self.config),
            "copy_bytes_per_s": self.copy_rate,
            "rows": [asdict(row) for row in self.rows],
            "ratios": self.ratios(),
            "failures": self.failures,
        }

    def ratios(self) -> dict[str, float]:
        """dispatch + combine at the largest maxvio over the smallest, and torch's path over ours, for each
        R.
        """
        ratios: dict[str, float] = {}
        low, high = min(self.config.maxvio), max(self.config.maxvio)
        for ranks in self.config.ranks:
            ours = {m: self.total(ranks, m, self.config.policy) for m in self.config.maxvio}
            if low < high:
                ratios[f"R={ranks} ours, maxvio {high:g} over {low:g}"] = ours[high] / ours[low]
            for maxvio, ms in ours.items() if self.config.baselines else ():
                ratios[f"R={ranks} maxvio {maxvio:g}, torch over ours"] = (
                    self.total(ranks, maxvio, "torch") / ms
                )
        return ratios

    def total(self, ranks: int, maxvio: float, policy: str) -> float:
        """ms of dispatch and combine (permute and unpermute)."""
        steps = ("dispatch", "combine", "torch permute", "torch unpermute")
        return sum(
            row.ms
            for row in self.rows
            if (row.ranks, row.maxvio, row.policy) == (ranks, maxvio, policy) and row.step in steps
        )

    def report(self) -> str:
        columns = ("R", "maxvio", "policy", "step", "ms", "GB moved", "share %", "floor share %", "note")
        cells = [
            (
                r.ranks,
                r.maxvio,
                r.policy,
                r.step,
                r.ms,
                None if r.moved_bytes is None else r.moved_bytes / 1e9,
                None if r.share is None else 100 * r.share,
                None if r.floor_share is None else 100 * r.floor_share,
                r.note,
            )
            for r in self.rows
        ]
        c = self.config
        title = f"Exchange, E={c.experts} K={c.top_k} S={c.tokens} H={c.hidden}"
        lines = [f"{name}: {value:.3f}" for name, value in self.ratios().items()]
        note = f"copy within the device: {self.copy_rate / 1e12:.2f} TB/s read and written\n"
        return table(title, columns, cells, note + "\n".join(lines))


def run(config: BenchEpConfig, device: str | None = None) -> Bench:
    """Measures, prints, writes OUT/summary.json. Fails if a check does."""
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype={config.dtype}: choose one of {', '.join(DTYPES)}")
    if config.policy not in RULES:
        raise ConfigError(f"policy={config.policy}: choose one of {', '.join(RULES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "")
    if not device:
        raise CapabilityError("target=ep times kernels on a CUDA device and there is none here")
    bench = Bench(config, device)
    cases = [(ranks, maxvio) for ranks in config.ranks for maxvio in config.maxvio]
    for ranks, maxvio in progress(cases, len(cases), "cases"):
        bench.case(ranks, maxvio)
    write_json(Path(config.out) / "summary.json", bench.summary())
    print(bench.report())
    if bench.failures:
        raise CommandFailure("; ".join(bench.failures))
    return bench


def main(argv: Sequence[str] | None = None) -> None:
    command(run, "bench_ep", BenchEpConfig, argv)


if __name__ == "__main__":
    main()
