"""The end of a run: a sample, the loss curve, the summary, and what to do next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from torch import nn

from moonep.errors import DataError
from moonep.trainer.config import Config
from moonep.trainer.data import Corpus

if TYPE_CHECKING:
    from moonep.trainer.loop import Run


WRITTEN = ("config.yaml", "metrics.jsonl", "loss.png", "sample.txt", "summary.json", "checkpoints", "trace")


def finish(run: Run) -> None:
    """Sample, loss curve, summary; closes the metrics. Collective."""
    sample = write_sample(run)
    run.parts.routing.close()
    if not run.is_first:
        return
    assert run.metrics is not None
    run.metrics.close()
    from moonep.trainer.plots import plot_loss

    plot_loss(run.folder / "metrics.jsonl", run.folder / "loss.png")
    summary = {
        "step": run.step,
        "tokens": run.tokens,
        "train_loss": run.losses.get("train"),
        "val_loss": run.losses.get("validation"),
        "val_bits_per_byte": run.losses.get("bits_per_byte"),
        "source_entropy": run.corpus.entropy,
        "total_parameters": run.derived.total_parameters,
        "active_parameters": run.derived.active_parameters,
        "corpus": run.corpus.fingerprint,
    }
    (run.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(_closing_words(run, sample))


def prompt_ids(config: Config, corpus: Corpus) -> torch.Tensor:
    """[T] int64: the sample's prompt. Raises DataError for a text that the vocabulary cannot spell."""
    text = config.train.sample_prompt
    if not text:
        return torch.from_numpy(corpus.split("val").window(0, 1))
    try:
        return torch.from_numpy(corpus.encode(text)).long()
    except DataError as error:
        raise DataError(f"train.sample_prompt={text!r}: {error}; leave it empty for held-out text") from None


def write_sample(run: Run) -> str:
    """Generates `train.sample_tokens` tokens after the prompt; rank 0 writes sample.txt. Collective."""
    t = run.config.train
    if not t.sample_tokens:
        return ""
    prompt = prompt_ids(run.config, run.corpus).to(run.device)
    model: nn.Module = run.engine.model
    # Every rank generates the same text, so that all make the same number of collective calls.
    ids = model.generate(  # type: ignore[operator]
        prompt, t.sample_tokens, temperature=t.sample_temperature, seed=run.config.seed
    )
    text = run.corpus.decode(ids.tolist())
    if run.is_first:
        (run.folder / "sample.txt").write_text(text, encoding="utf-8")
    return text


def _closing_words(run: Run, sample: str) -> str:
    folder = run.folder
    checkpoint = folder / "checkpoints" / f"step_{run.step}"
    lines = [
        "",
        f"trained    {run.step:,} steps, {run.tokens:,} tokens, loss {run.losses.get('train', 0):.4f}",
    ]
    if "bits_per_byte" in run.losses:
        against = f"{run.losses['bits_per_byte']:.4f} bits per byte"
        if run.corpus.entropy is not None:
            against = f"the source's entropy is {run.corpus.entropy:.4f}"
        lines.append(f"validation loss {run.losses['validation']:.4f}, {against}")
    if sample:
        lines += ["sample", *(f"  | {line}" for line in sample.strip("\n").splitlines()[:12])]
    present = [name for name in WRITTEN if (folder / name).exists()]
    lines.append(f"files      {folder}/: {' '.join(present)}")
    if checkpoint.exists() and sample:
        prompt = run.config.train.sample_prompt or ""
        lines.append(f"try next   python -m tools.generate checkpoint={checkpoint} prompt={prompt!r}")
    return "\n".join(lines)
