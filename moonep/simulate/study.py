"""A whole simulation from its configuration: source, geometry, policies, records, summary and verdicts on
memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.config import K3Config
from moonep.command import progress
from moonep.errors import ConfigError
from moonep.simulate.baselines import LLEPSettings, UltraEPSettings
from moonep.simulate.config import (
    Geometry,
    SimulateConfig,
    build_workload,
    complete_geometry,
    layer_shape,
    load_model,
)
from moonep.simulate.memory import expert_memory, reserved_rows
from moonep.simulate.policies import EPLBSettings, Policy, PolicySettings, make_policies
from moonep.simulate.simulation import Record, Source, Spec, run, summarise
from moonep.simulate.traces import Trace, TraceReplay, load_trace


@dataclass
class Study:
    """A finished simulation. `summary[label]` holds the means; `memory[label]` the bytes of the fullest
    rank."""

    config: SimulateConfig
    geometry: Geometry
    spec: Spec
    title: str
    records: list[Record]
    summary: dict[str, dict[str, float]]
    memory: dict[str, dict[str, Any]]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """summary.json: stable keys."""
        hardware = self.spec.hardware
        return {
            "title": self.title,
            "geometry": vars(self.geometry),
            "steps": self.spec.steps,
            "layers": self.spec.layers,
            "seed": self.config.seed,
            "cluster": {"name": hardware.name, "measured": hardware.measured},
            "policies": {
                label: {**self.summary[label], "memory": self.memory[label]} for label in self.summary
            },
        }


def run_study(config: SimulateConfig) -> Study:
    """Simulates; shows a progress bar when it takes longer than two seconds.

    Raises:
        ConfigError, DataError: wrong input. CommandFailure: a policy broke an invariant.
    """
    spec, geometry, title, model = build_spec(config)
    policies = make_policies(config.policies, spec.settings)
    if not policies:
        raise ConfigError("policies=[]: name at least one policy")
    start = time.perf_counter()
    workers = config.workers
    if workers == 0:
        import os

        workers = os.cpu_count() or 1
    records: list[Record] = []
    for unit in progress(run(spec, workers), spec.layers * len(policies), "simulating"):
        records.extend(unit)
    _share_proved_bounds(records, policies)
    summary = summarise(records)
    memory = {p.label: _memory(config, spec, geometry, model, p, summary[p.label]) for p in policies}
    return Study(config, geometry, spec, title, records, summary, memory, time.perf_counter() - start)


def _share_proved_bounds(records: list[Record], policies: list[Policy]) -> None:
    """Where the oracle ran, its proved bound on copies holds for every policy with the same balance
    target."""
    oracle = next((p for p in policies if p.name == "exact"), None)
    if oracle is None:
        return
    same = {p.label for p in policies if p.tau == oracle.tau and p.slots == oracle.slots}
    proved = {(r.layer, r.step): r.values["copies_bound"] for r in records if r.policy == oracle.label}
    for record in records:
        if record.policy in same:
            record.values["copies_bound"] = proved[record.layer, record.step]


def build_spec(config: SimulateConfig) -> tuple[Spec, Geometry, str, K3Config | None]:
    """The unit-independent part: source, sizes, settings."""
    model = load_model(config.model)
    trace = None
    if config.trace is not None:
        expected = config.geometry.E or (model.num_experts if model else None)
        trace = load_trace(config.trace, num_experts=expected, top_k=config.trace_top_k or config.geometry.K)
    geometry = complete_geometry(config.geometry, model, trace)
    source, title = _source(config, geometry, trace)
    config.cluster.validate()
    for key in ("steps", "layers"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")
    spec = Spec(
        source=source,
        num_ranks=geometry.R,
        num_experts=geometry.E,
        top_k=geometry.K,
        capacity=geometry.S,
        steps=config.steps or (trace.num_steps if trace else 16),
        layers=config.layers or (trace.num_layers if trace else 4),
        policies=tuple(config.policies),
        settings=policy_settings(config),
        hardware=config.cluster,
        shape=layer_shape(config.layer, geometry.H, geometry.Hi),
        token_padding=geometry.token_padding,
    )
    if trace and (spec.steps > trace.num_steps or spec.layers > trace.num_layers):
        raise ConfigError(
            f"steps={spec.steps}, layers={spec.layers}: the trace has {trace.num_steps} steps, "
            f"{trace.num_layers} layers"
        )
    return spec, geometry, title, model


def _source(config: SimulateConfig, geometry: Geometry, trace: Trace | None) -> tuple[Source, str]:
    if trace is not None:
        return TraceReplay(trace, config.seed), f"trace {config.trace}"
    workload = build_workload(config.workload)
    return workload.bind(geometry.R, geometry.E, geometry.K, config.seed), workload.describe()


def policy_settings(config: SimulateConfig) -> PolicySettings:
    """The frozen settings behind the configuration groups."""
    return PolicySettings(
        taus=tuple(config.taus),
        slots=config.slots,
        eplb=EPLBSettings(**vars(config.eplb)),
        llep=LLEPSettings(**vars(config.llep)),
        ultraep=UltraEPSettings(**vars(config.ultraep)),
        exact_tau=config.exact.tau,
        exact_seconds=config.exact.time_limit_s,
    )


def _memory(
    config: SimulateConfig,
    spec: Spec,
    geometry: Geometry,
    model: K3Config | None,
    policy: Policy,
    means: dict[str, float],
) -> dict[str, Any]:
    """Bytes of the fullest rank and whether they fit, when shapes are static and when they follow the
    counts."""
    layers = config.moe_layers or (len(model.moe_layers) if model else spec.layers)
    rows, slots = reserved_rows(
        num_ranks=geometry.R,
        num_experts=geometry.E,
        capacity=geometry.S,
        top_k=geometry.K,
        tau=policy.tau if policy.static_shape else None,
        slots=policy.slots,
        padding=geometry.token_padding,
    )
    held = slots if policy.static_shape else int(means["copy_ingress_max"])
    memory = expert_memory(
        spec.shape,
        epn=geometry.E // geometry.R,
        layers=layers,
        copies_held=held,
        rows_reserved=rows,
        rows_peak=int(means["shard_rows_max"]),
        optimizer_bytes=12.0 / config.data_parallel,
        resident_copies=policy.name == "eplb",
    )
    limit = spec.hardware.usable_gb * 1e9 - config.other_gb * 1e9
    return {
        **memory.to_dict(),
        "rows_reserved": rows,
        "slots": held,
        "limit": limit,
        "fits_static_shapes": memory.reserved <= limit,
        "fits_dynamic_shapes": memory.peak <= limit,
        "verdict": _verdict(memory.reserved, memory.peak, limit),
    }


def _verdict(reserved: float, peak: float, limit: float) -> str:
    if reserved <= limit:
        return "fits"
    return "fits if sized after the counts" if peak <= limit else "out of memory"


def best_policy(summary: dict[str, dict[str, float]], among: Sequence[str] | None = None) -> str:
    """The label with the lowest predicted layer time."""
    labels = list(among or summary)
    return min(labels, key=lambda label: summary[label]["total_us"])
