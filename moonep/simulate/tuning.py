"""Searches the expert-parallel configuration: candidates, their predicted speed and memory, the Pareto front,
and why the others lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from model.config import K3Config
from moonep.command import CommandFailure, progress
from moonep.errors import ConfigError, ContractError
from moonep.simulate.config import TuneConfig, build_workload, load_model
from moonep.simulate.cost import PAYLOAD_BYTES, layer_time
from moonep.simulate.hardware import Hardware
from moonep.simulate.policies import PolicySettings, make_policies
from moonep.simulate.sampling import draw_counts, stream
from moonep.simulate.traces import Trace, load_trace
from moonep.simulate.traffic import Traffic, analyse
from moonep.simulate.training import (
    StepTime,
    TrainingMemory,
    TrainingSetup,
    expert_shape,
    step_time,
    training_memory,
)

DIMENSIONS = (
    "ep",
    "policy",
    "tau",
    "slots",
    "micro_batch",
    "recompute",
    "zero",
    "padding",
    "payload",
    "overlap",
)


@dataclass(frozen=True)
class Choice:
    """One point of the search space."""

    ep: int
    policy: str
    tau: float
    slots: int | None
    micro_batch: int
    recompute: bool
    zero: int
    padding: int
    payload: str
    overlap: bool


@dataclass(frozen=True)
class Candidate:
    """A point with its prediction; `problem` says why it cannot run, if so."""

    choice: Choice
    accumulation: int
    memory: TrainingMemory | None = None
    time: StepTime | None = None
    tokens_per_s: float = 0.0
    imbalance: float = float("inf")
    copies: float = 0.0
    problem: str = ""

    @property
    def gigabytes(self) -> float:
        return self.memory.total / 1e9 if self.memory else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """For summary.json."""
        return {
            **vars(self.choice),
            "accumulation": self.accumulation,
            "tokens_per_s": self.tokens_per_s,
            "memory_gb": self.gigabytes,
            "imbalance": self.imbalance,
            "copies": self.copies,
            "step_s": self.time.to_dict() if self.time else None,
            "memory": self.memory.to_dict() if self.memory else None,
            "problem": self.problem or None,
        }


@dataclass
class Tuning:
    """Everything tools.tune found, best first. `measured`: tokens/s of the candidates that were run."""

    config: TuneConfig
    model: K3Config
    hardware: Hardware
    routing: str
    candidates: list[Candidate]
    searched: str
    measured: dict[Choice, float] = field(default_factory=dict)

    @property
    def feasible(self) -> list[Candidate]:
        """Those that run, fastest first; measured speed counts before predicted where there is one."""
        ran = [c for c in self.candidates if not c.problem]
        return sorted(
            ran, key=lambda c: (c.choice not in self.measured, -self.measured.get(c.choice, c.tokens_per_s))
        )

    @property
    def best(self) -> Candidate:
        return self.feasible[0]


class Routing:
    """Counts for any number of ranks: a workload, or a trace's expert frequencies re-dealt to them."""

    def __init__(self, config: TuneConfig, model: K3Config):
        self.config, self.model = config, model
        self.trace: Trace | None = None
        if config.trace is not None:
            self.trace = load_trace(config.trace, num_experts=model.num_experts, top_k=model.top_k)
            self.trace.require(num_experts=model.num_experts, top_k=model.top_k)
            self.name = f"trace {config.trace}"
        else:
            self.workload = build_workload(config.workload)
            self.name = self.workload.describe()

    def counts(self, ranks: int, tokens: int) -> np.ndarray:
        """[plans x layers, R, E] for S = tokens."""
        steps, layers = self.config.plans, self.config.layers
        if self.trace is None:
            # Popularity belongs to the model and its data, not to the split: always that of the widest group,
            # of
            # which a smaller one sees the first sources.
            widest = max(n for n in range(1, self.config.devices + 1) if self._divides(n))
            bound = self.workload.bind(widest, self.model.num_experts, self.model.top_k, self.config.seed)
            return bound.counts(steps, layers, tokens)[:, :, :ranks].reshape(steps * layers, ranks, -1)
        trace = self.trace
        picks = np.linspace(0, trace.num_steps * trace.num_layers - 1, steps * layers).astype(int)
        flat = trace.tokens_per_expert.reshape(-1, trace.num_ranks, trace.num_experts)
        sources = np.arange(ranks) * trace.num_ranks // ranks
        out = []
        for index in picks:
            rows = flat[index].sum(1, keepdims=True)
            share = flat[index] * self.model.top_k / np.maximum(rows, 1)
            generator = stream(self.config.seed, "counts", int(index), ranks)
            tokens_R = np.full(ranks, tokens)
            out.append(draw_counts(generator, np.minimum(share, 1.0)[sources], tokens_R, self.model.top_k))
        return np.stack(out)

    def _divides(self, ranks: int) -> bool:
        return self.config.devices % ranks == 0 and self.model.num_experts % ranks == 0


