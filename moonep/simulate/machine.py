"""Measures the machine it runs on and makes its hardware profile."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moonep.command import progress
from moonep.errors import ConfigError
from moonep.simulate.calibration import (
    PRODUCT_FIGURES,
    Comparison,
    LayerPoint,
    compare_layers,
    compare_products,
    fit_layers,
    fit_products,
)
from moonep.simulate.config import CalibrateConfig
from moonep.simulate.hardware import Hardware, load_profile
from moonep.simulate.layer_bench import LayerCase, run_case
from moonep.simulate.microbenchmarks import (
    DTYPES,
    Bench,
    ProductPoint,
    barrier_time,
    copy_rate,
    exchange_rate,
    launch_times,
    products,
)


@dataclass
class Calibrated:
    """The profile, what it was fitted to, and how well it fits."""

    hardware: Hardware
    machine: str
    precision: str
    products: list[ProductPoint]
    layers: list[LayerPoint]
    notes: list[str]

    def comparisons(self) -> list[Comparison]:
        """Predicted against measured, every point of the fit."""
        return [
            *compare_products(self.hardware, self.products, self.precision),
            *compare_layers(self.hardware, self.layers),
        ]


def join_group() -> tuple[int, int]:
    """(rank, ranks) under torchrun; starts the process group where there are several."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not dist.is_initialized():
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    return int(os.environ.get("RANK", "0")), ranks


def describe_machine() -> str:
    """`NVIDIA H200, torch 2.11.0, ...` for the profile's comment."""
    name = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()} CPU, {_cpu_model()}"
    )
    return f"{name}, torch {torch.__version__}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            line = next(line for line in file if line.startswith("model name"))
        return line.split(":", 1)[1].strip()
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def calibrate(config: CalibrateConfig) -> Calibrated:
    """Runs every measurement; collective under torchrun.

    Raises:
        ConfigError: unknown precision.
    """
    rank, ranks = join_group()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    precision = config.precision or ("bf16" if cuda else "fp32")
    if precision not in DTYPES:
        raise ConfigError(f"precision={precision}: allowed: {', '.join(DTYPES)}")
    bench = Bench(device, DTYPES[precision], repeats=config.repeats)
    hardware, notes = _direct(config, bench, ranks)
    points = _products(config, bench, precision, rank)
    hardware = fit_products(hardware, points, precision)
    layers: list[LayerPoint] = []
    virtual = config.ranks if ranks == 1 and config.ranks > 1 else 0
    if config.layers and (ranks > 1 or virtual):
        hardware = dataclasses.replace(hardware, ranks_per_device=max(virtual, 1))
        hardware, layers = _layers(config, bench, precision, hardware, rank, virtual)
    hardware = dataclasses.replace(hardware, sources=_sources(hardware, notes))
    return Calibrated(hardware, describe_machine(), precision, points, layers, notes)


def _start(config: CalibrateConfig, cuda: bool) -> Hardware:
    """The profile to start from, with this device's memory."""
    base = load_profile("h200" if cuda else "cpu")
    if cuda:
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / 1e9
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    changes: dict[str, Any] = {"name": config.name, "memory_gb": memory, "measured": [], "sources": {}}
    if not cuda:
        changes |= {"device": "cpu", "half_depth": 0.0}
    if config.network_gb_s is not None:
        changes["network_gb_s"] = config.network_gb_s
    return dataclasses.replace(base, **changes)


def _direct(config: CalibrateConfig, bench: Bench, ranks: int) -> tuple[Hardware, list[str]]:
    """Figures that one measurement gives."""
    notes: list[str] = []
    graph, eager = launch_times(bench)
    found: dict[str, Any] = {"hbm_gb_s": copy_rate(bench), "launch_us": graph, "eager_launch_us": eager}
    measured = ["memory_gb", "hbm_gb_s", "launch_us", "eager_launch_us"]
    if ranks > 1:
        found |= {"barrier_us": barrier_time(bench), "link_gb_s": exchange_rate(bench)}
        measured += ["barrier_us", "link_gb_s"]
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        found["domain_size"] = config.domain_size or local
        if local < ranks:
            notes.append(
                "several hosts: link_gb_s is the exchange over all of them; set domain_size and network_gb_s"
            )
    else:
        notes.append(
            "one rank: link, barrier and network figures are not measured (torchrun --nproc_per_node=N "
            "measures them)"
        )
    hardware = dataclasses.replace(_start(config, bench.cuda), **found)
    return dataclasses.replace(hardware, measured=measured), notes


def _products(config: CalibrateConfig, bench: Bench, precision: str, rank: int) -> list[ProductPoint]:
    """The sweep of grouped FFNs."""
    cuda = bench.cuda
    hidden = config.hidden or ([1024, 3584] if cuda else [64, 256])
    ffn = config.ffn_hidden or ([1024, 3072] if cuda else [128, 512])
    groups = config.groups or ([8, 32] if cuda else [4, 16])
    rows = config.rows or ([64, 256, 2048] if cuda else [8, 64, 256])
    cases = [(g, r, h, f) for h, f in zip(hidden, ffn, strict=False) for g in groups for r in rows]
    shown = progress(cases, len(cases), "products") if rank == 0 else iter(cases)
    return [products(bench, *case) for case in shown]


def _layers(
    config: CalibrateConfig, bench: Bench, precision: str, hardware: Hardware, rank: int, virtual: int
) -> tuple[Hardware, list[LayerPoint]]:
    """Whole layers of the runtime, and the exchange's figures fitted to them. Virtual ranks exchange in the
    device's own memory, so there the copy rate is what an exchange reaches of it."""
    cuda = bench.cuda
    hidden = (config.hidden or ([1024, 3584] if cuda else [64, 256]))[-1]
    ffn = (config.ffn_hidden or ([1024, 3072] if cuda else [128, 512]))[-1]
    experts = config.experts or (64 if cuda else 16)
    top_k = config.top_k or (8 if cuda else 2)
    cases = [
        LayerCase(experts, top_k, hidden, ffn, tokens, sigma, policy)
        for tokens in config.tokens or ([1024, 4096, 8192] if cuda else [64, 256, 1024])
        for sigma in config.sigmas
        for policy in ("static", "bounded")
    ]
    shown = progress(cases, len(cases), "layers") if rank == 0 else iter(cases)
    points = [run_case(case, bench, precision, hardware.tile_rows, virtual) for case in shown]
    figures = ("hbm_gb_s", "exchange_us", "plan_us") if virtual else LAYER_FIGURES
    # The fit moves no figure by more than a factor of 50, so an unknown host cost starts at a likely size.
    fitted = fit_layers(dataclasses.replace(hardware, exchange_us=100.0), points, figures)
    return dataclasses.replace(fitted, measured=[*hardware.measured, "plan_us", "exchange_us"]), points


LAYER_FIGURES = ("link_gb_s", "hbm_gb_s", "exchange_us", "plan_us")


def _sources(hardware: Hardware, notes: list[str]) -> dict[str, str]:
    here = describe_machine()
    sources = dict.fromkeys(hardware.measured, f"tools.calibrate on {here}")
    sources |= dict.fromkeys(PRODUCT_FIGURES, f"fitted to a sweep of grouped FFNs on {here}")
    sources["default"] = "not measured: taken from the shipped profile"
    if notes:
        sources["notes"] = "; ".join(notes)
    hardware.measured.extend(name for name in PRODUCT_FIGURES if name not in hardware.measured)
    return sources
