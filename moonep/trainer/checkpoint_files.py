"""The files of a checkpoint: safetensors shards under a manifest that knows their checksums and its own.

    step_N/manifest.json                        what is in the folder; written last
    step_N/weights_RRRR_00000.safetensors       parameters, fp32, by their name in the model
    step_N/optimizer_RRRR_00000.safetensors     optimizer state, as NAME.exp_avg, NAME.exp_avg_sq
    step_N/balancer_00000.safetensors           routing biases, as layer_N
    step_N/rng_RRRR.json                        random states of rank RRRR

RRRR is the rank that wrote a file and means nothing to a reader: stacked expert weights are rows of global
expert ids, and the manifest says which rows a file holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moonep.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "moonep-checkpoint-1"
SHARD_BYTES = 1 << 30


def write_synced(path: Path, content: bytes) -> dict[str, Any]:
    """Writes and fsyncs; returns the size and checksum of what was meant to be written."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def sync_folder(path: Path) -> None:
    """Makes renames and new names inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Collects tensors of one kind from one rank; writes a safetensors file whenever `SHARD_BYTES` are full.

    A failing disk is reported by `close` only: tensors come from collective calls, and a rank that stopped
        early
    would leave the others waiting.
    """

    def __init__(self, folder: Path, prefix: str):
        self._folder, self._prefix = folder, prefix
        self._tensors: dict[str, torch.Tensor] = {}
        self._rows: dict[str, int] = {}
        self._held = 0
        self._failure: OSError | None = None
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: torch.Tensor, first_row: int = 0) -> None:
        """`first_row`: global id of the first expert of a stack; 0 for a whole tensor."""
        kept = tensor.detach().to("cpu").contiguous()
        if self._tensors and self._held + kept.nbytes > SHARD_BYTES:
            self._flush()
        self._tensors[name] = kept.clone() if kept.data_ptr() == tensor.data_ptr() else kept
        self._rows[name] = first_row
        self._held += kept.nbytes

    def close(self) -> None:
        """Writes what is left. Raises the first OSError of any write."""
        self._flush()
        if self._failure is not None:
            raise self._failure

    def _flush(self) -> None:
        from safetensors.torch import save

        file = f"{self._prefix}_{len(self.files):05d}.safetensors"
        try:
            if self._tensors and self._failure is None:
                entry = write_synced(self._folder / file, save(self._tensors, metadata={"format": "pt"}))
                self.files[file] = {**entry, "tensors": dict(self._rows)}
        except OSError as error:
            self._failure = error
        self._tensors, self._rows, self._held = {}, {}, 0


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Adds the manifest's own checksum and writes it."""
    body = {"format": FORMAT, **manifest}
    write_synced(
        folder / MANIFEST, json.dumps({**body, "checksum": _checksum(body)}, indent=1, default=str).encode()
    )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Raises CheckpointError when missing, altered, or of another format."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {folder} is not a complete checkpoint") from None
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is truncated or altered ({error}); use another checkpoint") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}; this version reads {FORMAT!r}")
    if checksum != _checksum(manifest):
        raise CheckpointError(
            f"{path} was altered: its content does not match its checksum; use another checkpoint"
        )
    return manifest


def _checksum(body: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(body, default=str))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def verify_file(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Compares one file with its manifest entry. Raises CheckpointError naming the file and what differs."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; use another checkpoint")
    size = path.stat().st_size
    if size != entry["bytes"]:
        what = "truncated" if size < entry["bytes"] else "altered"
        raise CheckpointError(
            f"{path} is {what}: {size} bytes, the manifest says {entry['bytes']}; use another checkpoint"
        )
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(
            f"{path} was altered: sha256 {digest.hexdigest()[:12]}, the manifest says {entry['sha256'][:12]};"
            " use another checkpoint"
        )


class TensorReader:
    """Reads tensors of a verified checkpoint, whole or by rows, wherever they lie."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]):
        self._folder = folder
        self._places: dict[str, list[tuple[int, str]]] = {}
        for file, entry in manifest["files"].items():
            for name, first in entry.get("tensors", {}).items():
                self._places.setdefault(name, []).append((first, file))
        for places in self._places.values():
            places.sort()

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor; stacked experts in order of their global ids."""
        from safetensors import safe_open

        parts = []
        for _, file in self._places[name]:
            with safe_open(self._folder / file, framework="pt") as opened:
                parts.append(opened.get_tensor(name))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Rows `first .. first + count` of a stack, from every file that holds some of them."""
        from safetensors import safe_open

        parts = []
        for begin, file in self._places[name]:
            with safe_open(self._folder / file, framework="pt") as opened:
                stack = opened.get_slice(name)
                low = max(first - begin, 0)
                high = min(first + count - begin, stack.get_shape()[0])
                if low < high:
                    parts.append(stack[low:high])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
