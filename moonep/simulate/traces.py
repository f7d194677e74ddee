"""Recorded routing: our npz recording, Megatron-style JSONL, or a bare array of counts; read, checked,
written.

The recording of `routing.record=true` is a folder of `part_NNNNN.npz` (or one such file), each with

    tokens_per_expert  int32 [steps, layers, ranks, experts]   tokens of a source rank for an expert
    step, layer        int64 [steps], [layers]                 their numbers in the run
    top_k, capacity    int64 scalars
    ids                int16/int32 [steps, layers, ranks, capacity, top_k], -1 where there is no token
    (optional)
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moonep.errors import DataError
from moonep.simulate.sampling import stream


@dataclass(frozen=True)
class Trace:
    """Recorded counts, and the choices of each token where they were kept."""

    tokens_per_expert: np.ndarray
    top_k: int
    capacity: int
    step: np.ndarray
    layer: np.ndarray
    ids: np.ndarray | None = None
    source: str = ""

    @property
    def num_steps(self) -> int:
        return self.tokens_per_expert.shape[0]

    @property
    def num_layers(self) -> int:
        return self.tokens_per_expert.shape[1]

    @property
    def num_ranks(self) -> int:
        return self.tokens_per_expert.shape[2]

    @property
    def num_experts(self) -> int:
        return self.tokens_per_expert.shape[3]

    def require(
        self, *, num_ranks: int | None = None, num_experts: int | None = None, top_k: int | None = None
    ) -> None:
        """Raises DataError, naming the key to change, if the trace has another geometry than asked for."""
        wanted = {"geometry.R": (num_ranks, self.num_ranks), "geometry.E": (num_experts, self.num_experts)}
        wanted["geometry.K"] = (top_k, self.top_k)
        for key, (want, have) in wanted.items():
            if want is not None and want != have:
                raise DataError(f"trace {self.source}: it has {have} where {key}={want}; set {key}={have}")


def make_trace(
    counts: np.ndarray,
    *,
    top_k: int | None = None,
    ids: np.ndarray | None = None,
    source: str = "",
    **extra: Any,
) -> Trace:
    """Checks an array of counts and fills in what it implies (top_k from the token counts if they are known).

    Raises:
        DataError: not four-dimensional, not integer, negative, or empty.
    """
    counts = np.asarray(counts)
    if counts.ndim != 4:
        raise DataError(
            f"{source}: counts have shape {list(counts.shape)}; expected [steps, layers, ranks, experts]"
        )
    if 0 in counts.shape:
        raise DataError(f"{source}: counts have shape {list(counts.shape)}: nothing was recorded")
    if not np.issubdtype(counts.dtype, np.integer):
        if not np.array_equal(counts, np.rint(counts)):
            raise DataError(f"{source}: counts are {counts.dtype} with fractions; expected whole tokens")
        counts = counts.astype(np.int64)
    if counts.min() < 0:
        where = [int(i) for i in np.argwhere(counts < 0)[0]]
        raise DataError(
            f"{source}: negative count {counts[tuple(where)]} at [step, layer, rank, expert] = {where}"
        )
    if counts.shape[3] % counts.shape[2]:
        raise DataError(
            f"{source}: {counts.shape[3]} experts over {counts.shape[2]} ranks: the experts must be a "
            f"multiple of the ranks"
        )
    rows = counts.sum(-1)
    top_k = int(top_k) if top_k is not None else 1
    if (rows % top_k).any():
        raise DataError(
            f"{source}: a rank has {int(rows[rows % top_k > 0][0])} choices, not a multiple of top_k={top_k}"
        )
    tokens = int(rows.max()) // top_k
    step = np.asarray(extra.get("step", np.arange(counts.shape[0])))
    layer = np.asarray(extra.get("layer", np.arange(counts.shape[1])))
    capacity = int(extra.get("capacity") or tokens)
    if capacity < tokens:
        raise DataError(f"{source}: capacity={capacity} but a rank has {tokens} tokens")
    return Trace(counts.astype(np.int64), top_k, capacity, step, layer, ids, source)


def save_trace(path: str | Path, trace: Trace) -> Path:
    """Writes one npz, complete or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "tokens_per_expert": trace.tokens_per_expert.astype(np.int32),
        "step": trace.step,
        "layer": trace.layer,
        "top_k": np.int64(trace.top_k),
        "capacity": np.int64(trace.capacity),
    }
    if trace.ids is not None:
        arrays["ids"] = trace.ids.astype(np.int16 if trace.num_experts <= 32767 else np.int32)
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return path