class Predictor:
    """Predicts candidates; routing is planned once for each (ranks, tokens, policy, tau, slots, padding)."""

    def __init__(self, config: TuneConfig, model: K3Config):
        self.config, self.model, self.hardware = config, model, config.cluster
        self.routing = Routing(config, model)
        self._counts: dict[tuple[int, int], np.ndarray] = {}
        self._traffic: dict[tuple[Any, ...], list[Traffic]] = {}
        limit = config.memory_limit_gb
        self.limit_gb = self.hardware.usable_gb if limit is None else limit

    def predict(self, choice: Choice) -> Candidate:
        """Memory and speed of one choice, or the problem that forbids it."""
        setup, problem = self._setup(choice)
        if problem:
            return Candidate(choice, 0, problem=problem)
        try:
            memory = training_memory(self.model, setup, self.hardware.device)
        except ContractError as error:
            return Candidate(choice, setup.accumulation, problem=str(error))
        if memory.total > self.limit_gb * 1e9:
            need = f"needs {memory.total / 1e9:.1f} GB of {self.limit_gb:.1f} GB"
            return Candidate(choice, setup.accumulation, memory, problem=need)
        traffic = self._plans(choice, setup.tokens)
        planned = choice.policy != "static"
        shape = expert_shape(self.model, setup, payload=choice.payload, overlap=choice.overlap)
        layers = [
            layer_time(t, shape, self.hardware, plan_us=None if planned else 0.0).total * 1e-6
            for t in traffic
        ]
        time = step_time(self.model, setup, self.hardware, float(np.mean(layers)))
        return Candidate(
            choice,
            setup.accumulation,
            memory,
            time,
            setup.tokens_per_step / time.total,
            float(np.mean([t.imbalance for t in traffic])),
            float(np.mean([t.copies for t in traffic])),
        )

    def _setup(self, choice: Choice) -> tuple[TrainingSetup, str]:
        config = self.config
        micro = choice.micro_batch * config.train.context * config.devices
        accumulation = config.train.tokens_per_step // micro
        setup = TrainingSetup(
            devices=config.devices,
            ep=choice.ep,
            zero=choice.zero,
            micro_batch=choice.micro_batch,
            context=config.train.context,
            accumulation=max(accumulation, 1),
            precision=config.precision,
            recompute=choice.recompute,
            tau=None if choice.policy == "static" else choice.tau,
            slots=choice.slots,
            token_padding=choice.padding,
            overlap=choice.overlap,
        )
        if choice.zero == 0 and config.precision == "bf16":
            return setup, "bf16 with fp32 accumulation needs ZeRO 1 or 2"
        if choice.policy == "moonep" and choice.slots is not None:
            return setup, "moonep needs all its slots"
        return setup, ""

    def _plans(self, choice: Choice, tokens: int) -> list[Traffic]:
        key = (choice.ep, tokens, choice.policy, choice.tau, choice.slots, choice.padding)
        if key not in self._traffic:
            where = (choice.ep, tokens)
            if where not in self._counts:
                self._counts[where] = self.routing.counts(*where)
            counts = self._counts[where]
            settings = PolicySettings(taus=(choice.tau,), slots=choice.slots)
            planned = make_policies([choice.policy], settings)[0].plan(counts)
            self._traffic[key] = [
                analyse(
                    one,
                    alloc,
                    top_k=self.model.top_k,
                    token_padding=choice.padding,
                    tile_rows=self.hardware.tile_rows,
                )
                for one, alloc in zip(counts, planned.alloc, strict=True)
            ]
        return self._traffic[key]


def space(config: TuneConfig, model: K3Config) -> dict[str, list[Any]]:
    """Values of each dimension.

    Raises:
        ConfigError: an empty dimension, or a value that cannot be.
    """
    context, step = config.train.context, config.train.tokens_per_step
    if config.devices < 1:
        raise ConfigError(f"devices={config.devices} must be at least 1")
    if step % (context * config.devices):
        raise ConfigError(
            f"train.tokens_per_step={step} must be a multiple of train.context x devices = "
            f"{context * config.devices}"
        )
    sequences = step // (context * config.devices)
    micro = [n for n in range(1, sequences + 1) if sequences % n == 0 and (n & (n - 1)) == 0]
    if config.train.micro_batch is not None:
        micro = [config.train.micro_batch]
        if sequences % micro[0]:
            raise ConfigError(
                f"train.micro_batch={micro[0]} must divide the {sequences} sequences of a rank's step"
            )
    ep = [n for n in range(1, config.devices + 1) if config.devices % n == 0 and model.num_experts % n == 0]
    for value in config.ep or []:
        if value not in ep:
            raise ConfigError(
                f"ep={value} must divide devices={config.devices} and {model.num_experts} experts"
            )
    payloads = config.payloads or [config.precision]
    for payload in payloads:
        if payload not in PAYLOAD_BYTES:
            raise ConfigError(f"payloads: {payload} is unknown; allowed: {', '.join(PAYLOAD_BYTES)}")
    recompute = config.train.activation_checkpointing
    return {
        "ep": config.ep or ep,
        "policy_tau": _policy_taus(config),
        "slots": config.slots,
        "micro_batch": micro,
        "recompute": [False, True] if recompute is None else [recompute],
        "zero": config.zero,
        "padding": config.token_paddings,
        "payload": payloads,
        "overlap": config.overlaps,
    }


