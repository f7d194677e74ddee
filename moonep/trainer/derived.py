"""Checks across fields, and the numbers that follow from a configuration before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from model.config import K3Config
from moonep.errors import ConfigError, ContractError
from moonep.planning import registered_policies
from moonep.planning.layout import Geometry
from moonep.trainer.compose import did_you_mean
from moonep.trainer.config import Config
from moonep.trainer.schedule import SCHEDULES, warmup_steps

BALANCERS = ("quantile", "sign", "none")


@dataclass(frozen=True)
class Derived:
    """What follows from a configuration, the model and the number of ranks.

    Attributes:
        world_size, ep: ranks, and how many of them share one set of experts.
        micro_batch: sequences of a rank's micro-batch.
        accumulation: micro-batches a rank computes in a step.
        capacity: S, tokens a rank passes through an MoE layer at once.
        total_parameters, active_parameters: of the model; see `K3Config.num_parameters`.
        rank_parameters: held by one rank (dense ones and its home experts).
        shard_rows: rows of one rank's dispatch shard.
        slots: places for copied experts.
        shard_bytes, state_bytes: of one rank's shard, and of its weights, gradients and optimizer state.
    """

    world_size: int
    ep: int
    micro_batch: int
    accumulation: int
    capacity: int
    total_parameters: int
    active_parameters: int
    rank_parameters: int
    shard_rows: int
    slots: int
    shard_bytes: int
    state_bytes: int


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value} {rule}")


def _choice(key: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        options = f" (allowed: {', '.join(allowed)})"
        raise ConfigError(f"{key}={value} is unknown{did_you_mean(value, allowed, limit=0)}{options}")


def check_values(config: Config) -> None:
    """Every check that needs neither model nor ranks.

    Raises:
        ConfigError: names the key, what came, what is allowed.
    """
    _check_choices(config)
    _check_text_and_seed(config)
    t, o, s = config.train, config.optimizer, config.schedule
    _require(t.micro_batch is None or t.micro_batch >= 1, "train.micro_batch", t.micro_batch, "is below 1")
    for name in ("steps", "tokens_per_step", "context"):
        _require(getattr(t, name) >= 1, f"train.{name}", getattr(t, name), "must be at least 1")
    for name in ("validate_every", "validate_tokens", "sample_tokens"):
        _require(getattr(t, name) >= 0, f"train.{name}", getattr(t, name), "must not be negative")
    for name in ("lr", "eps", "weight_decay", "clip"):
        _require(math.isfinite(getattr(o, name)), f"optimizer.{name}", getattr(o, name), "must be finite")
    _require(o.lr > 0, "optimizer.lr", o.lr, "must be positive")
    _require(len(o.betas) == 2, "optimizer.betas", o.betas, "must be two numbers")
    _require(all(0 <= b < 1 for b in o.betas), "optimizer.betas", o.betas, "must lie in [0, 1)")
    _require(o.eps > 0, "optimizer.eps", o.eps, "must be positive")
    for name in ("weight_decay", "clip"):
        _require(getattr(o, name) >= 0, f"optimizer.{name}", getattr(o, name), "must not be negative")
    for name in ("warmup_fraction", "decay_fraction", "final_fraction"):
        value = getattr(s, name)
        _require(0 <= value <= 1, f"schedule.{name}", value, "must lie in [0, 1]")
    _require(math.isfinite(config.routing.tau), "routing.tau", config.routing.tau, "must be finite")
    _require(config.routing.tau >= 1, "routing.tau", config.routing.tau, "must be at least 1 (exact balance)")
    _require(config.routing.bins >= 2, "routing.bins", config.routing.bins, "must be at least 2")
    _require(config.routing.sign_rate > 0, "routing.sign_rate", config.routing.sign_rate, "must be positive")
    for name in ("every", "keep"):
        value = getattr(config.checkpoint, name)
        _require(value >= 0, f"checkpoint.{name}", value, "must not be negative")
    _require(config.logging.every >= 1, "logging.every", config.logging.every, "must be at least 1")
    timeout = config.parallel.timeout_s
    _require(timeout > 0, "parallel.timeout_s", timeout, "must be positive")


def _check_text_and_seed(config: Config) -> None:
    """An empty path would mean the working folder: most often a shell variable that was not set."""
    _require(config.data.path != "", "data.path", "", "is empty; give a file or a folder, or leave it out")
    resume = config.checkpoint.resume
    _require(resume != "", "checkpoint.resume", "", "is empty; give true, false or a path")
    _require(config.run.dir != "", "run.dir", "", "is empty; give a folder, or leave it out")
    _require(0 <= config.seed < 2**63, "seed", config.seed, "must lie in [0, 2**63)")


def _check_choices(config: Config) -> None:
    _choice("routing.policy", config.routing.policy, registered_policies())
    _choice("routing.balancer", config.routing.balancer, BALANCERS)
    _choice("optimizer.name", config.optimizer.name, ("adamw",))
    _choice("schedule.name", config.schedule.name, SCHEDULES)
    _choice("precision.name", config.precision.name, ("fp32", "bf16"))
    _choice("precision.grad_accum_dtype", config.precision.grad_accum_dtype, ("fp32",))
    _choice("precision.communication_dtype", config.precision.communication_dtype, ("fp32",))
    _choice("logging.wandb.mode", config.logging.wandb.mode, ("disabled", "offline", "online"))
    _choice("parallel.memory", config.parallel.memory, ("auto", "cuda", "shm", "collective"))
    p = config.parallel
    _require(p.zero != 3, "parallel.zero", 3, "(ZeRO-3) is not supported with experts; use 1 or 2")
    _require(p.zero in (0, 1, 2), "parallel.zero", p.zero, "is unknown; allowed: 0, 1, 2")
    _require(p.tensor == 1, "parallel.tensor", p.tensor, "(tensor parallelism) is not supported; use 1")
    _require(p.pipeline == 1, "parallel.pipeline", p.pipeline, "(pipelining) is not supported; use 1")
    bf16 = config.precision.name == "bf16"
    _require(
        not (p.zero == 0 and bf16), "parallel.zero", 0, "cannot accumulate bf16 in fp32; use parallel.zero=1"
    )


def expert_parallel_size(config: Config, model: K3Config, world_size: int) -> int:
    """`parallel.ep`, or the largest size that divides both the ranks and the experts.

    Raises:
        ConfigError: a size that divides one of them not.
    """
    ep, experts = config.parallel.ep, model.num_experts
    if ep is None:
        return max(n for n in range(1, world_size + 1) if world_size % n == 0 and experts % n == 0)
    _require(ep >= 1, "parallel.ep", ep, "must be at least 1")
    _require(world_size % ep == 0, "parallel.ep", ep, f"does not divide the {world_size} ranks")
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0 and experts % n == 0]
    rule = f"does not divide model.num_experts={experts}; with {world_size} ranks use one of {divisors}"
    _require(experts % ep == 0, "parallel.ep", ep, rule)
    return ep


def derive(config: Config, model: K3Config, world_size: int) -> Derived:
    """The derived numbers.

    Raises:
        ConfigError: tokens_per_step or parallel.ep does not divide.
    """
    t = config.train
    ep = expert_parallel_size(config, model, world_size)
    micro_batch = t.micro_batch or max(1, t.tokens_per_step // (t.context * world_size))
    piece = micro_batch * t.context * world_size
    nearest = max(1, round(t.tokens_per_step / piece)) * piece
    _require(
        t.tokens_per_step % piece == 0,
        "train.tokens_per_step",
        t.tokens_per_step,
        f"is not a multiple of micro_batch {micro_batch} x context {t.context} x ranks {world_size}"
        f" = {piece}; the nearest is {nearest}",
    )
    _require(t.context <= model.max_context, "train.context", t.context, f"exceeds {model.max_context}")
    capacity = micro_batch * t.context
    geometry = _geometry(config, model, ep, capacity)
    total, active = model.num_parameters()
    expert = len(model.moe_layers) * model.num_experts * model.parameter_sizes()["expert"]
    rank_parameters = total - expert + expert // ep
    width = 2 if config.precision.name == "bf16" else 4
    return Derived(
        world_size=world_size,
        ep=ep,
        micro_batch=micro_batch,
        accumulation=t.tokens_per_step // piece,
        capacity=capacity,
        total_parameters=total,
        active_parameters=active,
        rank_parameters=rank_parameters,
        shard_rows=geometry.shard_rows,
        slots=geometry.slots,
        shard_bytes=geometry.shard_rows * model.latent_size * width,
        state_bytes=_state_bytes(config, total - expert, expert // ep, world_size, ep),
    )


def _geometry(config: Config, model: K3Config, ep: int, capacity: int) -> Geometry:
    """The sizes of an MoE layer's shard; messages of the planner in the words of the configuration."""
    routing = config.routing
    try:
        return Geometry.build(
            ep,
            model.num_experts,
            model.top_k,
            capacity,
            policy=routing.policy,
            tau=routing.tau,
            slots=routing.slots,
            max_imbalance=routing.max_imbalance,
        )
    except ContractError as error:
        raise ConfigError(f"routing: {error}") from None


