"""The simulator: a source of routing, policies side by side, one record for each (policy, layer, step).

Layers are independent of one another and policies see the same counts, so (layer, policy) is the unit of
work: the records do not depend on how many processes compute them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol

import numpy as np

from moonep.command import CommandFailure
from moonep.simulate.cost import LayerShape, LayerTime, layer_time
from moonep.simulate.hardware import Hardware
from moonep.simulate.policies import Planned, Policy, PolicySettings, home_of, make_policies
from moonep.simulate.traffic import Traffic, analyse, copies_bound, moved_tokens

BLOCK_ELEMENTS = 4_000_000  # elements of alloc planned in one batch


class Source(Protocol):
    """Where counts come from: a bound workload or a trace."""

    def step_counts(self, step: int, layer: int, tokens: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Spec:
    """Everything a unit of work needs; picklable."""

    source: Source
    num_ranks: int
    num_experts: int
    top_k: int
    capacity: int
    steps: int
    layers: int
    policies: tuple[str, ...]
    settings: PolicySettings
    hardware: Hardware
    shape: LayerShape
    token_padding: int = 8


@dataclass
class Record:
    """One policy on one layer of one step. `load`: rows computed on each rank, `home_load`: without
    balancing."""

    policy: str
    layer: int
    step: int
    values: dict[str, float]
    time: LayerTime
    load: np.ndarray
    home_load: np.ndarray

    def flat(self) -> dict[str, Any]:
        """All numbers in one dictionary, times with the suffix _us."""
        times = {f"{key}_us": value for key, value in self.time.to_dict().items()}
        return {"policy": self.policy, "layer": self.layer, "step": self.step, **self.values, **times}


def labels(spec: Spec) -> list[str]:
    """The policies' names in tables, in order."""
    return [policy.label for policy in make_policies(spec.policies, spec.settings)]


def run(spec: Spec, workers: int = 1) -> Iterator[list[Record]]:
    """Records of each unit (layer, policy) as they are done, in a fixed order.

    Raises:
        CommandFailure: a policy returned an allocation that breaks an invariant (named).
    """
    count = len(make_policies(spec.policies, spec.settings))
    units = [(layer, index) for layer in range(spec.layers) for index in range(count)]
    if workers <= 1:
        yield from (run_unit(spec, *unit) for unit in units)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_unit, [spec] * len(units), *zip(*units, strict=True))


