"""Checkpoints that load at any world size, expert-parallel size and ZeRO stage.

Weights and optimizer state are stored by parameter name, experts by global id, in fp32; nothing in them
speaks of the ranks that wrote them. A checkpoint is written under a temporary name, fsynced and renamed, so a
folder called `step_N` is complete. On load everything is verified against the manifest before anything is
changed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from moonep.errors import CheckpointError
from moonep.trainer import random_state
from moonep.trainer.checkpoint_files import (
    MANIFEST,
    ShardWriter,
    TensorReader,
    read_manifest,
    sync_folder,
    verify_file,
    write_manifest,
    write_synced,
)

T = TypeVar("T")
State = Mapping[str, torch.Tensor]


class CheckpointEngine(Protocol):
    """What a checkpoint needs of the training engine; see `moonep.trainer.engine.Engine`."""

    rank: int
    world_size: int
    ep_rank: int
    ep_size: int
    optimizer_steps: int

    def parameter_shapes(self) -> Mapping[str, tuple[tuple[int, ...], bool]]: ...

    def parameter_states(self) -> Iterator[tuple[str, State, bool]]: ...

    def load_parameter_states(self, lookup: Callable[[str], State]) -> None: ...


@dataclass
class TrainingState:
    """What a run continues from, besides weights and optimizer state.

    Attributes:
        step: optimizer steps done.
        tokens: tokens seen.
        model: the model's configuration, plain values; a checkpoint loads only into an equal one.
        config: the whole run's configuration, plain values.
        data: `BatchStream.state_dict()`.
        tokenizer: `Tokenizer.to_dict()`, so that a checkpoint can speak without its corpus.
        balancer: layer -> routing bias `[E]` fp32.
        extra: anything else in plain values (the wandb run, the best validation loss).
    """

    step: int
    tokens: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    balancer: dict[int, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


PLAIN_FIELDS = ("step", "tokens", "model", "config", "data", "tokenizer", "extra")


def save_checkpoint(
    engine: CheckpointEngine, folder: Path, state: TrainingState, *, keep_last: int = 0
) -> Path:
    """Writes `folder/step_N`. Collective; every rank must see the same folder.

    Args:
        engine: the training engine, between two steps.
        folder: the run's `checkpoints` folder; made if missing.
        state: rank 0's is stored.
        keep_last: how many checkpoints to keep, the newest ones; 0 keeps all.

    Returns:
        the checkpoint's folder, complete and durable.

    Raises:
        CheckpointError: on every rank, when any rank could not write; earlier checkpoints are untouched.
    """
    final = folder / f"step_{state.step}"
    partial = folder / f".step_{state.step}.partial"
    try:
        _together(engine, lambda: _prepare(partial) if engine.rank == 0 else None)
        own = _together(engine, lambda: _write_rank(engine, partial, state))
        entries = _gather(engine, own)
        _together(engine, lambda: _publish(engine, partial, final, state, entries, keep_last))
    except BaseException:
        if engine.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_checkpoint(
    engine: CheckpointEngine, path: Path, *, model: Mapping[str, Any] | None = None
) -> TrainingState:
    """Loads a checkpoint into a freshly built engine of any world size. Collective.

    Weights, optimizer state, `engine.optimizer_steps` and this rank's random state are restored; what the
    caller owns (data position, balancer biases) is returned.

    Args:
        engine: the training engine.
        path: a `step_N` folder.
        model: this run's model configuration, to compare; None leaves the comparison to names and shapes.

    Raises:
        CheckpointError: on every rank; truncated, altered, or of another model. Nothing has been changed
            then.
    """
    manifest = _together(engine, lambda: _verified_manifest(engine, path, model))
    reader = TensorReader(path, manifest)
    engine.optimizer_steps = manifest["optimizer_steps"]
    engine.load_parameter_states(lambda name: _rank_tensors(engine, reader, manifest, name))
    rng_file = path / f"rng_{engine.rank:04d}.json"
    if rng_file.name in manifest["files"]:
        random_state.restore(json.loads(rng_file.read_text()))
    return training_state(manifest, reader)


def find_checkpoint(resume: bool | str | Path, folder: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for.

    Args:
        resume: False: none. True: the newest of `folder`, None when it has none. A path: a `step_N` folder, a
            `checkpoints` folder, or a run's folder.
        folder: the run's `checkpoints` folder.

    Raises:
        CheckpointError: a path without a checkpoint.
    """
    if resume is False or resume is True:
        return newest_checkpoint(folder) if resume else None
    path = Path(resume).expanduser()
    if (path / MANIFEST).is_file():
        return path
    found = newest_checkpoint(path) or newest_checkpoint(path / "checkpoints")
    if found is None:
        what = "holds no checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}; give a run's or a step_N folder with a {MANIFEST}")
    return found


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every published checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in folder.iterdir())
    return sorted((int(match.group(1)), path) for match, path in matches if match)


