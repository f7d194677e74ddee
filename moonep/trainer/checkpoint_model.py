"""A whole model from a checkpoint, in one process: for generation, evaluation and export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from model.config import K3Config, ModelConfigError
from model.k3 import K3Model
from moonep.errors import CapabilityError, CheckpointError, ConfigError
from moonep.trainer.checkpoint import TrainingState, find_checkpoint, training_state
from moonep.trainer.checkpoint_files import TensorReader, read_manifest, verify_file
from moonep.trainer.tokens import Tokenizer, tokenizer_from_dict

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """What `load_model` returns.

    Attributes:
        model: all experts in this process, in eval mode.
        tokenizer: the one the model was trained with.
        state: step, configuration and data position of the run.
        path: the checkpoint's folder.
    """

    model: K3Model
    tokenizer: Tokenizer
    state: TrainingState
    path: Path


def load_model(
    path: str | Path | None, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LoadedModel:
    """Reads the weights of a checkpoint, whatever world size wrote it.

    Args:
        path: a `step_N` folder, or a run's folder (its newest checkpoint).
        device, dtype: where the model goes.

    Raises:
        ConfigError: no path.
        CheckpointError: no checkpoint there, or one that is truncated, altered, or not of this model code.
    """
    if path is None:
        raise ConfigError("checkpoint= is not set; give a run's folder or a step_N folder")
    folder = find_checkpoint(path, Path(path))
    assert folder is not None
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        if name.startswith(("weights_", "balancer_")):
            verify_file(folder, name, entry)
    reader = TensorReader(folder, manifest)
    state = training_state(manifest, reader)
    try:
        model = K3Model(K3Config.from_dict(state.model))
    except ModelConfigError as error:
        raise CheckpointError(f"{folder} is of another version of the model: {error}") from None
    _fill(model, reader, state, folder)
    return LoadedModel(model.to(device, dtype).eval(), tokenizer_from_dict(state.tokenizer), state, folder)


@torch.no_grad()
def _fill(model: K3Model, reader: TensorReader, state: TrainingState, folder: Path) -> None:
    for name, parameter in model.named_parameters():
        if name not in reader:
            raise CheckpointError(f"{folder} is of another version of the model: it has no parameter {name}")
        stored = reader.read(name)
        if stored.shape != parameter.shape:
            shapes = f"{tuple(stored.shape)} there, {tuple(parameter.shape)} here"
            raise CheckpointError(f"{folder} is of another version of the model: {name} is {shapes}")
        parameter.copy_(stored)
    for layer in model.moe_layers():
        if layer.layer in state.balancer:
            layer.router.balancer.bias.copy_(state.balancer[layer.layer])


def choose_device(name: str) -> torch.device:
    """`auto`: the first GPU, else the CPU. Raises CapabilityError for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CapabilityError(
            f"device={name}: this machine has no CUDA device that torch can use; use device=cpu"
        )
    try:
        return torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name} is unknown; allowed: auto, cpu, cuda, cuda:N") from None


def choose_dtype(name: str) -> torch.dtype:
    """fp32 or bf16. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"dtype={name} is unknown; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]
