"""One run, from a configuration to trained weights: the story in one place.

    corpus -> model with expert parallelism -> engine -> steps, validation, checkpoints -> sample, summary

A step: every rank draws its micro-batches; one small all-reduce counts valid tokens and agrees whether to
stop; forward and backward; one all-reduce of the loss; update of weights, then of routing biases.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from model.config import K3Config
from moonep.errors import ConfigError, MoonEPError, RankDisagreement
from moonep.trainer.build import Parts, build_parts
from moonep.trainer.checkpoint import TrainingState, find_checkpoint, load_checkpoint, save_checkpoint
from moonep.trainer.config import Config
from moonep.trainer.data import BatchStream, Corpus, build_corpus
from moonep.trainer.derived import Derived, derive, report
from moonep.trainer.ending import prompt_ids
from moonep.trainer.engine import Engine
from moonep.trainer.evaluate import evaluate
from moonep.trainer.metrics import (
    MetricsWriter,
    max_memory_gb,
    model_flops_utilization,
    peak_flops,
    start_wandb,
)
from moonep.trainer.progress import Progress
from moonep.trainer.run_dir import choose_run_dir, write_config
from moonep.trainer.schedule import rate
from moonep.trainer.watch import StopRequest


class NonFiniteLoss(MoonEPError, ArithmeticError):
    """The loss or the gradient norm is not a number; weights of this step were not saved."""


@dataclass
class Run:
    """Everything a run holds while it trains."""

    config: Config
    model_config: K3Config
    derived: Derived
    corpus: Corpus
    stream: BatchStream
    parts: Parts
    folder: Path
    device: torch.device
    stop: StopRequest
    metrics: MetricsWriter | None = None
    step: int = 0
    tokens: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    wandb_id: str | None = None

    @property
    def engine(self) -> Engine:
        return self.parts.engine

    @property
    def is_first(self) -> bool:
        return self.engine.rank == 0


def model_config_of(config: Config, corpus: Corpus) -> K3Config:
    """The preset with the user's changes; the vocabulary is the corpus's unless the user set one.

    Raises:
        ConfigError, ModelConfigError: a vocabulary that is too small, or a field out of range.
    """
    changes = {"vocab_size": corpus.vocab_size, **config.model_overrides()}
    if changes["vocab_size"] < corpus.vocab_size:
        given = changes["vocab_size"]
        raise ConfigError(f"model.vocab_size={given} is below the corpus's vocabulary of {corpus.vocab_size}")
    return K3Config.preset(config.model.preset, **changes)


def describe(config: Config, world_size: int) -> str:
    """What `dry_run=true` prints after the configuration. Allocates no model."""
    corpus = build_corpus(config.data_config())
    model_config = model_config_of(config, corpus)
    derived = derive(config, model_config, world_size)
    _stream(config, corpus, derived, 0)
    return f"corpus     {corpus.describe()}\n{report(config, model_config, derived)}"


def _stream(config: Config, corpus: Corpus, derived: Derived, rank: int) -> BatchStream:
    return BatchStream(
        corpus.split("train"),
        context=config.train.context,
        micro_batch=derived.micro_batch,
        rank=rank,
        world_size=derived.world_size,
        accumulation=derived.accumulation,
        seed=config.seed,
        sampling=config.data.sampling,
    )


def check_agreement(config: Config) -> None:
    """Raises RankDisagreement on every rank when the ranks were started with different configurations."""
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, config.digest())
    if len(set(digests)) > 1:
        raise RankDisagreement("the configuration's hash", dict(enumerate(digests)))


def prepare(config: Config, device: torch.device, stop: StopRequest) -> Run:
    """Corpus, model, engine, folder; and the state of a checkpoint when one is resumed. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_agreement(config)
    corpus = build_corpus(config.data_config())
    model_config = model_config_of(config, corpus)
    derived = derive(config, model_config, world_size)
    prompt_ids(config, corpus)  # a prompt that cannot be spelled is better known now than after training
    stream = _stream(config, corpus, derived, rank)
    checkpoint = find_checkpoint(config.checkpoint.resume, Path(config.run.dir) / "checkpoints")
    folder = _agree_on_folder(config, checkpoint, rank)
    parts = build_parts(config, model_config, derived, device)
    run = Run(config, model_config, derived, corpus, stream, parts, folder, device, stop)
    if checkpoint is not None:
        restore(run, checkpoint)
    parts.routing.record_into(folder / "trace")
    if run.is_first:
        resumed = run.step if checkpoint is not None else None
        wandb_run = start_wandb(config, folder, run.wandb_id)
        run.wandb_id = getattr(wandb_run, "id", None)
        run.metrics = MetricsWriter(folder / "metrics.jsonl", after_step=resumed, wandb_run=wandb_run)
    return run


