"""A plain GPT against a K3 model on the same characters: how many CPU seconds does each need to a
validation loss?

python -m tools.compare_char data.path=tinyshakespeare.txt out=runs/compare_char

Both train in one process with one thread; whichever has used less CPU time makes the next steps, so both meet
the same state of the machine. Counted is the CPU time of training steps (data, forward, backward, update);
validation, on the whole validation split in windows of the training context, is left out for both. The GPT is
nanoGPT's published CPU setting (4 layers, 4 heads, 128 wide, context 64, 12 sequences, dropout 0, AdamW with
1e-3 -> 1e-4, warm-up 100, beta2 0.99, 2000 steps: 1.88).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moonep.command import command, table, write_json
from moonep.errors import ConfigError
from moonep.trainer.data import BatchStream, Corpus, DataConfig, build_corpus
from moonep.trainer.evaluate import evaluate
from moonep.trainer.schedule import rate


@dataclass
class Recipe:
    """How one contestant trains: cosine from `lr` to `lr * final_fraction` after a linear warm-up."""

    steps: int = 2000
    batch: int = 12
    lr: float = 1e-3
    final_fraction: float = 0.1
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 100


@dataclass
class K3Recipe(Recipe):
    """A K3 model's recipe; `model` changes fields of preset `preset`; `balancer`: quantile, sign, none."""

    steps: int = 350
    lr: float = 5e-3
    warmup_steps: int = 18
    evaluate_every: int = 25
    preset: str = "tiny"
    balancer: str = "quantile"
    model: dict[str, Any] = field(default_factory=dict)


@dataclass
class CompareData:
    """The text; its last `validation_fraction` validates."""

    path: str = "data/tinyshakespeare.txt"
    validation_fraction: float = 0.1


@dataclass
class CompareConfig:
    """Keys of the command. `target`: validation loss to reach, nats a character; `only`: gpt or k3 alone."""

    data: CompareData = field(default_factory=CompareData)
    context: int = 64
    target: float = 1.88
    seed: int = 1337
    gpt: Recipe = field(default_factory=Recipe)
    k3: K3Recipe = field(default_factory=K3Recipe)
    only: str | None = None
    out: str = "runs/compare_char"


class Contestant:
    """A model that trains a step at a time and counts its CPU seconds.

    Attributes:
        curve: (step, CPU seconds, validation loss) of each evaluation.
    """

    def __init__(
        self, name: str, model: nn.Module, groups: list, recipe: Recipe, corpus: Corpus, config: CompareConfig
    ):
        self.name, self.model, self.recipe = name, model, recipe
        self.corpus, self.context, self.target = corpus, config.context, config.target
        betas = (recipe.beta1, recipe.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, fused=True)
        self.stream = BatchStream(
            corpus.split("train"),
            context=config.context,
            micro_batch=recipe.batch,
            seed=config.seed,
            sampling="random",
        )
        self.after_step: Callable[[], None] = lambda: None
        self.step, self.cpu_s = 0, 0.0
        self.curve: list[tuple[int, float, float]] = []

    @property
    def done(self) -> bool:
        return self.step >= self.recipe.steps

    def train_step(self) -> None:
        start = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * rate(_schedule(self.recipe), self.step, self.recipe.steps)
        batch = self.stream.next()
        loss, count = self.model(batch.tokens, targets=batch.targets)
        (loss / count).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.after_step()
        self.step += 1
        self.cpu_s += time.process_time() - start
        if self.step % self.recipe.evaluate_every == 0 or self.done:
            self.validate()

    def validate(self) -> None:
        values = evaluate(
            self.model, self.corpus.split("val"), context=self.context, capacity=32 * self.context
        )
        self.curve.append((self.step, self.cpu_s, values["val_loss"]))
        print(
            f"{self.name:4} step {self.step:5}  {self.cpu_s:8.1f} CPU s  validation {values['val_loss']:.4f}",
            flush=True,
        )

    @property
    def reached(self) -> tuple[int, float, float] | None:
        """The first evaluation at or below the target."""
        return next((point for point in self.curve if point[2] <= self.target), None)


def run(config: CompareConfig) -> dict[str, Any]:
    """Trains both, prints a table, writes summary.json and compare.png; returns the summary."""
    if config.only not in (None, "gpt", "k3"):
        raise ConfigError(f"only={config.only} is unknown; allowed: gpt, k3, null (both)")
    for name, recipe in (("gpt", config.gpt), ("k3", config.k3)):
        for key in ("steps", "batch", "evaluate_every"):
            if getattr(recipe, key) < 1:
                raise ConfigError(f"{name}.{key}={getattr(recipe, key)} must be at least 1")
    torch.set_num_threads(1)
    data = config.data
    corpus = build_corpus(
        DataConfig(
            name="text", path=data.path, tokenizer="characters", validation_fraction=data.validation_fraction
        )
    )
    print(corpus.describe())
    makers = {"gpt": make_gpt, "k3": make_k3}
    contestants = [makers[name](config, corpus) for name in makers if config.only in (None, name)]
    while running := [c for c in contestants if not c.done]:
        behind = min(running, key=lambda c: c.cpu_s)
        for _ in range(min(5, behind.recipe.steps - behind.step)):
            behind.train_step()
    summary = summarize(config, corpus, contestants)
    print(table(f"CPU seconds to validation loss {config.target}", *_rows(summary)))
    print(f"wrote {write_json(Path(config.out) / 'summary.json', summary)}")
    print(f"wrote {draw(summary, Path(config.out) / 'compare.png')}")
    return summary


