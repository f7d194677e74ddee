"""Routing workloads: which experts tokens choose, by distribution or token by token.

A workload is a small frozen dataclass that states a popularity of experts for each (step, layer, source
rank). `bind` fixes ranks, experts, top-k and seed; the bound workload draws either counts or tokens:

    bound = make_workload("lognormal", sigma=1.0).bind(num_ranks=8, num_experts=256, top_k=8, seed=0)
    bound.counts(steps=4, layers=2, tokens=8192)        # int64 [4, 2, 8, 256], no token is ever made
    bound.token_choices(step=0, layer=1, rank=3, num_tokens=512)   # int32 [512, 8]

Every number follows from (seed, step, layer, rank) alone, through Philox streams of their own: the same on
any machine, in any order, on any number of cores.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import numpy as np

from moonep.errors import ConfigError, ContractError
from moonep.simulate.sampling import draw_counts, draw_tokens, inclusion_probabilities, stream

WORKLOADS: dict[str, type[Workload]] = {}
W = TypeVar("W", bound="type[Workload]")


def register_workload(name: str) -> Callable[[W], W]:
    """Class decorator: makes a Workload known to `workload=NAME` and to `routing.force=NAME`."""

    def add(cls: W) -> W:
        cls.name = name
        WORKLOADS[name] = cls
        return cls

    return add


def make_workload(name: str, **parameters: Any) -> Workload:
    """Builds a registered workload; parameters that are None keep their default.

    Raises:
        ConfigError: unknown name or parameter, or a value out of range.
    """
    from moonep.trainer.compose import did_you_mean

    if name not in WORKLOADS:
        raise ConfigError(f"workload={name}: no such workload{did_you_mean(name, WORKLOADS, limit=20)}")
    cls = WORKLOADS[name]
    fields = [f.name for f in dataclasses.fields(cls)]
    given = {key: value for key, value in parameters.items() if value is not None}
    for key in given:
        if key not in fields:
            known = f"its keys: {', '.join(fields)}" if fields else "it has no keys"
            raise ConfigError(f"workload.{key}: workload {name} has no such key; {known}")
    return cls(**given)


@dataclass(frozen=True)
class Shape:
    """The geometry a workload is bound to."""

    num_ranks: int
    num_experts: int
    top_k: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.num_experts % self.num_ranks:
            raise ContractError(
                f"geometry.E={self.num_experts} must be a multiple of geometry.R={self.num_ranks}: every "
                f"rank is home "
                "to as many experts"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ContractError(
                f"geometry.K={self.top_k} must lie between 1 and geometry.E={self.num_experts}"
            )

    @property
    def epn(self) -> int:
        return self.num_experts // self.num_ranks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True)
class Workload:
    """Base of all workloads. `depends_on_rank`: source ranks differ; `depends_on_step`: popularity moves."""

    name: ClassVar[str] = "workload"
    depends_on_rank: ClassVar[bool] = False
    depends_on_step: ClassVar[bool] = False

    def bind(self, num_ranks: int, num_experts: int, top_k: int, seed: int = 0) -> BoundWorkload:
        """Fixes the geometry and the seed. Raises ConfigError if this workload cannot exist there."""
        bound = BoundWorkload(self, Shape(num_ranks, num_experts, top_k, seed))
        bound.log_popularity(0, 0, 0)
        return bound

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        """Natural logarithm of the popularity of each expert, float64 [E]; only differences matter."""
        raise NotImplementedError

    def tokens_of_rank(self, shape: Shape, step: int, tokens: int) -> np.ndarray:
        """Tokens each source rank has in this step, int64 [R], at most `tokens`."""
        return np.full(shape.num_ranks, tokens, dtype=np.int64)

    def describe(self) -> str:
        """`name(key=value, ...)` for titles and file names."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        inner = ", ".join(f"{k}={v}" for k, v in values.items() if v is not None)
        return f"{self.name}({inner})"


