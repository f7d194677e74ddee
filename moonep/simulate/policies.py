"""Policies under test, each behind the same call: a block of steps of one layer in, allocations out.

The runtime's own policies (static, moonep, bounded, and any registered one) are planned by
`moonep.plan_allocation` itself; eplb, llep and ultraep by `baselines`; exact by the integer-programming
oracle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from moonep.errors import ConfigError
from moonep.simulate.baselines import (
    LLEPSettings,
    UltraEPSettings,
    eplb_placement,
    llep,
    split_evenly,
    ultraep,
)
from moonep.simulate.traffic import home_ranks

if TYPE_CHECKING:
    import torch

SIMULATED = ("eplb", "llep", "ultraep", "exact")


@dataclass
class Planned:
    """Plans of `n` consecutive steps of one layer."""

    alloc: np.ndarray  # [n, R, E]
    seconds: float  # wall time of planning on this CPU, all n
    home: np.ndarray | None = None  # [n, E] where the originals live; None: e // epn
    fetched: np.ndarray | None = None  # bool [n, R, E] weights transferred in this step; None: every copy
    bounds: list[dict[str, float]] = field(default_factory=list)  # of the oracle: proved bound on copies


@dataclass
class Policy:
    """A named policy with its settings; `plan` is called with blocks of steps in order.

    `label` names it in tables. `tau`: balance target, None if it has none. `static_shape`: rows a rank can
    receive are known at construction; without it a system allocates after the counts are known, or reserves
    for the worst case.
    """

    name: str
    label: str
    tau: float | None = None
    slots: int | None = None
    planned_online: bool = True
    static_shape: bool = False

    def plan(self, counts: np.ndarray) -> Planned:
        """Plans counts [n, R, E] of consecutive steps."""
        raise NotImplementedError


@dataclass
class RuntimePolicy(Policy):
    """A policy of `moonep.plan_allocation`, in one batched call."""

    def plan(self, counts: np.ndarray) -> Planned:
        import torch

        from moonep.planning import plan_allocation

        tensor = torch.from_numpy(np.ascontiguousarray(counts))
        self._warm_up(tensor)
        start = time.perf_counter()
        alloc = plan_allocation(tensor, policy=self.name, tau=self.tau or 1.0, slots=self.slots)
        seconds = time.perf_counter() - start
        return Planned(alloc.numpy(), seconds)

    def _warm_up(self, counts: torch.Tensor) -> None:
        """Loads what the planner compiles for large batches, so that it is not counted as planning time."""
        from moonep.planning import plan_allocation

        if self.name not in _WARM and counts.numel() > COMPILED_ELEMENTS:
            some = counts[: max(1, 2 * COMPILED_ELEMENTS // counts[0].numel())]
            plan_allocation(some, policy=self.name, tau=self.tau or 1.0, slots=self.slots)
            _WARM.add(self.name)


COMPILED_ELEMENTS = 1 << 14  # about where the planner turns from Python to compiled code
_WARM: set[str] = set()


@dataclass
class LLEP(Policy):
    settings: LLEPSettings = field(default_factory=LLEPSettings)

    def plan(self, counts: np.ndarray) -> Planned:
        start = time.perf_counter()
        alloc = np.stack([llep(one, self.settings) for one in counts])
        return Planned(alloc, time.perf_counter() - start)


@dataclass
class UltraEP(Policy):
    settings: UltraEPSettings = field(default_factory=UltraEPSettings)

    def plan(self, counts: np.ndarray) -> Planned:
        start = time.perf_counter()
        alloc = np.stack([ultraep(one, self.settings) for one in counts])
        return Planned(alloc, time.perf_counter() - start)


@dataclass(frozen=True)
class EPLBSettings:
    """`redundant`: replicas a rank beside its E/R; `period`: steps between rebalances; `window`: past steps
    averaged; `groups`, `nodes`: hierarchical placement when above 1."""

    redundant: int = 2
    period: int = 8
    window: int = 8
    groups: int = 1
    nodes: int = 1


@dataclass
class EPLB(Policy):
    """Placement from the average load of past steps, renewed every `period` steps; the first from uniform
    load."""

    settings: EPLBSettings = field(default_factory=EPLBSettings)
    _history: list[np.ndarray] = field(default_factory=list)
    _slots: np.ndarray | None = None
    _step: int = 0

    def plan(self, counts: np.ndarray) -> Planned:
        start = time.perf_counter()
        _, ranks, experts = counts.shape
        allocs, homes, fetches = [], [], []
        for one in counts:
            before = self._slots
            if before is None or self._step % self.settings.period == 0:
                self._slots = self._place(ranks, experts)
            assert self._slots is not None
            total = one.sum(0)
            allocs.append(split_evenly(total, self._slots, ranks))
            homes.append(first_rank(self._slots, ranks, experts))
            fetches.append(newly_held(before, self._slots, ranks, experts))
            self._history = [*self._history[-(self.settings.window - 1) :], total]
            self._step += 1
        seconds = time.perf_counter() - start
        return Planned(np.stack(allocs), seconds, np.stack(homes), np.stack(fetches))

    def _place(self, ranks: int, experts: int) -> np.ndarray:
        load = np.mean(self._history, axis=0) if self._history else np.ones(experts)
        physical = experts + self.settings.redundant * ranks
        return eplb_placement(load, physical, self.settings.groups, self.settings.nodes, ranks)


def held(slots_P: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    """bool [R, E]: which experts' weights each rank holds under a placement."""
    out = np.zeros((ranks, experts), dtype=bool)
    out[np.arange(slots_P.size) // (slots_P.size // ranks), slots_P] = True
    return out


def first_rank(slots_P: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    """[E] the first rank that holds each expert: its home under a placement."""
    return held(slots_P, ranks, experts).argmax(0)


def newly_held(before: np.ndarray | None, now: np.ndarray, ranks: int, experts: int) -> np.ndarray:
    """bool [R, E]: weights a rank lacks when the placement changes (at the start: nothing, they are
    initialised)."""
    if before is None or np.array_equal(before, now):
        return np.zeros((ranks, experts), dtype=bool)
    return held(now, ranks, experts) & ~held(before, ranks, experts)


@dataclass
class Exact(Policy):
    """Fewest copies under the balance target, by HiGHS: the optimum or, at the time limit, a proved bound."""

    time_limit_s: float = 10.0

    def plan(self, counts: np.ndarray) -> Planned:
        import torch

        from moonep.planning.exact import solve_exact

        start = time.perf_counter()
        found = [
            solve_exact(
                torch.from_numpy(one), tau=self.tau or 1.0, slots=self.slots, time_limit=self.time_limit_s
            )
            for one in counts
        ]
        seconds = time.perf_counter() - start
        bounds = [{"copies_bound": float(f.copies_bound), "copies_proved": float(f.optimal)} for f in found]
        return Planned(np.stack([f.alloc.numpy() for f in found]), seconds, bounds=bounds)


def runtime_policies() -> list[str]:
    """Names that `moonep.plan_allocation` knows, registered ones included."""
    from moonep.planning import registered_policies

    return list(registered_policies())


def known_policies() -> list[str]:
    """Every name that `policies=[...]` takes."""
    return sorted({*runtime_policies(), *SIMULATED})


@dataclass(frozen=True)
class PolicySettings:
    """Settings of all policies under test."""

    taus: tuple[float, ...] = (1.0, 1.02, 1.05)
    slots: int | None = None
    eplb: EPLBSettings = field(default_factory=EPLBSettings)
    llep: LLEPSettings = field(default_factory=LLEPSettings)
    ultraep: UltraEPSettings = field(default_factory=UltraEPSettings)
    exact_tau: float = 1.0
    exact_seconds: float = 10.0


def make_policies(names: Sequence[str], settings: PolicySettings) -> list[Policy]:
    """One Policy for each name; a policy with a balance target comes once for each tau.

    Raises:
        ConfigError: an unknown name (the message lists the known ones) or a setting out of range.
    """
    from moonep.trainer.compose import did_you_mean

    known = known_policies()
    out: list[Policy] = []
    for name in names:
        if name not in known:
            raise ConfigError(
                f"policies: {name!r} is unknown{did_you_mean(name, known, limit=0)}; known: "
                f"{', '.join(known)}"
            )
        out.extend(_variants(name, settings))
    return out


def _variants(name: str, settings: PolicySettings) -> list[Policy]:
    if name == "static":
        return [RuntimePolicy("static", "static", planned_online=False)]
    if name == "moonep":
        return [RuntimePolicy("moonep", "moonep", tau=1.0, slots=settings.slots, static_shape=True)]
    if name == "llep":
        return [LLEP("llep", "llep", settings=settings.llep)]
    if name == "ultraep":
        return [UltraEP("ultraep", "ultraep", settings=settings.ultraep)]
    if name == "eplb":
        return [EPLB("eplb", "eplb", planned_online=False, settings=settings.eplb)]
    if name == "exact":
        exact = Exact("exact", f"exact tau={settings.exact_tau:g}", tau=settings.exact_tau, static_shape=True)
        return [replace(exact, time_limit_s=settings.exact_seconds, planned_online=False)]
    out: list[Policy] = []
    for tau in settings.taus:
        if tau < 1:
            raise ConfigError(f"taus: {tau} is below 1: no plan can keep every rank below the mean")
        out.append(
            RuntimePolicy(name, f"{name} tau={tau:g}", tau=tau, slots=settings.slots, static_shape=True)
        )
    return out


def home_of(planned: Planned, index: int) -> np.ndarray:
    """[E] where each expert's original lives in step `index` of the block."""
    _, ranks, experts = planned.alloc.shape
    return home_ranks(ranks, experts) if planned.home is None else planned.home[index]