def _agree_on_folder(config: Config, checkpoint: Path | None, rank: int) -> Path:
    """Rank 0 makes the run's folder and tells the others its name, or the error that came of it."""
    answer: list[Any] = [None]
    if rank == 0:
        try:
            folder = choose_run_dir(Path(config.run.dir), resume_from=checkpoint)
            folder.mkdir(parents=True, exist_ok=True)
            write_config(folder, config.to_dict())
            answer = [str(folder)]
        except OSError as error:
            answer = [ConfigError(f"run.dir={config.run.dir} cannot be made ({error}); name another")]
        except MoonEPError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], BaseException):
        raise answer[0]
    return Path(answer[0])


def train(run: Run) -> None:
    """Steps until the last, or until a signal asks to stop. Collective."""
    config = run.config
    progress = Progress(config.train.steps, run.step, enabled=run.is_first and config.logging.progress)
    if run.is_first:
        progress.note(f"corpus     {run.corpus.describe()}")
        progress.note(report(config, run.model_config, run.derived))
        progress.note(f"writing    {run.folder}")
    meter = _Meter(run)
    try:
        while run.step < config.train.steps:
            if not train_step(run):
                break
            due = run.step % config.logging.every == 0 or run.step == config.train.steps
            values = meter.measure() if due else None
            if values is not None and run.metrics is not None:
                run.metrics.write(values)
                progress.update(run.step, values)
            _between_steps(run, progress)
            meter.resume()
    finally:
        progress.close()


def train_step(run: Run) -> bool:
    """One optimizer step over `train.tokens_per_step` tokens. Returns False, nothing done, on a stop request.

    Raises:
        NonFiniteLoss: on every rank.
    """
    engine, accumulation = run.engine, run.derived.accumulation
    position = run.stream.state_dict()
    batches = [run.stream.next() for _ in range(accumulation)]
    valid = sum(int((batch.targets >= 0).sum()) for batch in batches)
    control = torch.tensor([valid, run.stop.signal_name is not None], dtype=torch.float64, device=run.device)
    dist.all_reduce(control)
    if control[1] > 0:
        run.stream.load_state_dict(position)  # the checkpoint that follows must not skip these
        return False
    global_tokens = float(control[0])
    run.parts.routing.begin_step(run.step)
    engine.model.train()
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for index, batch in enumerate(batches):
        cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(run.device)
        loss, _ = engine.loss(batch.tokens.to(run.device), batch.targets.to(run.device), cu_seqlens)
        engine.backward(loss, global_tokens)
        total += loss.detach()
        run.parts.routing.end_micro_batch()
        if index + 1 < accumulation:
            engine.end_micro_batch()
    dist.all_reduce(total)
    run.losses["train"] = float(total) / max(global_tokens, 1.0)
    _require_finite(run, "loss", run.losses["train"])
    engine.step(config_lr(run.config, run.step))
    _require_finite(run, "gradient norm", engine.grad_norm)
    run.parts.balancers.update()
    run.step += 1
    run.tokens += run.config.train.tokens_per_step
    return True


def config_lr(config: Config, step: int) -> float:
    """Learning rate of 0-based step `step`."""
    return config.optimizer.lr * rate(config.schedule, step, config.train.steps)