def newest_checkpoint(folder: Path) -> Path | None:
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


def training_state(manifest: Mapping[str, Any], reader: TensorReader) -> TrainingState:
    """The caller's part of a verified checkpoint."""
    balancer = {layer: reader.read(f"layer_{layer}") for layer in manifest["balancer_layers"]}
    return TrainingState(**{name: manifest[name] for name in PLAIN_FIELDS}, balancer=balancer)


def _together(engine: CheckpointEngine, work: Callable[[], T]) -> T:
    """Runs one phase on every rank; returns this rank's result, or raises everywhere if it failed once."""
    result, failure = None, None
    try:
        result = work()
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = f"cannot write the checkpoint: {error}"
    for rank, failed in enumerate(_gather(engine, failure)):
        if failed is not None:
            raise CheckpointError(f"{failed} (rank {rank})" if engine.world_size > 1 else failed)
    return result  # type: ignore[return-value]


def _gather(engine: CheckpointEngine, value: T) -> list[T]:
    """Everyone's value, by rank."""
    values = [value] * engine.world_size
    if engine.world_size > 1:
        dist.all_gather_object(values, value)
    return values


def _prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    partial.mkdir(parents=True)


def _write_rank(engine: CheckpointEngine, partial: Path, state: TrainingState) -> dict[str, Any]:
    """Writes this rank's files: dense parameters rank 0, experts the lowest rank that has them."""
    weights = ShardWriter(partial, f"weights_{engine.rank:04d}")
    optimizer = ShardWriter(partial, f"optimizer_{engine.rank:04d}")
    owns_experts = engine.rank == _first_rank_with_experts(engine)
    parameters: dict[str, Any] = {}
    for name, tensors, expert in engine.parameter_states():
        shape = list(tensors["param"].shape)
        first = shape[0] * engine.ep_rank if expert else 0
        if expert:
            shape[0] *= engine.ep_size
        moments = [key for key in tensors if key != "param"]
        parameters[name] = {"shape": shape, "expert": expert, "moments": moments}
        if owns_experts if expert else engine.rank == 0:
            weights.add(name, tensors["param"], first)
            for key in moments:
                optimizer.add(f"{name}.{key}", tensors[key], first)
    weights.close()
    optimizer.close()
    rng = f"rng_{engine.rank:04d}.json"
    files = {**weights.files, **optimizer.files}
    files[rng] = write_synced(partial / rng, json.dumps(random_state.capture()).encode())
    if engine.rank == 0 and state.balancer:
        files.update(_write_balancer(partial, state.balancer))
    return {"files": files, "parameters": parameters if engine.rank == 0 else {}}


def _first_rank_with_experts(engine: CheckpointEngine) -> int:
    return _gather(engine, engine.ep_rank).index(engine.ep_rank)


