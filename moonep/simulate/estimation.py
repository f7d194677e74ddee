"""What a model needs: memory, cost and splits of training, and the operator table of inference, on one
cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model.config import K3Config
from moonep.command import CommandFailure
from moonep.errors import ConfigError
from moonep.simulate.config import EstimateConfig, load_model
from moonep.simulate.hardware import Hardware, load_profile, profile_names
from moonep.simulate.operators import (
    Timed,
    Workpoint,
    decode_bytes,
    launches,
    operator_table,
    time_operators,
    totals,
    weight_gigabytes,
)
from moonep.simulate.splits import Split, fitting_splits, smallest_cluster
from moonep.simulate.training import TrainingSetup, flops_per_token


@dataclass
class Inference:
    """The operator table of one phase on the chosen chip."""

    at: Workpoint
    operators: list[Timed]
    launches_fused: int
    launches_unfused: int
    totals: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(timed.seconds for timed in self.operators)

    def rows(self) -> list[tuple[Any, ...]]:
        """One row an operator; FLOPs and bytes of all its instances."""
        total = self.seconds
        out: list[tuple[Any, ...]] = []
        for timed in self.operators:
            o = timed.operator
            out.append(
                (
                    o.family,
                    o.name,
                    o.kind,
                    o.count,
                    o.shape,
                    o.flops * o.count / 1e9,
                    o.memory_bytes * o.count / 1e6,
                    o.intensity,
                    timed.seconds * 1e6,
                    100 * timed.seconds / total,
                    timed.bound,
                )
            )
        return out


OPERATOR_COLUMNS = (
    "part",
    "operator",
    "kind",
    "count",
    "shape",
    "GFLOP",
    "MB",
    "FLOP/byte",
    "us",
    "% of time",
    "bound",
)


@dataclass
class Estimate:
    """Everything tools.estimate found. `splits` are of the asked devices, fastest first."""

    config: EstimateConfig
    model: K3Config
    hardware: Hardware
    parameters: tuple[int, int]
    splits: list[Split] = field(default_factory=list)
    devices: int = 0
    clusters: list[tuple[Any, ...]] = field(default_factory=list)
    inference: list[Inference] = field(default_factory=list)
    chips: list[tuple[Any, ...]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """summary.json: stable keys."""
        total, active = self.parameters
        out: dict[str, Any] = {
            "model": self.config.model,
            "parameters": {"total": total, "active": active},
            "cluster": self.hardware.name,
        }
        if self.splits:
            out["training"] = self._training()
        for part in self.inference:
            out[part.at.phase] = {
                "workpoint": vars(part.at),
                "seconds": part.seconds,
                "tokens_per_s": part.at.tokens * part.at.chips / part.seconds,
                **part.totals,
                "launches_fused": part.launches_fused,
                "launches_unfused": part.launches_unfused,
                "operators": [dict(zip(OPERATOR_COLUMNS, row, strict=True)) for row in part.rows()],
            }
        if self.chips:
            out["chips"] = [dict(zip(CHIP_COLUMNS, row, strict=True)) for row in self.chips]
        if self.clusters:
            out["clusters"] = [dict(zip(CLUSTER_COLUMNS, row, strict=True)) for row in self.clusters]
        return out

    def _training(self) -> dict[str, Any]:
        best = self.splits[0]
        cost = budget(best, self.config.tokens, self.hardware, self.parameters[1])
        return {
            "devices": best.setup.devices,
            "setup": vars(best.setup),
            "memory": best.memory.to_dict(),
            "step_s": best.time.to_dict(),
            "tokens_per_s": best.tokens_per_s,
            "flops_per_token": flops_per_token(self.model, self.config.train.context),
            **cost,
            "fitting_splits": len(self.splits),
        }


def budget(split: Split, tokens: float, hardware: Hardware, active: int) -> dict[str, float]:
    """Days, device-hours and MFU (6 x active parameters a token over the peak) of a token budget."""
    seconds = tokens / split.tokens_per_s
    mfu = 6 * active * split.tokens_per_s / (split.setup.devices * hardware.peak_bf16_tflops * 1e12)
    return {
        "tokens": tokens,
        "days": seconds / 86_400,
        "device_hours": seconds / 3600 * split.setup.devices,
        "mfu": mfu,
    }


CLUSTER_COLUMNS = (
    "cluster",
    "fewest devices",
    "EP",
    "PP",
    "CP",
    "DP",
    "ZeRO",
    "GB a device",
    "tokens/s",
    "days",
)
CHIP_COLUMNS = (
    "chip",
    "memory GB",
    "chips for the weights",
    "bandwidth TB/s",
    "tokens/s a sequence",
    "tokens/s in all",
    "bandwidth only tokens/s",
    "TB/s for the target",
)


def base_setup(config: EstimateConfig) -> TrainingSetup:
    """The setup without its split."""
    if config.routing.tau < 1:
        raise ConfigError(f"routing.tau={config.routing.tau} must be at least 1")
    return TrainingSetup(
        devices=1,
        ep=1,
        zero=config.parallel.zero,
        micro_batch=config.train.micro_batch,
        context=config.train.context,
        precision=config.precision,
        tau=None if config.routing.policy == "static" else config.routing.tau,
        slots=config.routing.slots,
    )


def estimate(config: EstimateConfig) -> Estimate:
    """Runs what `what` asks for.

    Raises:
        ConfigError: wrong input. CommandFailure: the model does not fit; the message names the smallest
        cluster.
    """
    model = load_model(config.model)
    assert model is not None
    if config.what not in ("all", "training", "operators"):
        raise ConfigError(f"what={config.what}: allowed: all, training, operators")
    hardware = config.cluster.validate()
    result = Estimate(config, model, hardware, model.num_parameters())
    if config.what != "operators":
        _training(result)
    if config.what != "training":
        _inference(result)
    return result


def _wanted(splits: Sequence[Split], config: EstimateConfig) -> list[Split]:
    """Those with the sizes that were asked for."""
    wanted = {key: getattr(config.parallel, key) for key in ("ep", "pp", "cp")}
    recompute = config.train.activation_checkpointing
    return [
        split
        for split in splits
        if all(value is None or getattr(split.setup, key) == value for key, value in wanted.items())
        and split.setup.zero in ((0,) if config.parallel.zero == 0 else (config.parallel.zero, 2))
        and (recompute is None or split.setup.recompute == recompute)
    ]


def _training(result: Estimate) -> None:
    config, model, hardware = result.config, result.model, result.hardware
    base = base_setup(config)
    step_tokens = config.train.tokens_per_step
    if config.devices is None:
        splits = smallest_cluster(model, base, hardware, step_tokens)
        if not splits:
            raise CommandFailure(f"model={config.model}: no cluster of up to 65,536 {hardware.name} holds it")
    else:
        splits = fitting_splits(model, base, hardware, config.devices, step_tokens)
    result.splits = _wanted(splits, config)
    if not result.splits:
        raise CommandFailure(_does_not_fit(result, base, splits))
    result.devices = result.splits[0].setup.devices
    if config.compare:
        result.clusters = [_cluster_row(result, name, base) for name in profile_names() if name != "cpu"]


def _does_not_fit(result: Estimate, base: TrainingSetup, others: Sequence[Split]) -> str:
    config, hardware = result.config, result.hardware
    if others:
        s = others[0].setup
        asked = ", ".join(
            f"parallel.{key}={getattr(config.parallel, key)}"
            for key in ("ep", "pp", "cp")
            if getattr(config.parallel, key) is not None
        )
        return (
            f"model={config.model} on {s.devices} {hardware.name}: nothing fits with "
            f"{asked or 'these settings'}; the "
            f"fastest split that fits is parallel.ep={s.ep} parallel.pp={s.pp} parallel.cp={s.cp}"
        )
    smallest = smallest_cluster(result.model, base, hardware, config.train.tokens_per_step)
    where = (
        f"the smallest cluster that can is devices={smallest[0].setup.devices}"
        if smallest
        else "no size fits"
    )
    return f"model={config.model} does not fit {config.devices} {hardware.name}; {where}"


def _cluster_row(result: Estimate, name: str, base: TrainingSetup) -> tuple[Any, ...]:
    """The smallest cluster of another profile."""
    hardware = result.hardware if name == result.hardware.name else load_profile(name)
    found = smallest_cluster(result.model, base, hardware, result.config.train.tokens_per_step)
    if not found:
        return (name, *[None] * (len(CLUSTER_COLUMNS) - 1))
    best, s = found[0], found[0].setup
    days = budget(best, result.config.tokens, hardware, result.parameters[1])["days"]
    return (name, s.devices, s.ep, s.pp, s.cp, s.dp, s.zero, best.memory.total / 1e9, best.tokens_per_s, days)


def _inference(result: Estimate) -> None:
    i = result.config.inference
    phases = ("prefill", "decode") if i.phase == "both" else (i.phase,)
    for phase in phases:
        at = Workpoint(phase, i.batch, i.context, i.precision, i.chips)
        table = operator_table(result.model, at)
        result.inference.append(
            Inference(
                at,
                time_operators(table, result.hardware, fused=i.fused),
                launches(table, fused=True),
                launches(table, fused=False),
                totals(table),
            )
        )
    at = Workpoint("decode", i.batch, i.context, i.precision, i.chips)
    names = [name for name in profile_names() if name != "cpu"]
    for name in [result.hardware.name, *[n for n in names if n != result.hardware.name]]:
        hardware = result.hardware if name == result.hardware.name else load_profile(name)
        result.chips.append(_chip_row(result, hardware, at))


def _chip_row(result: Estimate, hardware: Hardware, at: Workpoint) -> tuple[Any, ...]:
    """Decode speed of one chip profile: roofline with launches, and by bandwidth alone."""
    i = result.config.inference
    seconds = sum(
        t.seconds for t in time_operators(operator_table(result.model, at), hardware, fused=i.fused)
    )
    moved = sum(decode_bytes(result.model, at).values())
    weights = weight_gigabytes(result.model, at.precision)
    return (
        hardware.name,
        hardware.memory_gb,
        int(-(-weights // hardware.usable_gb)),
        hardware.hbm_gb_s / 1e3,
        1 / seconds,
        at.batch / seconds,
        at.batch * hardware.hbm_gb_s * 1e9 / moved,
        i.target_tokens_s * moved / 1e12,
    )