def _require_finite(run: Run, what: str, value: float) -> None:
    if not math.isfinite(value):
        raise NonFiniteLoss(
            f"the {what} is {value} at step {run.step + 1}; lower optimizer.lr={run.config.optimizer.lr:g}"
            " or set optimizer.clip, and continue from an earlier step with checkpoint.resume="
        )


class _Meter:
    """Time and tokens since the last line, validation and checkpoints left out."""

    def __init__(self, run: Run):
        self.run = run
        dtype = torch.bfloat16 if run.config.precision.name == "bf16" else torch.float32
        self.peak = peak_flops(run.device, dtype)
        self._elapsed, self._steps, self._start = 0.0, run.step, time.perf_counter()

    def measure(self) -> dict[str, Any]:
        """The values of a training line of metrics.jsonl. Collective: sums expert counts over ranks."""
        run = self.run
        self._elapsed += time.perf_counter() - self._start
        steps = run.step - self._steps
        tokens_per_s = steps * run.config.train.tokens_per_step / self._elapsed
        values = {
            "step": run.step,
            "tokens": run.tokens,
            "loss": run.losses["train"],
            "lr": config_lr(run.config, run.step - 1),
            "grad_norm": run.engine.grad_norm,
            "tokens_per_s": tokens_per_s,
            "mfu": model_flops_utilization(
                tokens_per_s, run.derived.active_parameters, run.derived.world_size, self.peak
            ),
            "step_ms": 1e3 * self._elapsed / steps,
            "max_memory_gb": max_memory_gb(run.device),
            "moe": run.parts.routing.collect(),
        }
        self._elapsed, self._steps = 0.0, run.step
        self._start = time.perf_counter()
        return values

    def resume(self) -> None:
        """Called when the next step begins: what passed since `measure` was not training."""
        if self._steps == self.run.step:
            self._start = time.perf_counter()


def _between_steps(run: Run, progress: Progress) -> None:
    t, every = run.config.train, run.config.checkpoint.every
    last = run.step == t.steps
    if (t.validate_every and run.step % t.validate_every == 0) or last:
        values = validate(run)
        progress.note(
            f"step {run.step}: validation loss {values['val_loss']:.4f},"
            f" {values['val_bits_per_byte']:.4f} bits per byte"
        )
    if (every and run.step % every == 0) or (last and run.config.checkpoint.final):
        path = save(run)
        progress.note(f"step {run.step}: wrote {path}")


def validate(run: Run) -> dict[str, float]:
    """Loss over `train.validate_tokens` of the validation split, spread evenly. Collective."""
    values = evaluate(
        run.engine.model,
        run.corpus.split("val"),
        context=run.config.train.context,
        capacity=run.derived.capacity,
        rank=run.engine.rank,
        world_size=run.engine.world_size,
        max_tokens=run.config.train.validate_tokens or None,
        device=run.device,
    )
    run.losses["validation"] = values["val_loss"]
    run.losses["bits_per_byte"] = values["val_bits_per_byte"]
    if run.metrics is not None:
        run.metrics.write({"step": run.step, "tokens": run.tokens, **values})
    return values


def save(run: Run) -> Path:
    """Writes `checkpoints/step_N`. Collective."""
    state = TrainingState(
        step=run.step,
        tokens=run.tokens,
        model=run.model_config.to_dict(),
        config=run.config.to_dict(),
        data=run.stream.state_dict(),
        tokenizer=run.corpus.tokenizer.to_dict(),
        balancer=run.parts.balancers.biases(),
        extra={"wandb_id": run.wandb_id, "losses": run.losses},
    )
    return save_checkpoint(
        run.engine, run.folder / "checkpoints", state, keep_last=run.config.checkpoint.keep
    )


def restore(run: Run, checkpoint: Path) -> None:
    """Continues from a checkpoint. Collective; raises CheckpointError on every rank, nothing changed then."""
    state = load_checkpoint(run.engine, checkpoint, model=run.model_config.to_dict())
    run.step, run.tokens = state.step, state.tokens
    run.stream.load_state_dict(state.data)
    run.parts.balancers.load_biases(state.balancer)
    run.losses = dict(state.extra.get("losses", {}))
    run.wandb_id = state.extra.get("wandb_id")
