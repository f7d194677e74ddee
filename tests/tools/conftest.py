"""A checkpoint of a small K3 model, as a training run would leave it, for the tools that read one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model import K3Config, K3Model
from moonep.trainer.checkpoint import TrainingState, save_checkpoint
from moonep.trainer.data import DataConfig, build_corpus

PARAGRAPH = "def double(x):\n    return x + x\n\n\ndef half(x):\n    return x / 2\n\n\n"


class WholeModel:
    """The checkpoint's view of a model in one process, with moments that are all zero."""

    rank, world_size, ep_rank, ep_size, optimizer_steps = 0, 1, 0, 1, 3

    def __init__(self, model: K3Model):
        self.model = model

    def parameter_shapes(self):
        return {n: (tuple(p.shape), ".experts." in n) for n, p in self.model.named_parameters()}

    def parameter_states(self):
        for name, parameter in self.model.named_parameters():
            zeros = torch.zeros_like(parameter)
            yield name, {"param": parameter, "exp_avg": zeros, "exp_avg_sq": zeros}, ".experts." in name


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(8):
        (folder / f"{i}.py").write_text(f"# file {i}\n" + PARAGRAPH * (i + 2))
    return folder


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, corpus_folder) -> Path:
    """A run's folder with one checkpoint, `step_3`, of random weights and random routing biases."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    data = DataConfig(name="text", path=str(corpus_folder), validation_fraction=0.4)
    corpus = build_corpus(data)
    config = K3Config.preset("tiny", vocab_size=corpus.vocab_size)
    model = K3Model(config)
    biases = {moe.layer: torch.randn(config.num_experts) for moe in model.moe_layers()}
    state = TrainingState(
        3,
        model=config.to_dict(),
        config={"data": dict(vars(data)), "train": {"context": 64}},
        tokenizer=corpus.tokenizer.to_dict(),
        balancer=biases,
    )
    save_checkpoint(WholeModel(model), folder / "checkpoints", state)
    for moe in model.moe_layers():
        moe.router.balancer.bias.copy_(biases[moe.layer])
    torch.save(model.state_dict(), folder / "expected.pt")
    return folder
