"""Hardware profiles: what one device, its links and its network do, each figure with its source.

Rates are the *achievable* ones that the cost model divides by (not the brochure's); `peak_bf16_tflops` is the
brochure's and serves MFU only. `measured` names the fields that were measured on such a machine; every other
field is a specification times the ratio measured on H200, or an assumption, as `sources` says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moonep.errors import ConfigError

CLUSTER_DIR = Path(__file__).resolve().parents[2] / "configs" / "cluster"


@dataclass
class Hardware:
    """One kind of device and how devices reach each other. Decimal units: 1 GB/s = 1e9 bytes a second."""

    name: str = "h200"
    device: str = "cuda"  # cuda | cpu | npu
    memory_gb: float = 141.0  # of a device
    reserved_gb: float = 4.0  # context, allocator slack, NCCL
    peak_bf16_tflops: float = 989.0  # dense, for MFU
    bf16_tflops: float = 780.0  # grouped products of endless inner dimension
    fp8_tflops: float = 1560.0  # 0: none, bf16 is used
    fp4_tflops: float = 0.0
    half_depth: float = 600.0  # inner dimension at which a product runs at half that rate
    hbm_gb_s: float = 4250.0
    link_gb_s: float = 355.0  # each way, inside a domain
    domain_size: int = 8  # devices that reach each other by loads and stores
    network_gb_s: float = 40.0  # each way and device, between domains
    launch_us: float = 3.0  # a kernel inside a CUDA graph
    eager_launch_us: float = 12.0  # a kernel launched by Python
    barrier_us: float = 10.0  # a barrier of a domain
    exchange_us: float = 0.0  # of an exchange beyond barrier, launches and bytes (host work)
    network_latency_us: float = 30.0  # an exchange between domains, bytes excluded
    group_us: float = 0.15  # a group (expert) of a grouped product, beyond its rows and weights
    tile_rows: int = 64  # rows of a group are computed in whole tiles
    plan_us: float = 40.0  # of the planner on the device
    weight_passes: float = 1.0  # times a group's weights pass through memory (CPUs repack them)
    elementwise_passes: float = 1.0  # activation between the products: its cost over three values through HBM
    elementwise_backward: float = 2.0  # the same of its backward
    ranks_per_device: int = 1  # virtual ranks that share this device's time (one-GPU laboratory)
    devices: int | None = None  # size of the cluster; null: as many as asked for
    measured: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def validate(self) -> Hardware:
        """Raises ConfigError naming the first field that makes no sense."""
        positive = (
            "memory_gb bf16_tflops hbm_gb_s link_gb_s domain_size network_gb_s tile_rows ranks_per_device"
        )
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise ConfigError(f"cluster.{name}={getattr(self, name)} must be positive")
        for name in [
            "fp8_tflops",
            "fp4_tflops",
            "launch_us",
            "barrier_us",
            "group_us",
            "plan_us",
            "reserved_gb",
        ]:
            if getattr(self, name) < 0:
                raise ConfigError(f"cluster.{name}={getattr(self, name)} must not be negative")
        return self

    def tflops(self, precision: str) -> float:
        """Achievable TFLOP/s of matrix products in bf16, fp8, mxfp4 or fp32; the next wider type where it has
        none."""
        if precision == "mxfp4" and self.fp4_tflops:
            return self.fp4_tflops
        if precision in ("mxfp4", "fp8") and self.fp8_tflops:
            return self.fp8_tflops
        # CPUs multiply fp32 at the rate that was measured; GPUs (TF32 off) at about a tenth of bf16.
        return self.bf16_tflops if precision != "fp32" or self.device == "cpu" else self.bf16_tflops / 10

    def depth_factor(self, inner: float) -> float:
        """Share of the rate that a product of this inner dimension reaches: inner / (inner + half_depth)."""
        return inner / (inner + self.half_depth) if inner > 0 else 1.0

    @property
    def usable_gb(self) -> float:
        return self.memory_gb - self.reserved_gb

    def source_table(self) -> list[tuple[str, Any, str, str]]:
        """(field, value, measured?, source) for the report."""
        skip = ("name", "device", "sources", "measured", "devices", "ranks_per_device")
        rows = []
        for key, value in vars(self).items():
            if key not in skip:
                origin = "measured" if key in self.measured else "assumed"
                rows.append(
                    (key, value, origin, self.sources.get(key, self.sources.get("default", "default value")))
                )
        return rows


def profile_names() -> list[str]:
    """Names that `cluster=NAME` takes."""
    return sorted(path.stem for path in CLUSTER_DIR.glob("*.yaml"))


def load_profile(name: str) -> Hardware:
    """The profile of `configs/cluster/NAME.yaml`.

    Raises:
        ConfigError: no such profile (the message lists them).
    """
    import yaml

    from moonep.trainer.compose import did_you_mean

    path = CLUSTER_DIR / f"{name}.yaml"
    if not path.exists():
        names = profile_names()
        raise ConfigError(
            f"cluster={name}: no such hardware profile{did_you_mean(name, names)}; allowed: "
            f"{', '.join(names)}"
        )
    return Hardware(**yaml.safe_load(path.read_text())).validate()
