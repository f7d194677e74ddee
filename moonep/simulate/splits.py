"""Which (EP, PP, CP, DP) splits of a model fit a cluster, and the smallest cluster that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from model.config import K3Config
from moonep.simulate.cost import LayerTime, layer_time
from moonep.simulate.hardware import Hardware
from moonep.simulate.traffic import Traffic
from moonep.simulate.training import (
    StepTime,
    TrainingMemory,
    TrainingSetup,
    expert_shape,
    step_time,
    training_memory,
)

PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CONTEXTS = (1, 2, 4, 8, 16)


def balanced_traffic(
    ranks: int, experts: int, top_k: int, tokens: int, tile_rows: int, padding: int
) -> Traffic:
    """Expected traffic of perfectly even routing: no copies, every expert the same number of rows."""
    per_pair = tokens * top_k / ranks
    reached = tokens * (1 - (1 - 1 / ranks) ** top_k)
    epn = experts // ranks
    rows = tokens * top_k
    group = rows / epn
    return Traffic(
        rows_RR=np.full((ranks, ranks), per_pair),
        unique_RR=np.full((ranks, ranks), reached),
        copies_RR=np.zeros((ranks, ranks), dtype=np.int64),
        fetched_RR=np.zeros((ranks, ranks), dtype=np.int64),
        tokens_R=np.full(ranks, tokens),
        load_R=np.full(ranks, float(rows)),
        tiled_R=np.full(ranks, epn * np.ceil(group / tile_rows) * tile_rows),
        padded_R=np.full(ranks, epn * np.ceil(group / padding) * padding),
        groups_R=np.full(ranks, float(min(epn, rows))),
        fan_out_E=np.zeros(experts, dtype=np.int64),
    )


@lru_cache(maxsize=4096)
def _balanced_layer(config: K3Config, setup: TrainingSetup, key: str) -> LayerTime:
    hardware = _HARDWARE[key]
    traffic = balanced_traffic(
        setup.ep, config.num_experts, config.top_k, setup.tokens, hardware.tile_rows, setup.token_padding
    )
    return layer_time(traffic, expert_shape(config, setup), hardware)


_HARDWARE: dict[str, Hardware] = {}


def balanced_layer_seconds(config: K3Config, setup: TrainingSetup, hardware: Hardware) -> float:
    """Forward and backward of one expert layer under even routing."""
    key = repr(hardware)
    _HARDWARE[key] = hardware
    # Only what the layer depends on, so that the cache is hit across splits.
    plain = TrainingSetup(
        devices=setup.ep,
        ep=setup.ep,
        micro_batch=1,
        context=setup.tokens,
        precision=setup.precision,
        recompute=setup.recompute,
        tau=setup.tau,
        token_padding=setup.token_padding,
        overlap=setup.overlap,
    )
    return _balanced_layer(config, plain, key).total * 1e-6


@dataclass(frozen=True)
class Split:
    """A setup with what it needs and how fast it is."""

    setup: TrainingSetup
    memory: TrainingMemory
    time: StepTime

    @property
    def tokens_per_s(self) -> float:
        return self.setup.tokens_per_step / self.time.total

    def row(self) -> tuple[object, ...]:
        """One table row: split, memory, speed."""
        s = self.setup
        return (
            s.devices, s.ep, s.pp, s.cp, s.dp, s.zero, s.recompute, s.micro_batch, s.accumulation,
            self.memory.total / 1e9, self.time.total, self.tokens_per_s, self.tokens_per_s / s.devices,
        )  # fmt: skip


SPLIT_COLUMNS = (
    "devices",
    "EP",
    "PP",
    "CP",
    "DP",
    "ZeRO",
    "recompute",
    "micro-batch",
    "accumulation",
    "GB a device",
    "step s",
    "tokens/s",
    "tokens/s/device",
)


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def candidates(
    config: K3Config, base: TrainingSetup, devices: int, tokens_per_step: int
) -> Iterator[TrainingSetup]:
    """Every split of `devices`, with the accumulation that comes nearest to `tokens_per_step` from above."""
    for pp in PIPELINES:
        if devices % pp or pp > config.num_layers:
            continue
        for cp in CONTEXTS:
            if (devices // pp) % cp or base.context % cp:
                continue
            dp = devices // (pp * cp)
            accumulation = max(1, -(-tokens_per_step // (base.micro_batch * base.context * dp)))
            for ep in divisors(config.num_experts):
                if (devices // pp) % ep:
                    continue
                for zero in (1, 2) if base.zero else (0,):
                    for recompute in (False, True):
                        yield replace(
                            base, devices=devices, pp=pp, cp=cp, ep=ep, zero=zero, recompute=recompute,
                            accumulation=accumulation,
                        )  # fmt: skip


def fitting_splits(
    config: K3Config, base: TrainingSetup, hardware: Hardware, devices: int, tokens_per_step: int
) -> list[Split]:
    """Splits of `devices` that fit, fastest first."""
    out = []
    for setup in candidates(config, base, devices, tokens_per_step):
        memory = training_memory(config, setup, hardware.device)
        if memory.total > hardware.usable_gb * 1e9:
            continue
        layer = balanced_layer_seconds(config, setup, hardware)
        out.append(Split(setup, memory, step_time(config, setup, hardware, layer)))
    return sorted(out, key=lambda split: split.time.total)


def smallest_cluster(
    config: K3Config, base: TrainingSetup, hardware: Hardware, tokens_per_step: int, limit: int = 65_536
) -> list[Split]:
    """Splits of the fewest devices that fit, out of 1, 3, 5, 7 and 9 times powers of two; [] above
    `limit`."""
    counts = sorted({odd << power for odd in (1, 3, 5, 7, 9) for power in range(17)})
    for count in counts:
        if count <= limit and _may_fit(config, base, hardware, count):
            found = fitting_splits(config, base, hardware, count, tokens_per_step)
            if found:
                return found
    return []


def _may_fit(config: K3Config, base: TrainingSetup, hardware: Hardware, devices: int) -> bool:
    """Cheap necessary condition: all weights, gradients and optimizer state, spread perfectly."""
    total, _ = config.num_parameters()
    width = 2.0 if base.precision == "bf16" else 4.0
    return total * (width + 12.0) <= devices * hardware.usable_gb * 1e9
