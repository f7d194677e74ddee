"""Typed configuration shared by tools.simulate, tools.tune, tools.estimate and tools.calibrate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional, get_type_hints

from model.config import K3Config
from moonep.errors import ConfigError
from moonep.simulate import WORKLOADS, Workload, make_workload
from moonep.simulate.cost import PAYLOAD_BYTES, LayerShape
from moonep.simulate.hardware import Hardware
from moonep.simulate.traces import Trace


def _workload_schema() -> type:
    """`name` plus every parameter of any workload, unset (None) meaning the workload's default."""
    fields: dict[str, Any] = {}
    for cls in WORKLOADS.values():
        hints = get_type_hints(cls)
        for item in dataclasses.fields(cls):
            kind = hints[item.name]
            base = next((k for k in (bool, int, float, str) if kind is k), float)
            fields.setdefault(item.name, (item.name, Optional[base], field(default=None)))  # noqa: UP045
    schema = dataclasses.make_dataclass(
        "WorkloadConfig", [("name", str, field(default="lognormal")), *fields.values()]
    )
    schema.__module__ = __name__
    schema.__doc__ = "A workload's name and its parameters."
    return schema


if TYPE_CHECKING:

    class WorkloadConfig:
        """What `_workload_schema` makes at run time."""

        name: str

else:
    WorkloadConfig = _workload_schema()


def build_workload(config: WorkloadConfig) -> Workload:
    """The workload of a configuration group. Raises ConfigError for a key it does not have."""
    values = {k: v for k, v in vars(config).items() if v is not None}
    return make_workload(values.pop("name"), **values)


@dataclass
class GeometryConfig:
    """R ranks, E experts, K choices a token, S tokens a rank, H dispatched width, Hi expert width; null: from
    the trace, else from the model, else a default."""

    R: int | None = None
    E: int | None = None
    K: int | None = None
    S: int | None = None
    H: int | None = None
    Hi: int | None = None
    token_padding: int = 8


@dataclass(frozen=True)
class Geometry:
    """A complete geometry."""

    R: int
    E: int
    K: int
    S: int
    H: int
    Hi: int
    token_padding: int = 8


DEFAULTS = {"R": 8, "E": 256, "K": 8, "S": 4096, "H": 7168, "Hi": 2048}  # DeepSeek-V3's layer on one node


def complete_geometry(
    config: GeometryConfig, model: K3Config | None = None, trace: Trace | None = None
) -> Geometry:
    """Fills what is not given. Raises ConfigError or DataError, naming the key, if it contradicts or cannot
    be."""
    from_model = {}
    if model is not None:
        from_model = {
            "E": model.num_experts,
            "K": model.top_k,
            "H": model.latent_size,
            "Hi": model.expert_ffn_size,
        }
    from_trace = {}
    if trace is not None:
        trace.require(num_ranks=config.R, num_experts=config.E, top_k=config.K)
        from_trace = {"R": trace.num_ranks, "E": trace.num_experts, "K": trace.top_k, "S": trace.capacity}
    values = {}
    for key, default in DEFAULTS.items():
        given = getattr(config, key)
        values[key] = int(given if given is not None else from_trace.get(key, from_model.get(key, default)))
        if values[key] < 1:
            raise ConfigError(f"geometry.{key}={values[key]} must be at least 1")
    if values["E"] % values["R"]:
        raise ConfigError(
            f"geometry.E={values['E']} must be a multiple of geometry.R={values['R']}; "
            f"allowed R: {', '.join(str(r) for r in range(1, values['E'] + 1) if values['E'] % r == 0)}"
        )
    if values["K"] > values["E"]:
        raise ConfigError(f"geometry.K={values['K']} must be at most geometry.E={values['E']}")
    if trace is not None and values["S"] < trace.capacity:
        raise ConfigError(
            f"geometry.S={values['S']} is below the {trace.capacity} tokens a rank has in the trace"
        )
    return Geometry(**values, token_padding=config.token_padding)


