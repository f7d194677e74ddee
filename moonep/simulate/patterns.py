"""Workloads that single out experts, ranks, sources or moments: the shapes that break expert-parallel
systems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moonep.errors import ConfigError
from moonep.simulate.sampling import popularity_for, stream
from moonep.simulate.workloads import Shape, Workload, _require, normals, register_workload


def _raise_share(
    shape: Shape, experts: np.ndarray, share: float, key: str, base_E: np.ndarray | None = None
) -> np.ndarray:
    """log popularity at which `experts` together receive `share` of all choices; the others follow base_E."""
    limit = min(1.0, experts.size / shape.top_k)
    if not 0 < share <= limit:
        raise ConfigError(
            f"workload.{key}={share:g} is out of range: {experts.size} of {shape.num_experts} experts "
            f"receive more than "
            f"0 and at most {limit:.4g} of the choices when each token picks K={shape.top_k} different ones"
        )
    others = np.setdiff1d(np.arange(shape.num_experts), experts)
    if (1 - share) * shape.top_k > others.size:
        raise ConfigError(
            f"workload.{key}={share:g} is too small: the {others.size} other experts cannot hold the rest "
            f"of the choices"
        )
    weight = np.ones(others.size) if base_E is None else np.exp(base_E[others] - base_E[others].max())
    inclusion = np.zeros(shape.num_experts)
    inclusion[experts] = share * shape.top_k / experts.size
    inclusion[others] = np.minimum((1 - share) * shape.top_k * weight / weight.sum(), 1.0)
    return popularity_for(inclusion, shape.top_k)


@register_workload("hot_experts")
@dataclass(frozen=True)
class HotExperts(Workload):
    """`count` experts, other for each layer, receive `share` of all choices; `spread` puts them on different
    ranks."""

    count: int = 4
    share: float = 0.2
    spread: bool = False

    def __post_init__(self) -> None:
        _require(self.count >= 1, f"workload.count={self.count} must be at least 1")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        _require(
            self.count < shape.num_experts, f"workload.count={self.count} must be below E={shape.num_experts}"
        )
        generator = stream(shape.seed, "popularity", layer)
        if self.spread:
            ranks = generator.permutation(shape.num_ranks)[np.arange(self.count) % shape.num_ranks]
            hot = np.unique(ranks * shape.epn + np.arange(self.count) // shape.num_ranks)
        else:
            hot = generator.permutation(shape.num_experts)[: self.count]
        return _raise_share(shape, hot, self.share, "share")


@register_workload("hot_rank")
@dataclass(frozen=True)
class HotRank(Workload):
    """The experts of one home rank receive `ratio` times the mean rank's choices."""

    ratio: float = 3.0
    rank: int = 0

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        _require(
            0 <= self.rank < shape.num_ranks,
            f"workload.rank={self.rank} must lie in 0..{shape.num_ranks - 1}",
        )
        _require(
            0 < self.ratio <= shape.num_ranks,
            f"workload.ratio={self.ratio} must lie in (0, R={shape.num_ranks}]",
        )
        if shape.num_ranks == 1:
            return np.zeros(shape.num_experts)
        hot = self.rank * shape.epn + np.arange(shape.epn)
        limit = min(shape.num_ranks, shape.epn * shape.num_ranks / shape.top_k)
        _require(
            self.ratio <= limit,
            f"workload.ratio={self.ratio:g} cannot be reached: a rank of {shape.epn} experts gets at most "
            f"{limit:.4g} "
            f"times the mean at K={shape.top_k}",
        )
        return _raise_share(shape, hot, self.ratio / shape.num_ranks, "ratio")


@register_workload("source_skewed")
@dataclass(frozen=True)
class SourceSkewed(Workload):
    """Micro-batches from `domains` (rank r reads domain r mod domains), each with a lognormal popularity of
    its own.

    `shared` in [0, 1] is the part of log popularity's variance that all domains have in common.
    """

    depends_on_rank: ClassVar[bool] = True
    domains: int = 8
    sigma: float = 1.0
    shared: float = 0.3

    def __post_init__(self) -> None:
        _require(self.domains >= 1, f"workload.domains={self.domains} must be at least 1")
        _require(0 <= self.shared <= 1, f"workload.shared={self.shared} must lie in [0, 1]")
        _require(self.sigma >= 0, f"workload.sigma={self.sigma} must not be negative")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        common = normals(shape.seed, shape.num_experts, layer)
        own = normals(shape.seed, shape.num_experts, layer, 1 + rank % self.domains)
        return self.sigma * (np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own)