def _state_bytes(config: Config, dense: int, expert: int, world_size: int, ep: int) -> int:
    """Weights, gradients, master weights and AdamW's moments of one rank.

    ZeRO partitions master weights and moments (12 bytes a parameter; fp32 too keeps a master copy) over the
    ranks that replicate a parameter; ZeRO-2 keeps only a partition of gradients as well.
    """
    weight = 2 if config.precision.name == "bf16" else 4
    zero = config.parallel.zero
    total = 0.0
    for count, replicas in ((dense, world_size), (expert, world_size // ep)):
        owned = count / replicas if zero else count
        master = 12 * owned if zero else 8 * count
        gradients = 4 * (owned if zero == 2 else count)
        total += weight * count + gradients + master
    return int(total)


def report(config: Config, model: K3Config, derived: Derived) -> str:
    """The derived numbers for people: what a step is, how large the model, what a rank holds."""
    t, d = config.train, derived
    gib = 2**30
    lines = [
        f"model      {config.model.preset}: {d.total_parameters:,} parameters,"
        f" {d.active_parameters:,} active; {model.num_experts} experts, top {model.top_k}",
        f"step       {t.tokens_per_step:,} tokens = {d.micro_batch} sequences x {t.context} tokens"
        f" x {d.world_size} ranks x {d.accumulation} accumulation",
        f"run        {t.steps:,} steps = {t.steps * t.tokens_per_step:,} tokens;"
        f" warm-up {warmup_steps(config.schedule, t.steps)} steps, then {config.schedule.name}",
        f"parallel   {d.world_size} ranks, experts over {d.ep}, ZeRO-{config.parallel.zero},"
        f" {config.precision.name}; policy {config.routing.policy}, tau {config.routing.tau:g}",
        f"a rank     {d.rank_parameters:,} parameters; {d.state_bytes / gib:.3f} GiB of weights, gradients"
        f" and optimizer state; shard {d.shard_rows:,} rows = {d.shard_bytes / gib:.3f} GiB, {d.slots} slots",
    ]
    return "\n".join(lines)