@dataclass
class LayerConfig:
    """Precision of products, payloads of rows and weight copies, and what backward does."""

    precision: str = "bf16"
    payload: str | None = None  # of dispatched rows; null: as precision
    copy_payload: str | None = None  # of copied weights; null: as precision
    grad_bytes: float = 4.0
    recompute: bool = True  # as this project's runtime; false: rows and gate, up are kept for backward
    overlap: bool = False
    in_graph: bool = True


def layer_shape(config: LayerConfig, hidden: int, ffn_hidden: int) -> LayerShape:
    """The layer of a configuration. Raises ConfigError for an unknown precision."""
    for key in ("precision", "payload", "copy_payload"):
        value = getattr(config, key)
        if value is not None and value not in PAYLOAD_BYTES:
            raise ConfigError(f"layer.{key}={value}: unknown; allowed: {', '.join(PAYLOAD_BYTES)}")
    combine = "bf16" if config.precision != "fp32" else "fp32"
    return LayerShape(
        hidden=hidden,
        ffn_hidden=ffn_hidden,
        precision=config.precision,
        payload=config.payload or config.precision,
        combine_payload=combine,
        copy_payload=config.copy_payload or config.precision,
        grad_bytes=config.grad_bytes,
        recompute=config.recompute,
        overlap=config.overlap,
        in_graph=config.in_graph,
    )


def load_model(name: str | None) -> K3Config | None:
    """The preset `name`, or None. Raises ConfigError listing the presets."""
    from model.config import ModelConfigError

    if name is None:
        return None
    try:
        return K3Config.preset(name)
    except ModelConfigError as error:
        raise ConfigError(f"model={name}: {error}") from None


@dataclass
class EPLBConfig:
    redundant: int = 2
    period: int = 8
    window: int = 8
    groups: int = 1
    nodes: int = 1


@dataclass
class LLEPConfig:
    alpha: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3


@dataclass
class UltraEPConfig:
    replicas: int = 2
    epsilon: float = 0.01
    min_tokens: int = 1024


@dataclass
class ExactConfig:
    tau: float = 1.0
    time_limit_s: float = 10.0


@dataclass
class SimulateConfig:
    """`python -m tools.simulate`. `model`: a preset that sets E, K, H and Hi. `trace` replaces the
    workload."""

    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    cluster: Hardware = field(default_factory=Hardware)
    geometry: GeometryConfig = field(default_factory=GeometryConfig)
    layer: LayerConfig = field(default_factory=LayerConfig)
    model: str | None = None
    trace: str | None = None
    trace_top_k: int | None = None  # for a bare array of counts, which does not state it
    policies: list[str] = field(
        default_factory=lambda: ["static", "eplb", "llep", "ultraep", "moonep", "bounded"]
    )
    taus: list[float] = field(default_factory=lambda: [1.0, 1.02, 1.05])
    slots: int | None = None
    eplb: EPLBConfig = field(default_factory=EPLBConfig)
    llep: LLEPConfig = field(default_factory=LLEPConfig)
    ultraep: UltraEPConfig = field(default_factory=UltraEPConfig)
    exact: ExactConfig = field(default_factory=ExactConfig)
    steps: int | None = None  # null: 16, or all of the trace
    layers: int | None = None  # null: 4, or all of the trace
    moe_layers: int | None = None  # of the whole model, for memory; null: of the model, else as simulated
    data_parallel: int = 1  # ranks that share an expert's optimizer state (ZeRO)
    other_gb: float = 0.0  # of the rest of the model on a rank, for the memory verdict
    seed: int = 0
    workers: int = 1
    report: bool = True
    plots: bool = True
    register: str | None = (
        None  # a Python module imported first, to register policies or workloads of one's own
    )
    out: str = "runs/simulate"


@dataclass
class TrainConfig:
    """As in training: `tokens_per_step` gives the accumulation."""

    micro_batch: int = 1
    context: int = 4096
    tokens_per_step: int = 4_194_304
    activation_checkpointing: bool | None = None  # null: try both


@dataclass
class SplitConfig:
    """`ep`, `pp`, `cp` null: every split is tried."""

    ep: int | None = None
    pp: int | None = None
    cp: int | None = None
    zero: int = 1