def _write_balancer(partial: Path, balancer: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    writer = ShardWriter(partial, "balancer")
    for layer, bias_E in sorted(balancer.items()):
        writer.add(f"layer_{layer}", bias_E)
    writer.close()
    return writer.files


def _publish(
    engine: CheckpointEngine,
    partial: Path,
    final: Path,
    state: TrainingState,
    entries: list[Any],
    keep_last: int,
) -> None:
    """Rank 0: manifest, rename, and only then the removal of old checkpoints."""
    if engine.rank != 0:
        return
    files = {name: entry for one in entries for name, entry in one["files"].items()}
    for name, entry in files.items():
        written = partial / name
        if not written.is_file() or written.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{written} is not there for rank 0; run.dir must lie on a file system all ranks share"
            )
    manifest = {name: getattr(state, name) for name in PLAIN_FIELDS}
    write_manifest(
        partial,
        {
            **manifest,
            "optimizer_steps": engine.optimizer_steps,
            "world_size": engine.world_size,
            "ep_size": engine.ep_size,
            "balancer_layers": sorted(state.balancer),
            "parameters": entries[0]["parameters"],
            "files": files,
        },
    )
    sync_folder(partial)
    _replace_folder(partial, final)
    if keep_last > 0:
        for _, old in list_checkpoints(final.parent)[:-keep_last]:
            if old != final:
                _remove_folder(old)


def _replace_folder(new: Path, final: Path) -> None:
    """Renames `new` to `final`; an older folder of that name goes only after the new one is in place."""
    aside = final.with_name(f".{final.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if final.exists():
        final.rename(aside)
    new.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_folder(folder: Path) -> None:
    """Hides the folder first: a removal that is interrupted never leaves half a checkpoint under its name."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _verified_manifest(
    engine: CheckpointEngine, path: Path, model: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Reads the manifest, compares the model, and checks this rank's share of the files."""
    manifest = read_manifest(path)
    if model is not None:
        compare_model(path, manifest["model"], model)
    _compare_parameters(engine, path, manifest["parameters"])
    for i, (name, entry) in enumerate(sorted(manifest["files"].items())):
        if i % engine.world_size == engine.rank:
            verify_file(path, name, entry)
    return manifest


def compare_model(path: Path, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming the keys in which two model configurations differ."""
    plain = json.loads(json.dumps(own, default=str))
    different = [key for key in sorted({*stored, *plain}) if stored.get(key) != plain.get(key)]
    if different:
        listing = ", ".join(f"{key} {stored.get(key)} there, {plain.get(key)} here" for key in different[:4])
        more = f" and {len(different) - 4} more" if len(different) > 4 else ""
        raise CheckpointError(
            f"{path} is of another model: {listing}{more}; give the same model= or another checkpoint"
        )


def _compare_parameters(engine: CheckpointEngine, path: Path, stored: Mapping[str, Any]) -> None:
    own = engine.parameter_shapes()
    for name in stored.keys() ^ own.keys():
        where = "only in the checkpoint" if name in stored else "not in the checkpoint"
        raise CheckpointError(f"{path} is of another model: parameter {name} is {where}")
    for name, (shape, expert) in own.items():
        full = [shape[0] * engine.ep_size, *shape[1:]] if expert else list(shape)
        if full != stored[name]["shape"]:
            raise CheckpointError(
                f"{path} is of another model: parameter {name} is {stored[name]['shape']} there, {full} here"
            )


def _rank_tensors(
    engine: CheckpointEngine, reader: TensorReader, manifest: Mapping[str, Any], name: str
) -> State:
    entry = manifest["parameters"][name]
    stored = {"param": name, **{key: f"{name}.{key}" for key in entry["moments"]}}
    if not entry["expert"]:
        return {key: reader.read(full) for key, full in stored.items()}
    count = entry["shape"][0] // engine.ep_size
    return {key: reader.read_rows(full, count * engine.ep_rank, count) for key, full in stored.items()}
