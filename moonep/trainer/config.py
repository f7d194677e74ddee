"""The typed schema of a training run: one dataclass a config group. YAML holds values only.

`compose.py` fills these from `configs/` and the command line, `derived.py` checks them across fields. Nothing
below that edge imports omegaconf.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional, Union, get_args, get_origin, get_type_hints

from model.config import K3Config
from moonep.trainer.data import DataConfig


@dataclass
class TrainSection:
    """How long, how wide. tokens_per_step = micro_batch x context x ranks x accumulation, which follows."""

    steps: int = 1000
    tokens_per_step: int = 8192
    micro_batch: int | None = 4  # sequences a rank computes at once; null: all of a rank's share of a step
    context: int = 256  # tokens of a sequence
    activation_checkpointing: bool = False
    validate_every: int = 100  # steps; 0: only at the end
    validate_tokens: int = 65_536  # 0: the whole validation split
    sample_tokens: int = 256  # length of sample.txt; 0: none
    sample_prompt: str | None = None  # null: the first token of the validation split
    sample_temperature: float = 0.8


@dataclass
class OptimizerConfig:
    """AdamW. Matrices decay; norms, gates' biases, embeddings and other vectors do not."""

    name: str = "adamw"
    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # global gradient norm; 0: no clipping


@dataclass
class ScheduleConfig:
    """Learning rate over steps: cosine, wsd (warm-up, stable, decay) or constant, after a linear warm-up."""

    name: str = "cosine"
    warmup_fraction: float = 0.01
    decay_fraction: float = 0.15  # wsd: the last part of the run
    final_fraction: float = 0.1  # of the peak rate


@dataclass
class ParallelConfig:
    """How ranks share the work. `ep=null`: every rank, or the most of them that divides the experts."""

    ep: int | None = None
    zero: int = 1
    tensor: int = 1
    pipeline: int = 1
    memory: str = "auto"  # auto | cuda | shm | collective
    timeout_s: float = 60.0


@dataclass
class PrecisionConfig:
    """bf16 keeps fp32 master weights, accumulates and all-reduces gradients in fp32."""

    name: str = "fp32"
    grad_accum_dtype: str = "fp32"
    communication_dtype: str = "fp32"


@dataclass
class CheckpointConfig:
    """`every` in steps (0: only the last); `resume`: true (newest of run.dir), false, or a step_N folder."""

    every: int = 0
    keep: int = 2
    final: bool = True
    resume: Union[bool, str] = False  # noqa: UP007  omegaconf 2.3 reads Union, not bool | str


@dataclass
class WandbConfig:
    """wandb gets the numbers of metrics.jsonl, from rank 0 alone."""

    mode: str = "disabled"  # disabled | offline | online
    project: str = "moonep"
    entity: str | None = None


@dataclass
class LoggingConfig:
    """`every`: steps between lines of metrics.jsonl."""

    every: int = 1
    progress: bool = True
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class RoutingConfig:
    """Balancing between ranks (policy, tau) and experts (balancer); laboratory switches (force, record)."""

    policy: str = "bounded"
    tau: float = 1.0
    slots: int | None = None  # places for copied experts a rank; null: what exact balance may need
    max_imbalance: float | None = None  # rank imbalance that the shard is sized for, with fewer slots
    balancer: str = "quantile"  # quantile | sign | none
    bins: int = 1000
    sign_rate: float = 1e-2
    force: str | None = None  # a workload's name, or the path of a recorded trace
    force_args: dict[str, Any] = field(default_factory=dict)
    record: bool = False


@dataclass
class RunConfig:
    """Where a run writes. A finished folder is kept; the next run of the same name is numbered."""

    name: str = "train"
    dir: str = "runs/${run.name}"


def _optional(kind: Any) -> Any:
    """The omegaconf-readable `Optional` of a K3Config field's type."""
    if get_origin(kind) is tuple:
        element: Any = get_args(kind)[0]
        return Optional[list[element]]  # noqa: UP045
    return Optional[kind if kind in (int, float, bool, str) else Any]  # noqa: UP045


def _model_schema() -> type:
    """`preset` plus every field of K3Config, unset (None) meaning the preset's value."""
    hints = get_type_hints(K3Config)
    fields: list[tuple[str, Any, Any]] = [("preset", str, field(default="tiny"))]
    for item in dataclasses.fields(K3Config):
        if item.init and item.name != "preset":
            fields.append((item.name, _optional(hints[item.name]), field(default=None)))
    return _schema("ModelConfig", fields, "A preset's name and the fields of K3Config that differ from it.")


def _data_schema() -> type:
    """The fields of DataConfig, which is frozen; omegaconf fills only dataclasses that are not."""
    hints = get_type_hints(DataConfig)
    fields = [(f.name, hints[f.name], field(default=f.default)) for f in dataclasses.fields(DataConfig)]
    return _schema("DataSection", fields, DataConfig.__doc__ or "")


def _schema(name: str, fields: list[Any], doc: str) -> type:
    schema = dataclasses.make_dataclass(name, fields)
    schema.__module__, schema.__doc__ = __name__, doc
    return schema


if TYPE_CHECKING:

    class ModelConfig:
        """What `_model_schema` makes at run time."""

        preset: str

    class DataSection(DataConfig):
        """What `_data_schema` makes at run time."""

else:
    ModelConfig = _model_schema()
    DataSection = _data_schema()


@dataclass
class Config:
    """A whole run. `deterministic` asks torch for deterministic algorithms and fails where there is none."""

    seed: int = 1
    deterministic: bool = False
    dry_run: bool = False
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataSection = field(default_factory=DataSection)
    train: TrainSection = field(default_factory=TrainSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def data_config(self) -> DataConfig:
        """What `build_corpus` takes."""
        return DataConfig(**vars(self.data))

    def model_overrides(self) -> dict[str, Any]:
        """The fields of K3Config that the user set."""
        fields = {k: v for k, v in vars(self.model).items() if k != "preset" and v is not None}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for YAML, JSON or wandb."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """A short hash of every value; ranks compare it before they start."""
        text = json.dumps(self.to_dict(), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