@dataclass
class TraceWriter:
    """Collects steps and writes a part every `every` of them; `close` writes the rest. For the rank that
    records."""

    directory: str | Path
    top_k: int
    capacity: int
    layer: list[int]
    every: int = 64
    _counts: list[np.ndarray] = field(default_factory=list)
    _ids: list[np.ndarray] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)

    def add(self, step: int, tokens_per_expert: np.ndarray, ids: np.ndarray | None = None) -> None:
        """One step: counts [layers, ranks, experts], and optionally ids [layers, ranks, capacity, top_k]."""
        self._steps.append(step)
        self._counts.append(np.asarray(tokens_per_expert, dtype=np.int64))
        if ids is not None:
            self._ids.append(np.asarray(ids))
        if len(self._steps) >= self.every:
            self.close()

    def close(self) -> None:
        """Writes what has been collected since the last part."""
        if not self._steps:
            return
        ids = np.stack(self._ids) if len(self._ids) == len(self._steps) else None
        trace = Trace(
            np.stack(self._counts),
            self.top_k,
            self.capacity,
            np.array(self._steps),
            np.array(self.layer),
            ids,
        )
        save_trace(Path(self.directory) / f"part_{self._steps[0]:08d}.npz", trace)
        self._counts, self._ids, self._steps = [], [], []


def load_trace(path: str | Path, *, num_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Reads a recording: a folder of parts, an .npz (ours or a bare array of counts), an .npy or a .jsonl
    file.

    Args:
        num_experts: for JSONL, which does not state it (default: the largest id + 1, rounded up to the
        ranks). top_k: for a bare array of counts, which does not state it.

    Raises:
        DataError: missing, truncated, malformed (JSONL: with its line number) or inconsistent.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"trace {path}: no such file or folder")
    if path.is_dir():
        parts = sorted(path.glob("*.npz"))
        if not parts:
            raise DataError(
                f"trace {path}: the folder holds no .npz part; record one with routing.record=true"
            )
        return _concatenate([_load_npz(part, top_k) for part in parts], str(path))
    if path.suffix == ".npy":
        return make_trace(_read_array(path), top_k=top_k, source=str(path))
    if path.suffix == ".npz":
        return _load_npz(path, top_k)
    return load_jsonl(path, num_experts=num_experts)


def _read_array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"trace {path}: cannot be read ({str(error).splitlines()[0]}); is the file complete?"
        ) from None


def _load_npz(path: Path, top_k: int | None) -> Trace:
    archive = _read_array(path)
    try:
        arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"trace {path}: truncated or damaged ({type(error).__name__})") from None
    counts = arrays.get("tokens_per_expert", arrays.get("counts"))
    if counts is None and len(arrays) == 1:
        counts = next(iter(arrays.values()))
    if counts is None:
        raise DataError(
            f"trace {path}: has arrays {', '.join(sorted(arrays))} but no tokens_per_expert [steps, layers, "
            f"ranks, experts]"
        )
    known = {key: arrays[key] for key in ("step", "layer") if key in arrays}
    if "capacity" in arrays:
        known["capacity"] = int(arrays["capacity"])
    own_k = int(arrays["top_k"]) if "top_k" in arrays else top_k
    return make_trace(counts, top_k=own_k, ids=arrays.get("ids"), source=str(path), **known)


def _concatenate(parts: list[Trace], source: str) -> Trace:
    first = parts[0]
    for part in parts[1:]:
        if part.tokens_per_expert.shape[1:] != first.tokens_per_expert.shape[1:] or part.top_k != first.top_k:
            raise DataError(
                f"trace {part.source}: another geometry than {first.source}; a folder holds one run"
            )
    all_ids = [p.ids for p in parts if p.ids is not None]
    ids = np.concatenate(all_ids) if len(all_ids) == len(parts) else None
    counts = np.concatenate([p.tokens_per_expert for p in parts])
    step = np.concatenate([p.step for p in parts])
    return Trace(counts, first.top_k, max(p.capacity for p in parts), step, first.layer, ids, source)