def _policy_taus(config: TuneConfig) -> list[tuple[str, float]]:
    make_policies(config.policies, PolicySettings(taus=tuple(config.taus)))
    out: list[tuple[str, float]] = []
    for name in config.policies:
        if name in ("eplb", "llep", "ultraep", "exact"):
            raise ConfigError(
                f"policies: {name} lives in the simulator only; tune chooses what the runtime can run"
            )
        taus = [1.0] if name in ("static", "moonep") else config.taus
        out += [(name, tau) for tau in taus]
    return out


def _choices(dimensions: dict[str, list[Any]]) -> Iterator[Choice]:
    from itertools import product

    for values in product(*dimensions.values()):
        yield _choice(dict(zip(dimensions, values, strict=True)))


def _choice(values: dict[str, Any]) -> Choice:
    values = dict(values)
    policy, tau = values.pop("policy_tau")
    if values["ep"] == 1:
        policy, tau, values["slots"] = "static", 1.0, None  # nothing to balance
    if policy == "static":
        values["slots"] = None
    return Choice(policy=policy, tau=tau, **values)


def tune(config: TuneConfig) -> Tuning:
    """Searches and ranks.

    Raises:
        ConfigError: wrong input. CommandFailure: nothing fits; the message says what the leanest candidate
        needs.
    """
    model = load_model(config.model)
    assert model is not None
    config.cluster.validate()
    if config.search not in ("auto", "exhaustive", "optuna"):
        raise ConfigError(f"search={config.search}: allowed: auto, exhaustive, optuna")
    dimensions = space(config, model)
    predictor = Predictor(config, model)
    size = int(np.prod([len(values) for values in dimensions.values()]))
    exhaustive = config.search == "exhaustive" or (
        config.search == "auto" and size <= config.exhaustive_limit
    )
    if exhaustive:
        choices = list(dict.fromkeys(_choices(dimensions)))
        found = [predictor.predict(c) for c in progress(choices, len(choices), "predicting")]
        searched = f"all {len(choices)} configurations"
    else:
        found = _optuna(config, dimensions, predictor)
        searched = f"{len(found)} of {size} configurations (Optuna, TPE)"
    result = Tuning(config, model, config.cluster, predictor.routing.name, found, searched)
    if not result.feasible:
        raise CommandFailure(_nothing_fits(result, predictor.limit_gb))
    return result


def _nothing_fits(result: Tuning, limit_gb: float) -> str:
    sized = [c for c in result.candidates if c.memory]
    text = (
        f"model={result.config.model} fits no configuration of {result.config.devices} {result.hardware.name}"
    )
    if not sized:
        return f"{text}: {result.candidates[0].problem}"
    lean = min(sized, key=lambda c: c.gigabytes)
    return (
        f"{text}: the leanest (ep={lean.choice.ep}, micro_batch={lean.choice.micro_batch}, "
        f"zero={lean.choice.zero}) needs "
        f"{lean.gigabytes:.1f} GB of {limit_gb:.1f} GB; raise devices or memory_limit_gb (tools.estimate "
        f"names the "
        "smallest cluster)"
    )


def _optuna(config: TuneConfig, dimensions: dict[str, list[Any]], predictor: Predictor) -> list[Candidate]:
    """Tree-structured Parzen search over the indices of each dimension; seeded."""
    try:
        import optuna
    except ImportError:
        raise ConfigError(
            "search=optuna needs optuna: pip install 'moonep[sim]', or search=exhaustive"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=config.seed))
    found: dict[Choice, Candidate] = {}
    for _ in progress(range(config.trials), config.trials, "searching"):
        trial = study.ask()
        picked = {
            key: values[trial.suggest_int(key, 0, len(values) - 1) if len(values) > 1 else 0]
            for key, values in dimensions.items()
        }
        choice = _choice(picked)
        if choice not in found:
            found[choice] = predictor.predict(choice)
        candidate = found[choice]
        # What does not fit still has an order: the nearer to fitting, the better.
        excess = 0.0 if candidate.memory is None else -candidate.gigabytes
        study.tell(trial, candidate.tokens_per_s if not candidate.problem else excess - 1.0)
    _polish(found, dimensions, predictor)
    return list(found.values())


