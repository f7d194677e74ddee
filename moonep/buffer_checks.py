"""What a Buffer accepts: a check raises ContractError with the argument, what came, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from moonep.errors import ContractError
from moonep.planning import Geometry
from moonep.symmetric import Region, SymmetricMemory, group_size

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def problem(check: Callable[[], None]) -> ContractError | None:
    """What a check has to say. The caller tells the other ranks before it raises."""
    try:
        check()
    except ContractError as error:
        return error
    return None


def check_construction(
    num_ep_ranks: int,
    group: Any,
    hidden: int,
    policy: str,
    policies: Sequence[str],
    dtype: torch.dtype,
    timeout_s: float,
) -> None:
    if num_ep_ranks != group_size(group):
        raise ContractError(
            f"num_ep_ranks={num_ep_ranks}, but the group has {group_size(group)} ranks; pass that number"
        )
    if hidden < 1:
        raise ContractError(f"H={hidden} must be at least 1")
    if policy not in policies:
        raise ContractError(f"policy={policy!r} is unknown; choose one of {', '.join(policies)}")
    if dtype not in DTYPES:
        raise ContractError(f"dtype={dtype}; allowed: bfloat16, float16, float32, float64")
    if not timeout_s > 0:
        raise ContractError(f"timeout_s={timeout_s} must be positive")


def check_rows(name: str, rows: torch.Tensor, like: torch.Tensor, lengths: Sequence[int] | None) -> None:
    """Rows of the shard's width, dtype and device; as many as one of `lengths`, where given."""
    width = like.shape[1:]
    if rows.dim() != like.dim() or rows.shape[1:] != width or (lengths and len(rows) not in lengths):
        rule = " or ".join(map(str, sorted(set(lengths)))) if lengths else "s"
        raise ContractError(
            f"{name} has shape {list(rows.shape)}; expected {[rule, *width]}".replace("'", "")
        )
    if rows.device != like.device:
        raise ContractError(f"{name} is on {rows.device}, the Buffer on {like.device}; move one")


def check_hidden(name: str, rows: torch.Tensor, like: torch.Tensor, lengths: Sequence[int] | None) -> None:
    check_rows(name, rows, like, lengths)
    if rows.dtype != like.dtype:
        raise ContractError(
            f"{name} is {rows.dtype}, the Buffer holds {like.dtype}; cast, or pass dtype= to it"
        )


def check_entries(name: str, entries: torch.Tensor, num_tokens: int, top_k: int) -> None:
    if tuple(entries.shape) != (num_tokens, top_k):
        raise ContractError(f"{name} has shape {list(entries.shape)}; expected [{num_tokens}, {top_k}]")


def check_weights(weights: torch.Tensor, num_tokens: int, top_k: int) -> None:
    check_entries("route_weights_sk", weights, num_tokens, top_k)
    if not weights.dtype.is_floating_point:
        raise ContractError(f"route_weights_sk is {weights.dtype}; expected a float dtype")


def check_ids(ids: torch.Tensor, counts: torch.Tensor | None, num_tokens: int, geometry: Geometry) -> None:
    """Ids in range, and the histogram that came with them, if one did."""
    check_entries("topk_experts_sk", ids, num_tokens, geometry.top_k)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ContractError(f"topk_experts_sk is {ids.dtype}; expected int32 or int64")
    E = geometry.num_experts
    if num_tokens:
        low, high = (int(v) for v in ids.aminmax())
        if low < 0 or high >= E:
            raise ContractError(f"expert id {low if low < 0 else high} is outside 0 to {E - 1}")
    if counts is None:
        return
    if tuple(counts.shape) != (E,) or counts.dtype not in (torch.int32, torch.int64):
        raise ContractError(f"tokens_per_expert is {counts.dtype} {list(counts.shape)}; expected int32 [{E}]")
    found = torch.bincount(ids.reshape(-1), minlength=E)
    wrong = torch.nonzero(found != counts).view(-1)
    if len(wrong):
        e = int(wrong[0])
        raise ContractError(
            f"tokens_per_expert[{e}]={int(counts[e])}, but topk_experts_sk holds {int(found[e])} entries of "
            f"expert {e}; pass torch.bincount(topk_experts_sk.flatten(), minlength={E}), or None"
        )


def check_pool(
    name: str,
    local: Sequence[torch.Tensor],
    pool: torch.Tensor | Region,
    geometry: Geometry,
    memory: SymmetricMemory,
) -> None:
    """Expert tensors `[epn, ...]`, and the slots `[R, slots, ...]` (a Region of `[slots, ...]`) for them."""
    shape, dtype = (pool.shape, pool.dtype) if isinstance(pool, Region) else (pool.shape[1:], pool.dtype)
    epn, slots = geometry.experts_per_rank, geometry.slots
    for tensor in local:
        if tensor.dim() < 2 or len(tensor) != epn:
            raise ContractError(f"local {name} has shape {list(tensor.shape)}; expected [{epn}, ...]")
        if tensor.shape[1:] != shape[1:] or tensor.dtype != dtype:
            raise ContractError(
                f"local {name} is {tensor.dtype} {list(tensor.shape)}, its buffer has {dtype} {list(shape)} "
                "on a rank; an expert must have the same shape and dtype in both"
            )
    if len(shape) < 2 or shape[0] < slots:
        raise ContractError(
            f"the {name} buffer has {list(shape)[:1]} slots a rank; expected at least {slots}"
        )
    if isinstance(pool, torch.Tensor):
        _check_mapped(name, pool, geometry, memory)


def _check_mapped(name: str, pool: torch.Tensor, geometry: Geometry, memory: SymmetricMemory) -> None:
    """A tensor over all ranks' slots must be memory that the peers see."""
    if len(pool) != geometry.num_ranks:
        raise ContractError(
            f"the {name} buffer has shape {list(pool.shape)}; expected [{geometry.num_ranks}, ...]"
        )
    if not memory.addressable:
        raise ContractError(
            f"the {name} buffer is a tensor, but memory={memory.name!r} cannot reach the slots of peers; "
            "pass the view that ExpertPools gives"
        )
    if memory.name == "shm" and not _mapped_shared(pool.untyped_storage().data_ptr()):
        raise ContractError(
            f"the {name} buffer is private memory of this process, which peers do not see; pass the view "
            "that ExpertPools gives"
        )


def _mapped_shared(address: int) -> bool:
    """Whether the memory around an address is mapped shared (Linux: the `s` of /proc/self/maps)."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions = line.split(maxsplit=2)[:2]
            first, end = (int(word, 16) for word in span.split("-"))
            if first <= address < end:
                return permissions[3] == "s"
    return False


def check_pairs(pairs: Mapping[str, tuple[Any, Any]]) -> None:
    """Both of a pair, or neither."""
    for name, (local, pool) in pairs.items():
        if (local is None) != (pool is None):
            missing = "buffer" if pool is None else "local tensor"
            raise ContractError(f"{name}: the {missing} is missing; pass both or neither")