def make_gpt(config: CompareConfig, corpus: Corpus) -> Contestant:
    from tools.plain_gpt import GPTShape, PlainGPT

    torch.manual_seed(config.seed)
    model = PlainGPT(GPTShape(corpus.vocab_size, config.context))
    return Contestant(
        "gpt", model, model.parameter_groups(config.gpt.weight_decay), config.gpt, corpus, config
    )


def make_k3(config: CompareConfig, corpus: Corpus) -> Contestant:
    """All experts in this process: expert parallelism changes where a K3 model computes, not what."""
    from model import K3Config, K3Model, parameter_groups
    from moonep.trainer.balancers import Balancers, make_balancer
    from moonep.trainer.config import RoutingConfig

    recipe, routing = config.k3, RoutingConfig(balancer=config.k3.balancer)
    torch.manual_seed(config.seed)
    model_config = K3Config.preset(recipe.preset, **{"vocab_size": corpus.vocab_size, **recipe.model})

    def balancer(c: K3Config, layer: int) -> Any:
        return make_balancer(routing, c.num_experts, c.top_k, torch.device("cpu"))

    balanced = recipe.balancer != "none"
    model = K3Model(model_config, balancer=balancer if balanced else None)
    groups = parameter_groups(model, recipe.weight_decay)
    contestant = Contestant("k3", model, groups, recipe, corpus, config)
    if balanced:
        by_layer = {moe.layer: moe.router.balancer for moe in model.moe_layers()}
        contestant.after_step = Balancers(by_layer).update
    return contestant


def _schedule(recipe: Recipe) -> Any:
    from moonep.trainer.config import ScheduleConfig

    warmup = recipe.warmup_steps / recipe.steps
    return ScheduleConfig(name="cosine", warmup_fraction=warmup, final_fraction=recipe.final_fraction)


def summarize(config: CompareConfig, corpus: Corpus, contestants: list[Contestant]) -> dict[str, Any]:
    """Plain values: each curve, when it reached the target, and the ratio of CPU seconds."""
    entries = {c.name: _entry(c) for c in contestants}
    seconds = [entry["cpu_s_to_target"] for entry in entries.values()]
    ratio = seconds[1] / seconds[0] if len(seconds) == 2 and None not in seconds else None
    return {
        "target": config.target,
        "corpus": corpus.describe(),
        "torch": torch.__version__,
        "contestants": entries,
        "k3_over_gpt_cpu_s": ratio,
    }


def _entry(contestant: Contestant) -> dict[str, Any]:
    total = sum(p.numel() for p in contestant.model.parameters())
    model_config = getattr(contestant.model, "config", None)
    reached = contestant.reached
    return {
        "parameters": total,
        "active_parameters": total if model_config is None else model_config.num_parameters()[1],
        "steps": contestant.step,
        "cpu_s": contestant.cpu_s,
        "best_val_loss": min(loss for _, _, loss in contestant.curve),
        "step_of_target": reached[0] if reached else None,
        "cpu_s_to_target": reached[1] if reached else None,
        "recipe": vars(contestant.recipe),
        "curve": contestant.curve,
    }


def _rows(summary: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = [
        "",
        "parameters",
        "active",
        "steps",
        "CPU s",
        "CPU ms/step",
        "best loss",
        "step at target",
        "CPU s to target",
    ]
    keys = ("parameters", "active_parameters", "steps", "cpu_s")
    tail = ("best_val_loss", "step_of_target", "cpu_s_to_target")
    rows = [
        [name, *(e[k] for k in keys), 1e3 * e["cpu_s"] / e["steps"], *(e[k] for k in tail)]
        for name, e in summary["contestants"].items()
    ]
    return columns, rows


def draw(summary: dict[str, Any], path: Path) -> Path:
    """Validation loss over CPU seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors, names = {"gpt": "#64748b", "k3": "#c2410c"}, {"gpt": "plain GPT", "k3": "K3 model"}
    for name, entry in summary["contestants"].items():
        _, seconds, losses = zip(*entry["curve"], strict=True)
        at = entry["cpu_s_to_target"]
        reached = f"{at:.0f} CPU s to {summary['target']}" if at else f"best {entry['best_val_loss']:.3f}"
        axes.plot(
            seconds, losses, color=colors[name], marker="o", markersize=3, label=f"{names[name]}: {reached}"
        )
    axes.axhline(summary["target"], color="#1f2430", linewidth=0.8, linestyle="--")
    axes.set_ylim(top=min(axes.get_ylim()[1], summary["target"] + 1.0))
    axes.set(xlabel="CPU seconds of training, one thread", ylabel="validation loss (nats a character)")
    axes.grid(axis="y", color="#e5e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


if __name__ == "__main__":
    command(run, "compare_char", CompareConfig)
