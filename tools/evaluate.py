"""Loss and bits per byte of a checkpoint on a text:

python -m tools.evaluate checkpoint=runs/quickstart
python -m tools.evaluate checkpoint=runs/quickstart data.path=FILE_OR_FOLDER split=train max_tokens=100000
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from moonep.command import command, table, write_json
from moonep.errors import ConfigError


@dataclass
class EvaluateData:
    """Another corpus than the run's, read with the run's tokenizer. `pattern`: file names of a folder."""

    path: str | None = None
    pattern: str | None = None
    validation_fraction: float | None = None


@dataclass
class EvaluateConfig:
    """Keys of the command.

    Attributes:
        checkpoint: a run's folder (its newest checkpoint) or a step_N folder.
        data: what differs from the run's own corpus.
        split: val | train.
        context: tokens of a window; null: the run's.
        max_tokens: evaluate about so many, spread over the split; null: all.
        batch_tokens: tokens of one forward pass.
        device, dtype: auto | cpu | cuda; fp32 | bf16.
        out: folder for summary.json; null: print only.
    """

    checkpoint: str | None = None
    data: EvaluateData = field(default_factory=EvaluateData)
    split: str = "val"
    context: int | None = None
    max_tokens: int | None = None
    batch_tokens: int = 4096
    device: str = "auto"
    dtype: str = "fp32"
    out: str | None = None


def run(config: EvaluateConfig) -> dict:
    """Prints a table and returns its numbers."""
    from moonep.trainer.checkpoint_model import choose_device, choose_dtype, load_model
    from moonep.trainer.data import build_corpus
    from moonep.trainer.evaluate import evaluate

    _check(config)
    device = choose_device(config.device)
    loaded = load_model(config.checkpoint, device=device, dtype=choose_dtype(config.dtype))
    corpus = build_corpus(_data_config(config, loaded.state.config.get("data", {})), loaded.tokenizer)
    context = config.context or int(loaded.state.config.get("train", {}).get("context", 256))
    start = time.perf_counter()
    values = evaluate(
        loaded.model,
        corpus.split(config.split),
        context=context,
        capacity=max(context, config.batch_tokens),
        max_tokens=config.max_tokens,
        device=device,
    )
    summary = {
        "checkpoint": str(loaded.path),
        "step": loaded.state.step,
        "corpus": corpus.describe(),
        "split": config.split,
        "context": context,
        "loss": values["val_loss"],
        "bits_per_byte": values["val_bits_per_byte"],
        "tokens": values["val_tokens"],
        "seconds": time.perf_counter() - start,
    }
    if corpus.entropy is not None:
        summary["entropy"] = corpus.entropy
    rows = [(key.replace("_", " "), value) for key, value in summary.items()]
    print(table("Evaluation", ("quantity", "value"), [(k, _cell(v)) for k, v in rows]))
    if config.out is not None:
        print(f"wrote {write_json(f'{config.out}/summary.json', summary)}")
    return summary


def _check(config: EvaluateConfig) -> None:
    if config.split not in ("val", "train"):
        raise ConfigError(f"split={config.split} is unknown; allowed: val, train")
    for key in ("context", "max_tokens", "batch_tokens"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value} must be at least 1")


def _data_config(config: EvaluateConfig, stored: dict):
    """The run's corpus, or another read as text with the run's tokenizer."""
    from moonep.trainer.data import DataConfig

    if config.data.path is None:
        return DataConfig(**stored)
    changes = {k: v for k, v in vars(config.data).items() if v is not None}
    return DataConfig(**{"name": "text", **changes})


def _cell(value: object) -> str:
    return (
        f"{value:.5f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


if __name__ == "__main__":
    command(run, "evaluate", EvaluateConfig)