def _polish(found: dict[Choice, Candidate], dimensions: dict[str, list[Any]], predictor: Predictor) -> None:
    """Changes one dimension of the best candidate at a time for as long as that helps; adds to `found`."""
    fitting = [c for c in found.values() if not c.problem]
    while fitting:
        best = max(fitting, key=lambda c: c.tokens_per_s)
        chosen = {**vars(best.choice), "policy_tau": (best.choice.policy, best.choice.tau)}
        here = {key: chosen[key] for key in dimensions}
        around = [_choice({**here, key: value}) for key, values in dimensions.items() for value in values]
        for choice in around:
            if choice not in found:
                found[choice] = predictor.predict(choice)
        better = [found[c] for c in around if not found[c].problem]
        fitting = [c for c in better if c.tokens_per_s > best.tokens_per_s]


def pareto(candidates: list[Candidate]) -> list[Candidate]:
    """Those that no other beats in tokens/s, memory and balance at once, fastest first."""
    front: list[Candidate] = []
    for c in candidates:
        beaten = any(
            o.tokens_per_s >= c.tokens_per_s
            and o.gigabytes <= c.gigabytes
            and o.imbalance <= c.imbalance
            and (o.tokens_per_s, -o.gigabytes, -o.imbalance) != (c.tokens_per_s, -c.gigabytes, -c.imbalance)
            for o in candidates
        )
        if not beaten:
            front.append(c)
    unique = {
        (round(c.tokens_per_s, 3), round(c.gigabytes, 6), round(c.imbalance, 6)): c for c in reversed(front)
    }
    return sorted(unique.values(), key=lambda c: -c.tokens_per_s)


def rejected(result: Tuning) -> list[tuple[str, str]]:
    """For each value that the best candidate does not have: its best rival with that value, and why that one
    lost."""
    best = result.best
    rows = []
    for dimension in DIMENSIONS:
        for value in sorted({getattr(c.choice, dimension) for c in result.candidates}, key=str):
            if value != getattr(best.choice, dimension):
                rows.append((f"{dimension}={value}", _why(result, best, dimension, value)))
    return rows


def _why(result: Tuning, best: Candidate, dimension: str, value: Any) -> str:
    rivals = [c for c in result.candidates if getattr(c.choice, dimension) == value]
    running = [c for c in rivals if not c.problem]
    if not running:
        lean = min(rivals, key=lambda c: c.gigabytes)
        return f"never runs: {lean.problem}"
    rival = max(running, key=lambda c: c.tokens_per_s)
    assert rival.time is not None and best.time is not None
    slower = 100 * (1 - rival.tokens_per_s / best.tokens_per_s)
    # Compared for a token, since steps may differ in nothing else.
    per_token = {k: v - best.time.to_dict()[k] for k, v in rival.time.to_dict().items() if k != "total"}
    worst = max(per_token, key=lambda k: per_token[k])
    if abs(slower) < 0.05:
        return f"as fast ({rival.gigabytes:.1f} GB against {best.gigabytes:.1f} GB); listed after it"
    cause = f"{worst.replace('_', ' ')} takes {per_token[worst] * 1e3:.2f} ms a step more"
    return (
        f"{slower:.1f} % slower at best: {cause} (imbalance {rival.imbalance:.3f}, {rival.gigabytes:.1f} GB)"
    )


def confidence(result: Tuning) -> str:
    """How far the ranking can be trusted."""
    ranked = result.feasible
    best = ranked[0]
    if result.measured:
        pairs = [(c.tokens_per_s, result.measured[c.choice]) for c in ranked if c.choice in result.measured]
        ratios = [m / p for p, m in pairs]
        return (
            f"{len(pairs)} candidates measured: measured over predicted {min(ratios):.2f} to "
            f"{max(ratios):.2f}; the order "
            "of measured ones is by measurement"
        )
    measured = result.hardware.measured
    margin = 0.15 if measured else 0.3
    near = [c for c in ranked if c.tokens_per_s >= (1 - margin) * best.tokens_per_s]
    basis = f"measured figures: {', '.join(measured)}" if measured else "specifications and assumptions only"
    return (
        f"prediction from {basis}; {len(near)} of {len(ranked)} candidates lie within {margin * 100:.0f} % "
        f"of the best, which "
        "is about the model's error between unlike candidates; measure=N runs the best N"
    )