@dataclass(frozen=True)
class BoundWorkload:
    """A workload in a given geometry: the source of counts and of tokens."""

    workload: Workload
    shape: Shape

    def log_popularity(self, step: int, layer: int, rank: int) -> np.ndarray:
        """log popularity of each expert for one source, float64 [E]."""
        step = step if self.workload.depends_on_step else 0
        rank = rank if self.workload.depends_on_rank else 0
        return _log_popularity(self.workload, self.shape, step, layer, rank)

    def inclusion(self, step: int, layer: int) -> np.ndarray:
        """P(a token of source rank r chooses expert e), float64 [R, E]; rows sum to top_k."""
        ranks = range(self.shape.num_ranks) if self.workload.depends_on_rank else [0]
        step = step if self.workload.depends_on_step else 0
        rows = [_inclusion(self.workload, self.shape, step, layer, rank) for rank in ranks]
        return np.broadcast_to(np.stack(rows), (self.shape.num_ranks, self.shape.num_experts))

    def step_counts(self, step: int, layer: int, tokens: int) -> np.ndarray:
        """Tokens of each (source rank, expert) in one layer of one step, int64 [R, E]."""
        tokens_R = self.workload.tokens_of_rank(self.shape, step, tokens)
        generator = stream(self.shape.seed, "counts", step, layer)
        return draw_counts(generator, self.inclusion(step, layer), tokens_R, self.shape.top_k)

    def counts(self, steps: int, layers: int, tokens: int, *, first_step: int = 0) -> np.ndarray:
        """`step_counts` for a block: int64 [steps, layers, R, E]."""
        out = np.empty((steps, layers, self.shape.num_ranks, self.shape.num_experts), dtype=np.int64)
        for step in range(steps):
            for layer in range(layers):
                out[step, layer] = self.step_counts(first_step + step, layer, tokens)
        return out

    def token_choices(self, step: int, layer: int, rank: int, num_tokens: int) -> np.ndarray:
        """The experts of each token of one source rank: int32 [num_tokens, K], all different within a
        token."""
        generator = stream(self.shape.seed, "tokens", step, layer, rank)
        logs = self.log_popularity(step, layer, rank)
        return draw_tokens(generator, logs, num_tokens, self.shape.top_k)