def run_unit(spec: Spec, layer: int, policy_index: int) -> list[Record]:
    """All steps of one layer under one policy, planned in batches."""
    policy = make_policies(spec.policies, spec.settings)[policy_index]
    block = max(1, BLOCK_ELEMENTS // (spec.num_ranks * spec.num_experts))
    records: list[Record] = []
    for first in range(0, spec.steps, block):
        steps = range(first, min(first + block, spec.steps))
        counts = _block_counts(spec, layer, steps)
        planned = policy.plan(counts)
        _check(policy, counts, planned, layer, first)
        lower = _moved_bounds(counts, planned, policy.tau)
        for index, step in enumerate(steps):
            records.append(
                _record(spec, policy, planned, counts[index], int(lower[index]), index, layer, step)
            )
    return records


_LAST_BLOCK: dict[tuple[Any, ...], np.ndarray] = {}


def _block_counts(spec: Spec, layer: int, steps: range) -> np.ndarray:
    """Counts [n, R, E]; the last block is kept, since every policy asks for the same ones."""
    key = (id(spec.source), layer, steps, spec.capacity)
    if key not in _LAST_BLOCK:
        _LAST_BLOCK.clear()
        _LAST_BLOCK[key] = np.stack([spec.source.step_counts(step, layer, spec.capacity) for step in steps])
    return _LAST_BLOCK[key]


def _check(policy: Policy, counts: np.ndarray, planned: Planned, layer: int, first: int) -> None:
    """The contract's hard invariants for every policy; the balance target for those that have one."""
    import torch

    from moonep.planning import check_allocation, default_slots

    if policy.name == "eplb":
        # A placement renumbers homes: what it may hold is its own slots, checked by construction of the
        # split.
        slots = None
    else:
        slots = policy.slots if policy.slots is not None else default_slots(*counts.shape[1:])
        slots = slots if policy.static_shape else None
    tau = policy.tau if policy.slots is None else None
    found = check_allocation(
        torch.from_numpy(counts), torch.from_numpy(np.asarray(planned.alloc)), tau=tau, slots=slots
    )
    hard = [line for line in found if policy.static_shape or "2*epn" not in line]
    if hard:
        raise CommandFailure(
            f"policy {policy.label} breaks an invariant in layer {layer}, steps from {first}: {hard[0]}"
        )


def _moved_bounds(counts: np.ndarray, planned: Planned, tau: float | None) -> np.ndarray:
    """[n] tokens any plan must move to meet the target; without a target, to reach the same maximum as this
    plan."""
    import torch

    from moonep.planning import PlanStatistics, plan_statistics

    if tau is not None:
        table = plan_statistics(
            torch.from_numpy(counts), torch.from_numpy(np.asarray(planned.alloc)), tau=tau
        )
        return table[:, PlanStatistics._fields.index("lower_bound")].numpy()
    reached = planned.alloc.sum(-1).max(-1)
    loads = [_loads_by(home_of(planned, i), one.sum(0), counts.shape[1]) for i, one in enumerate(counts)]
    return np.maximum(np.stack(loads) - reached[:, None], 0).sum(-1)


def _loads_by(home: np.ndarray, total_E: np.ndarray, ranks: int) -> np.ndarray:
    """Tokens of each rank [R] if every expert is computed at its home."""
    return np.bincount(home, weights=total_E, minlength=ranks).astype(np.int64)


def _record(
    spec: Spec,
    policy: Policy,
    planned: Planned,
    counts: np.ndarray,
    lower: int,
    index: int,
    layer: int,
    step: int,
) -> Record:
    alloc, home = planned.alloc[index], home_of(planned, index)
    traffic = analyse(
        counts,
        alloc,
        top_k=spec.top_k,
        home=None if planned.home is None else home,
        fetched=None if planned.fetched is None else planned.fetched[index],
        token_padding=spec.token_padding,
        tile_rows=spec.hardware.tile_rows,
    )
    time = layer_time(traffic, spec.shape, spec.hardware, plan_us=None if policy.planned_online else 0.0)
    total_E = counts.sum(0)
    home_load = total_E.reshape(spec.num_ranks, -1).sum(1)
    own_load = _loads_by(home, total_E, spec.num_ranks)
    limit = None if policy.tau is not None else int(traffic.load_R.max())
    values = measures(traffic, total_E, home_load)
    values["copies_bound"] = float(copies_bound(own_load, policy.tau or 1.0, limit))
    values["moved_tokens"] = float(moved_tokens(alloc, home))
    values["moved_bound"] = float(lower)
    values["plan_cpu_us"] = planned.seconds / planned.alloc.shape[0] * 1e6
    if planned.bounds:
        values |= planned.bounds[index]
    return Record(policy.label, layer, step, values, time, traffic.load_R, home_load)


def measures(traffic: Traffic, total_E: np.ndarray, home_load_R: np.ndarray) -> dict[str, float]:
    """The numbers of a plan that do not depend on hardware."""
    total = max(int(total_E.sum()), 1)
    owners = traffic.copies_RR.sum(1)
    rows_away = traffic.rows_RR.sum() - np.trace(traffic.rows_RR)
    return {
        "expert_maxvio": float(total_E.max() * total_E.size / total - 1),
        "imbalance_before": float(home_load_R.max() * home_load_R.size / total),
        "imbalance_after": traffic.imbalance,
        "copies": float(traffic.copies),
        "copies_fetched": float(traffic.fetched_RR.sum()),
        "copy_egress": float(owners.max()),
        "copy_ingress": float(traffic.copies_RR.sum(0).max()),
        "fan_out": float(traffic.fan_out_E.max()),
        "remote_choices": float(rows_away),
        "remote_rows": traffic.remote_rows,
        "row_egress": float(traffic.sent_R().max()),
        "row_ingress": float(traffic.received_R().max()),
        "padding_rows": float((traffic.padded_R - traffic.load_R).max()),
        "shard_rows": float(traffic.padded_R.max()),
        "groups": float(traffic.groups_R.max()),
        "tokens": float(total),
    }


def summarise(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """For each policy, the mean of every number over layers and steps, and the worst where the worst
    matters."""
    out: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(record.policy for record in records):
        rows = [record.flat() for record in records if record.policy == label]
        keys = [key for key in rows[0] if key not in ("policy", "layer", "step")]
        mean = {key: float(np.mean([row[key] for row in rows])) for key in keys}
        for key in ("imbalance_after", "imbalance_before", "shard_rows", "copy_ingress", "total_us"):
            mean[f"{key}_max"] = float(np.max([row[key] for row in rows]))
        mean["plans"] = float(len(rows))
        mean["plans_per_second"] = 1e6 / max(mean["plan_cpu_us"], 1e-9)
        out[label] = mean
    baseline = out.get("static", next(iter(out.values())))["total_us"]
    for mean in out.values():
        mean["speedup"] = baseline / mean["total_us"]
    return out
