"""Routing seen and steered: balance of every MoE layer for the metrics, recorded traces, forced choices.

Experts see one *instance* of routing for each MoE layer and micro-batch; a trace counts instances, numbered
step x accumulation + micro-batch, so that replaying a trace in the same setting repeats it exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.planning.statistics import PlanStatistics
from moonep.trainer.config import Config
from moonep.trainer.derived import Derived
from moonep.trainer.engine import ExpertGroups

# Columns of the statistics kept for each layer, averaged over instances and expert-parallel groups.
STATISTICS = ("rank_imbalance_before", "rank_imbalance_after", "moved_tokens", "copies")


class ForcedRouting(Protocol):
    """Where forced choices come from: a bound workload of the simulator, or a replayed trace."""

    def token_choices(self, step: int, layer: int, rank: int, num_tokens: int) -> np.ndarray: ...


def forced_routing(config: Config, model: K3Config, derived: Derived) -> ForcedRouting | None:
    """What `routing.force` names: null, a workload (its parameters in routing.force_args), or a trace's path.

    Raises:
        ConfigError, DataError: unknown workload or parameter, or a trace of another geometry.
    """
    force, args = config.routing.force, config.routing.force_args
    if force is None:
        if args:
            raise ConfigError(f"routing.force_args={args} without routing.force; name a workload")
        return None
    from moonep.simulate.traces import TraceReplay, load_trace
    from moonep.simulate.workloads import WORKLOADS, make_workload

    if force not in WORKLOADS and Path(force).exists():
        trace = load_trace(force, num_experts=model.num_experts, top_k=model.top_k)
        trace.require(num_ranks=derived.ep, num_experts=model.num_experts, top_k=model.top_k)
        return TraceReplay(trace, config.seed)
    if "/" in force or force.endswith((".npz", ".npy", ".jsonl")):
        raise ConfigError(f"routing.force={force}: no such trace; record one with routing.record=true")
    try:
        workload = make_workload(force, **args)
    except ConfigError as error:
        message = (
            str(error).replace("workload=", "routing.force=").replace("workload.", "routing.force_args.")
        )
        raise ConfigError(message) from None
    return workload.bind(derived.ep, model.num_experts, model.top_k, config.seed)


class RoutingMonitor:
    """Hooks into the MoE layers: forces choices, counts them, collects the plans' statistics.

    Args:
        layers: the model's LatentMoE modules, in order.
        groups: expert-parallel groups.
        source: forced choices, or None.
    """

    def __init__(
        self,
        config: Config,
        model: K3Config,
        derived: Derived,
        layers: list[Any],
        groups: ExpertGroups,
        source: ForcedRouting | None,
    ):
        self.layers, self.groups, self.source = layers, groups, source
        self.accumulation, self.capacity, self.top_k = derived.accumulation, derived.capacity, model.top_k
        self.ep_rank, self.ep_size = dist.get_rank(groups.ep), derived.ep
        self.seed = config.seed
        device = next(layers[0].parameters()).device if layers else torch.device("cpu")
        self._sums = torch.zeros(len(layers), len(STATISTICS), dtype=torch.float64, device=device)
        self._instance, self._instances = 0, 0
        self._place = {layer.layer: i for i, layer in enumerate(layers)}
        self._recording = config.routing.record
        self._writer: Any = None
        if self._recording:
            self._before = [torch.zeros_like(layer.router.last_counts_E) for layer in layers]
        if source is not None:
            for layer in layers:
                layer.router.route_hook = self._force

    def record_into(self, folder: Path) -> None:
        """Where `routing.record=true` writes: rank 0, and only its own expert-parallel group."""
        if self._recording and dist.get_rank() == 0:
            from moonep.simulate.traces import TraceWriter

            self._writer = TraceWriter(folder, self.top_k, self.capacity, sorted(self._place))

    def begin_step(self, step: int) -> None:
        """Before the first micro-batch of 0-based step `step`."""
        self._instance = step * self.accumulation

    def end_micro_batch(self) -> None:
        """After forward and backward of a micro-batch. Collective when recording."""
        for row, layer in enumerate(self.layers):
            plan = getattr(layer.experts, "last_plan", None)
            if plan is not None:
                self._sums[row] += plan_numbers(plan.statistics, self.ep_size)
        if self._recording:
            self._record()
        self._instances += 1
        self._instance += 1

    def collect(self) -> list[dict[str, float]]:
        """Balance of each MoE layer since the last call, over all ranks; clears the counts. Collective."""
        if not self.layers:
            return []
        counts = torch.stack([layer.router.last_counts_E for layer in self.layers]).double()
        packed = torch.cat([counts.flatten(), self._sums.flatten()])
        dist.all_reduce(packed)
        counts = packed[: counts.numel()].view_as(counts).cpu()
        sums = packed[counts.numel() :].view_as(self._sums).cpu()
        means = sums / (max(self._instances, 1) * dist.get_world_size())
        for row, layer in enumerate(self.layers):
            layer.router.clear_counts()
            if self._recording:
                self._before[row].zero_()
        self._sums.zero_()
        self._instances = 0
        return [self._layer_numbers(counts[i], means[i]) for i in range(len(self.layers))]

    @staticmethod
    def _layer_numbers(counts_E: torch.Tensor, means: torch.Tensor) -> dict[str, float]:
        mean = max(float(counts_E.mean()), 1e-9)
        numbers = {
            "maxvio": float(counts_E.max()) / mean - 1.0,
            "dead_fraction": float((counts_E == 0).double().mean()),
        }
        numbers.update({name: float(value) for name, value in zip(STATISTICS, means, strict=True)})
        return numbers

    def close(self) -> None:
        """Writes what is left of a recording."""
        if self._writer is not None:
            self._writer.close()

    def _force(self, layer: int, scores_TE: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor | None:
        if not torch.is_grad_enabled():  # validation and sampling go their own way
            return None
        assert self.source is not None
        chosen = self.source.token_choices(self._instance, layer, self.ep_rank, ids_TK.shape[0])
        return torch.from_numpy(np.ascontiguousarray(chosen)).to(ids_TK.device)

    def _record(self) -> None:
        """Counts [layers, ranks, experts] of this micro-batch, gathered in the group, written by rank 0."""
        now = [layer.router.last_counts_E for layer in self.layers]
        own = torch.stack([n - b for n, b in zip(now, self._before, strict=True)])
        self._before = [n.clone() for n in now]
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.groups.ep))]
        dist.all_gather(parts, own, group=self.groups.ep)
        if self._writer is not None:
            self._writer.add(self._instance, torch.stack(parts, dim=1).cpu().numpy())


def plan_numbers(statistics: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """`STATISTICS` of one plan, fp64, from the integers of `planning.PlanStatistics`; no host read."""
    column = dict(zip(PlanStatistics._fields, statistics.double().unbind(), strict=True))
    mean = (column["total"] / num_ranks).clamp(min=1e-9)
    idle = column["total"] == 0
    before = torch.where(idle, 1.0, column["max_before"] / mean)
    after = torch.where(idle, 1.0, column["max_after"] / mean)
    return torch.stack([before, after, column["moved_tokens"], column["copies"]])