def _parse_line(text: str, number: int, source: str) -> tuple[int, int, int, int, np.ndarray]:
    """(step, layer, rank, topk, top_indices [tokens, topk]) of one JSONL record."""
    where = f"trace {source}, line {number}"
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not complete JSON ({error.msg} at column {error.colno}); is the file truncated?"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object, got {type(record).__name__}")
    missing = [key for key in ("step", "layer", "rank", "topk", "top_indices") if key not in record]
    if missing:
        raise DataError(f"{where}: no {missing[0]!r}; each line has step, layer, rank, topk, top_indices")
    numbers = []
    for key in ("step", "layer", "rank", "topk"):
        value = record[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < (1 if key == "topk" else 0):
            raise DataError(f"{where}: {key}={value!r} must be a whole number, not negative")
        numbers.append(value)
    step, layer, rank, topk = numbers
    try:
        ids = np.asarray(record["top_indices"], dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        raise DataError(
            f"{where}: top_indices must be a list of equally long lists of whole numbers"
        ) from None
    ids = ids.reshape(0, topk) if ids.size == 0 else ids
    ids = ids.reshape(-1, topk) if ids.ndim == 1 and ids.size % topk == 0 else ids
    if ids.ndim != 2 or ids.shape[1] != topk:
        raise DataError(
            f"{where}: top_indices has shape {list(ids.shape)}; topk={topk} asks for [tokens, {topk}]"
        )
    if ids.size and ids.min() < 0:
        raise DataError(f"{where}: negative expert id {int(ids.min())}")
    return step, layer, rank, topk, ids


def load_jsonl(path: str | Path, *, num_experts: int | None = None) -> Trace:
    """Megatron's router trace: one object a line, `step, layer, rank, topk, top_indices [tokens][topk]`."""
    path = Path(path)
    records: dict[tuple[int, int, int], np.ndarray] = {}
    lines: dict[tuple[int, int, int], int] = {}
    topk = None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            step, layer, rank, k, ids = _parse_line(text, number, str(path))
            if topk is not None and k != topk:
                raise DataError(f"trace {path}, line {number}: topk={k}, but earlier lines have topk={topk}")
            topk = k
            key = (step, layer, rank)
            if key in records:
                raise DataError(
                    f"trace {path}, line {number}: step {step}, layer {layer}, rank {rank} already came in "
                    f"line {lines[key]}"
                )
            if num_experts is not None and ids.size and ids.max() >= num_experts:
                raise DataError(
                    f"trace {path}, line {number}: expert {int(ids.max())} is not below "
                    f"geometry.E={num_experts}"
                )
            records[key], lines[key] = ids, number
    if not records or topk is None:
        raise DataError(f"trace {path}: holds no record")
    return _assemble(records, topk, num_experts, str(path))


def _assemble(
    records: dict[tuple[int, int, int], np.ndarray], topk: int, num_experts: int | None, source: str
) -> Trace:
    """Records of (step, layer, rank) to dense arrays; every combination must be there."""
    steps, layers, ranks = (sorted({key[axis] for key in records}) for axis in range(3))
    absent = next(((s, m, r) for s in steps for m in layers for r in ranks if (s, m, r) not in records), None)
    if absent:
        raise DataError(
            f"trace {source}: step {absent[0]}, layer {absent[1]} lacks rank {absent[2]} that others have; "
            "is the file truncated?"
        )
    if num_experts is None:
        highest = max(int(ids.max()) + 1 if ids.size else 1 for ids in records.values())
        num_experts = -(-highest // len(ranks)) * len(ranks)
    capacity = max(ids.shape[0] for ids in records.values())
    shape = (len(steps), len(layers), len(ranks))
    counts = np.zeros((*shape, num_experts), dtype=np.int64)
    all_ids = np.full((*shape, capacity, topk), -1, dtype=np.int32)
    for a, step in enumerate(steps):
        for b, layer in enumerate(layers):
            for c, rank in enumerate(ranks):
                ids = records[step, layer, rank]
                counts[a, b, c] = np.bincount(ids.ravel(), minlength=num_experts)
                all_ids[a, b, c, : ids.shape[0]] = ids
    return make_trace(
        counts,
        top_k=topk,
        ids=all_ids,
        source=source,
        step=np.array(steps),
        layer=np.array(layers),
        capacity=capacity,
    )


@dataclass(frozen=True)
class TraceReplay:
    """A trace with the interface of a bound workload, so that `routing.force=PATH` replays it. Steps wrap
    around."""

    trace: Trace
    seed: int = 0

    def step_counts(self, step: int, layer: int, tokens: int | None = None) -> np.ndarray:
        """Recorded counts [R, E] of one layer of one step."""
        return self.trace.tokens_per_expert[step % self.trace.num_steps, layer % self.trace.num_layers]

    def token_choices(self, step: int, layer: int, rank: int, num_tokens: int) -> np.ndarray:
        """int32 [num_tokens, K]: the recorded choices, repeated or cut to num_tokens; without recorded ids,
        choices with the recorded counts dealt to tokens at random."""
        at = (step % self.trace.num_steps, layer % self.trace.num_layers, rank % self.trace.num_ranks)
        if self.trace.ids is not None:
            ids = self.trace.ids[at]
            ids = ids[ids[:, 0] >= 0]
        else:
            ids = deal(
                self.trace.tokens_per_expert[at],
                self.trace.top_k,
                stream(self.seed, "tokens", step, layer, rank),
            )
        if ids.shape[0] == 0:
            raise DataError(
                f"trace {self.trace.source}: step {at[0]}, layer {at[1]}, rank {at[2]} has no token to replay"
            )
        return np.resize(ids, (num_tokens, ids.shape[1])).astype(np.int32)


def deal(counts_E: np.ndarray, top_k: int, generator: np.random.Generator) -> np.ndarray:
    """Ids [tokens, top_k] with exactly these counts and no expert twice in a token, tokens in random order.

    Experts in a random order, each one's choices on consecutive tokens modulo their number: a run no longer
    than the number of tokens never meets itself.
    """
    tokens = int(counts_E.sum()) // top_k
    if counts_E.max(initial=0) > tokens:
        raise DataError(
            f"an expert has {int(counts_E.max())} choices of {tokens} tokens: it would come twice in a token"
        )
    order = generator.permutation(counts_E.size)
    flat = np.repeat(order, counts_E[order])
    return generator.permutation(flat.reshape(top_k, tokens).T).astype(np.int32)