@dataclass
class RoutingChoice:
    policy: str = "bounded"
    tau: float = 1.0
    slots: int | None = None


@dataclass
class InferenceConfig:
    """The workpoint of the operator table. `phase`: decode, prefill, or both."""

    phase: str = "both"
    batch: int = 1
    context: int = 8192
    precision: str = "mxfp4"  # bf16 | fp8 | mxfp4 (routed experts MXFP4, the rest bf16, as K3 is released)
    chips: int = 1
    fused: bool = True
    target_tokens_s: float = 50.0  # of one sequence; asks for a bandwidth


@dataclass
class EstimateConfig:
    """`python -m tools.estimate`. `devices` null: the smallest cluster that fits. `what`: all, training,
    operators."""

    model: str = "k3"
    cluster: Hardware = field(default_factory=Hardware)
    what: str = "all"
    devices: int | None = None
    precision: str = "bf16"  # of training
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: SplitConfig = field(default_factory=SplitConfig)
    routing: RoutingChoice = field(default_factory=RoutingChoice)
    tokens: float = 1e12  # budget for days and GPU-hours
    compare: bool = True  # also the smallest cluster of every other profile
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    explain: bool = False
    report: bool = True
    out: str = "runs/estimate"


@dataclass
class TuneTrainConfig:
    """What training is asked for; the tuner chooses the rest. `micro_batch` null: chosen."""

    context: int = 1024
    tokens_per_step: int = 131_072
    micro_batch: int | None = None
    activation_checkpointing: bool | None = None


@dataclass
class TuneConfig:
    """`python -m tools.tune`. Lists are the values searched; a list of one fixes it."""

    model: str = "k3-mini"
    cluster: Hardware = field(default_factory=Hardware)
    devices: int = 8
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    trace: str | None = None
    precision: str = "bf16"
    train: TuneTrainConfig = field(default_factory=TuneTrainConfig)
    ep: list[int] | None = None  # null: every divisor of the experts and of the devices
    zero: list[int] = field(default_factory=lambda: [1, 2])
    policies: list[str] = field(default_factory=lambda: ["static", "moonep", "bounded"])
    taus: list[float] = field(default_factory=lambda: [1.0, 1.02, 1.05, 1.1])
    slots: list[int | None] = field(default_factory=lambda: [None])
    token_paddings: list[int] = field(default_factory=lambda: [8])
    payloads: list[str] | None = None  # null: as precision (what the runtime sends today)
    overlaps: list[bool] = field(default_factory=lambda: [False])
    memory_limit_gb: float | None = None  # null: what the cluster's devices have
    plans: int = 6  # steps simulated for each candidate's routing
    layers: int = 2
    search: str = "auto"  # exhaustive | optuna | auto
    exhaustive_limit: int = 4000
    trials: int = 400
    measure: int = 0  # candidates run for real, best first
    measure_steps: int = 12
    measure_timeout_s: float = 600.0
    data: str = "markov"  # corpus of measured runs
    seed: int = 0
    report: bool = True
    out: str = "runs/tune"


@dataclass
class CalibrateConfig:
    """`python -m tools.calibrate name=NAME`. Lists are swept; null takes sizes that suit the device."""

    name: str = "here"
    precision: str | None = None  # null: bf16 on CUDA, fp32 on CPU
    hidden: list[int] | None = None
    ffn_hidden: list[int] | None = None
    groups: list[int] | None = None
    rows: list[int] | None = None  # of a group
    layers: bool = True  # also whole layers of the runtime, with several ranks
    tokens: list[int] | None = None
    sigmas: list[float] = field(default_factory=lambda: [0.0, 1.0, 2.0])
    experts: int | None = None
    top_k: int | None = None
    repeats: int = 7
    ranks: int = 1  # virtual ranks on one device, where the runtime has them; torchrun sets real ones
    domain_size: int | None = None  # null: the ranks of this host
    network_gb_s: float | None = None
    directory: str | None = None  # null: configs/cluster of this project
    out: str = "runs/calibrate"
