"""Continues a prompt with a trained model:

python -m tools.generate checkpoint=runs/quickstart prompt='def ' tokens=200
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonep.command import command, write_text
from moonep.errors import ConfigError


@dataclass
class GenerateConfig:
    """Keys of the command.

    Attributes:
        checkpoint: a run's folder (its newest checkpoint) or a step_N folder.
        prompt: text to continue; empty begins a document.
        tokens: how many to add.
        samples: how many continuations, each with its own seed.
        temperature: 0 takes the likeliest token each time.
        top_k: sample among so many likeliest tokens; null: all.
        seed: of the first sample.
        device, dtype: auto | cpu | cuda; fp32 | bf16.
        out: folder for sample.txt; null: print only.
    """

    checkpoint: str | None = None
    prompt: str = ""
    tokens: int = 256
    samples: int = 1
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 1
    device: str = "auto"
    dtype: str = "fp32"
    out: str | None = None


def run(config: GenerateConfig) -> list[str]:
    """Prints and returns the texts."""
    import torch

    from moonep.trainer.checkpoint_model import choose_device, choose_dtype, load_model
    from moonep.trainer.tokens import prompt_ids

    _check(config)
    device = choose_device(config.device)
    loaded = load_model(config.checkpoint, device=device, dtype=choose_dtype(config.dtype))
    ids = prompt_ids(loaded.tokenizer, config.prompt)
    prompt = torch.tensor(ids, dtype=torch.int64, device=device)
    texts = []
    for sample in range(config.samples):
        seed = config.seed + sample
        produced = loaded.model.generate(
            prompt, config.tokens, temperature=config.temperature, top_k=config.top_k, seed=seed
        )
        texts.append(loaded.tokenizer.decode(produced.tolist()))
        print(f"--- {loaded.path}, seed {seed}\n{texts[-1]}")
    if config.out is not None:
        path = write_text(f"{config.out}/sample.txt", "\n---\n".join(texts) + "\n")
        print(f"--- wrote {path}")
    return texts


def _check(config: GenerateConfig) -> None:
    for key, least in (("tokens", 1), ("samples", 1), ("temperature", 0)):
        if getattr(config, key) < least:
            raise ConfigError(f"{key}={getattr(config, key)} must be at least {least}")
    if config.top_k is not None and config.top_k < 1:
        raise ConfigError(f"top_k={config.top_k} must be at least 1, or null for all tokens")


def main(words: Sequence[str]) -> None:
    """The command line. `prompt=` is taken as it stands: Hydra's grammar would trip over code in it."""
    prompts = [word.removeprefix("prompt=") for word in words if word.startswith("prompt=")]

    def run_with_prompt(config: GenerateConfig) -> list[str]:
        return run(replace(config, prompt=prompts[-1]) if prompts else config)

    command(run_with_prompt, "generate", GenerateConfig, [w for w in words if not w.startswith("prompt=")])


if __name__ == "__main__":
    main(sys.argv[1:])