@lru_cache(maxsize=4096)
def _log_popularity(workload: Workload, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
    return workload.log_popularity(shape, step, layer, rank)


@lru_cache(maxsize=4096)
def _inclusion(workload: Workload, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
    return inclusion_probabilities(_log_popularity(workload, shape, step, layer, rank), shape.top_k)


@lru_cache(maxsize=4096)
def normals(seed: int, size: int, *key: int) -> np.ndarray:
    """Fixed standard normals of a (seed, key): the shape of a popularity, scaled by sigma."""
    return stream(seed, "popularity", *key).standard_normal(size)


def bisect(target: float, measure: Callable[[float], float], low: float, high: float) -> float | None:
    """x in [low, high] with increasing measure(x) = target, or None if it lies outside."""
    if not measure(low) <= target <= measure(high):
        return None
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    return 0.5 * (low + high)


def expected_maxvio(logs_E: np.ndarray, top_k: int) -> float:
    """max over experts of expected tokens / mean, minus 1."""
    return float(inclusion_probabilities(logs_E, top_k).max() * logs_E.size / top_k - 1)


def expected_imbalance(logs_E: np.ndarray, shape: Shape) -> float:
    """max over home ranks of expected tokens / mean."""
    loads = inclusion_probabilities(logs_E, shape.top_k).reshape(shape.num_ranks, shape.epn).sum(1)
    return float(loads.max() * shape.num_ranks / shape.top_k)


@register_workload("balanced")
@dataclass(frozen=True)
class Balanced(Workload):
    """Forced balance, experts in turn: every expert gets the same number of tokens, to one. The ideal to
    compare with."""

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        return np.zeros(shape.num_experts)

    def bind(self, num_ranks: int, num_experts: int, top_k: int, seed: int = 0) -> BoundWorkload:
        return _BoundBalanced(self, Shape(num_ranks, num_experts, top_k, seed))


@dataclass(frozen=True)
class _BoundBalanced(BoundWorkload):
    def token_choices(self, step: int, layer: int, rank: int, num_tokens: int) -> np.ndarray:
        # Layers start elsewhere, so that no expert is always first.
        start = (rank * num_tokens * self.shape.top_k + layer * 7919) % self.shape.num_experts
        flat = (start + np.arange(num_tokens * self.shape.top_k)) % self.shape.num_experts
        return flat.reshape(num_tokens, self.shape.top_k).astype(np.int32)

    def step_counts(self, step: int, layer: int, tokens: int) -> np.ndarray:
        size = self.shape.num_experts
        rows = [self.token_choices(step, layer, r, tokens).ravel() for r in range(self.shape.num_ranks)]
        return np.stack([np.bincount(row, minlength=size) for row in rows]).astype(np.int64)


@register_workload("uniform")
@dataclass(frozen=True)
class Uniform(Workload):
    """Every expert is equally popular; what remains is sampling noise."""

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        return np.zeros(shape.num_experts)


@register_workload("lognormal")
@dataclass(frozen=True)
class Lognormal(Workload):
    """log popularity ~ N(0, sigma^2), other for each layer. `maxvio`, if given, is the expected one and sets
    sigma."""

    sigma: float = 1.0
    maxvio: float | None = None

    def __post_init__(self) -> None:
        _require(self.sigma >= 0, f"workload.sigma={self.sigma} must not be negative")
        _require(self.maxvio is None or self.maxvio > 0, f"workload.maxvio={self.maxvio} must be positive")

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        sigma = self.sigma if self.maxvio is None else _sigma_for(self.maxvio, shape, layer)
        return sigma * normals(shape.seed, shape.num_experts, layer)


@lru_cache(maxsize=1024)
def _sigma_for(maxvio: float, shape: Shape, layer: int) -> float:
    z = normals(shape.seed, shape.num_experts, layer)
    sigma = bisect(maxvio, lambda s: expected_maxvio(s * z, shape.top_k), 0.0, 40.0)
    if sigma is None:
        limit = shape.num_experts / shape.top_k - 1
        raise ConfigError(
            f"workload.maxvio={maxvio} cannot be reached: with E={shape.num_experts} and K={shape.top_k} it "
            f"is at "
            f"most E/K - 1 = {limit:g}"
        )
    return sigma


@register_workload("zipf")
@dataclass(frozen=True)
class Zipf(Workload):
    """Popularity 1/rank^alpha, experts shuffled for each layer. `imbalance`, if given (max/mean tokens a home
    rank), sets alpha; `shuffle=False` leaves the popular experts together on the first ranks."""

    alpha: float = 1.0
    imbalance: float | None = None
    shuffle: bool = True

    def __post_init__(self) -> None:
        _require(self.alpha >= 0, f"workload.alpha={self.alpha} must not be negative")
        _require(
            self.imbalance is None or self.imbalance >= 1,
            f"workload.imbalance={self.imbalance} must be at least 1",
        )

    def log_popularity(self, shape: Shape, step: int, layer: int, rank: int) -> np.ndarray:
        alpha = (
            self.alpha if self.imbalance is None else _alpha_for(self.imbalance, self.shuffle, shape, layer)
        )
        return -alpha * _zipf_logs(shape, layer, self.shuffle)


@lru_cache(maxsize=1024)
def _zipf_logs(shape: Shape, layer: int, shuffle: bool) -> np.ndarray:
    logs = np.log(np.arange(1, shape.num_experts + 1, dtype=np.float64))
    return stream(shape.seed, "popularity", layer).permutation(logs) if shuffle else logs


@lru_cache(maxsize=1024)
def _alpha_for(imbalance: float, shuffle: bool, shape: Shape, layer: int) -> float:
    logs = _zipf_logs(shape, layer, shuffle)

    def measure(alpha: float) -> float:
        return expected_imbalance(-alpha * logs, shape)

    # Not monotone: a very large alpha only sorts the experts. The first crossing is the one meant.
    grid = [0.1 * step for step in range(81)]
    reached = [measure(alpha) for alpha in grid]
    first = next((i for i, value in enumerate(reached) if value >= imbalance), None)
    if first is None:
        raise ConfigError(
            f"workload.imbalance={imbalance} cannot be reached with Zipf popularity here (at most "
            f"{max(reached):.3g} in layer {layer}); lower it or set workload.shuffle=false"
        )
    return grid[0] if first == 0 else bisect(imbalance, measure, grid[first - 1], grid[first]) or grid[first]