@register_workload("rotating_hotspot")
@dataclass(frozen=True)
class RotatingHotspot(Workload):
    """`count` neighbouring experts receive `share` of the choices; every `period` steps the hot spot moves
    on."""

    depends_on_step: ClassVar[bool] = True
    count: int = 4
    share: float = 0.2
    period: int = 4

    def __post_init__(self) -> None:
        _require(self.period >= 1, f"workload.period={self.period} must be at least 1")
        _require(self.count >= 1, f"workload.count={self.count} must be at least 1")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        _require(
            self.count < shape.num_experts, f"workload.count={self.count} must be below E={shape.num_experts}"
        )
        first = int(stream(shape.seed, "popularity", layer).integers(shape.num_experts))
        # The stride is one home rank and one expert, so that the spot visits every rank.
        first += (step // self.period) * (shape.epn + 1)
        hot = (first + np.arange(self.count)) % shape.num_experts
        return _raise_share(shape, hot, self.share, "share")


@register_workload("burst")
@dataclass(frozen=True)
class Burst(Workload):
    """Lognormal(sigma), and for `length` of every `every` steps some `count` experts take `share` of the
    choices."""

    depends_on_step: ClassVar[bool] = True
    sigma: float = 0.3
    count: int = 2
    share: float = 0.1
    every: int = 8
    length: int = 2

    def __post_init__(self) -> None:
        _require(self.sigma >= 0, f"workload.sigma={self.sigma} must not be negative")
        _require(
            1 <= self.length <= self.every, f"workload.length={self.length} must lie in 1..every={self.every}"
        )

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        base = self.sigma * normals(shape.seed, shape.num_experts, layer)
        round_, phase = divmod(step, self.every)
        burst = stream(shape.seed, "schedule", layer, round_)
        start = int(burst.integers(self.every - self.length + 1))
        if not start <= phase < start + self.length:
            return base
        hot = burst.permutation(shape.num_experts)[: self.count]
        return _raise_share(shape, hot, self.share, "share", base)


@register_workload("drift")
@dataclass(frozen=True)
class Drift(Workload):
    """Lognormal(sigma) whose log popularity drifts as a stationary AR(1) of correlation `rho` from step to
    step."""

    depends_on_step: ClassVar[bool] = True
    sigma: float = 1.0
    rho: float = 0.9

    def __post_init__(self) -> None:
        _require(self.sigma >= 0, f"workload.sigma={self.sigma} must not be negative")
        _require(0 <= self.rho <= 1, f"workload.rho={self.rho} must lie in [0, 1]")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        return self.sigma * _drifted(shape.seed, shape.num_experts, layer, self.rho, step)


_LAST_DRIFT: dict[tuple[int, int, int, float], tuple[int, np.ndarray]] = {}


def _drifted(seed: int, size: int, layer: int, rho: float, step: int) -> np.ndarray:
    """State of the AR(1) at `step`, always advanced from step 0, so that the order of calls does not
    matter."""
    key = (seed, size, layer, rho)
    at, state = _LAST_DRIFT.get(key, (0, normals(seed, size, layer)))
    if at > step:
        at, state = 0, normals(seed, size, layer)
    for now in range(at + 1, step + 1):
        fresh = stream(seed, "schedule", layer, now).standard_normal(size)
        state = rho * state + np.sqrt(1 - rho**2) * fresh
    if len(_LAST_DRIFT) > 1024:
        _LAST_DRIFT.clear()
    _LAST_DRIFT[key] = (step, state)
    return state


@register_workload("ragged")
@dataclass(frozen=True)
class Ragged(Workload):
    """Source ranks hold different numbers of tokens: uniform between `least` x S and S. Popularity is
    lognormal."""

    least: float = 0.25
    sigma: float = 0.5

    def __post_init__(self) -> None:
        _require(0 <= self.least <= 1, f"workload.least={self.least} must lie in [0, 1]")
        _require(self.sigma >= 0, f"workload.sigma={self.sigma} must not be negative")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        return self.sigma * normals(shape.seed, shape.num_experts, layer)

    def tokens_of_rank(self, shape: Shape, step: int, tokens: int) -> np.ndarray:
        part = stream(shape.seed, "lengths", step).random(shape.num_ranks)
        return np.floor((self.least + (1 - self.least) * part) * tokens).astype(np.int64)


@register_workload("empty_rank")
@dataclass(frozen=True)
class EmptyRank(Workload):
    """No token wants an expert of one home rank (dead experts, or a rank just joined)."""

    rank: int = 0
    sigma: float = 0.5

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        _require(
            0 <= self.rank < shape.num_ranks,
            f"workload.rank={self.rank} must lie in 0..{shape.num_ranks - 1}",
        )
        alive = shape.num_experts - shape.epn
        _require(
            alive >= shape.top_k,
            f"workload.rank={self.rank}: without it only {alive} experts remain for K={shape.top_k} choices",
        )
        logs = self.sigma * normals(shape.seed, shape.num_experts, layer)
        logs = logs.copy()
        logs[self.rank * shape.epn : (self.rank + 1) * shape.epn] = -200.0
        return logs
