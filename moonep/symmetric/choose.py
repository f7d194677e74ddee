"""Which symmetric memory a group uses, and why."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from moonep.errors import CapabilityError, ContractError
from moonep.symmetric.base import SymmetricMemory
from moonep.symmetric.collective import CollectiveMemory
from moonep.symmetric.loopback import LoopbackGroup, LoopbackMemory
from moonep.symmetric.shm import SHM_DIRECTORY, SharedMemory
from moonep.topology import Topology

MEMORIES = ("auto", "shm", "collective", "loopback", "cuda")


def group_size(group: Any) -> int:
    """Ranks of `group`: a LoopbackGroup, a process group, or None (the default group, or one process)."""
    if isinstance(group, LoopbackGroup):
        return group.num_ranks
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def choose(memory: str, group: Any, device: torch.device | str = "cpu") -> tuple[str, str]:
    """(memory, reason) for a group on a device. `memory` is "auto" or the name of one.

    Raises:
        ContractError: an unknown name, or loopback asked for between processes.
        CapabilityError: what was asked for cannot work here; says why and what can.
    """
    device = torch.device(device)
    if memory not in MEMORIES:
        raise ContractError(f"memory={memory!r} is unknown; choose one of {', '.join(MEMORIES)}")
    if isinstance(group, LoopbackGroup) or group_size(group) == 1:
        return "loopback", "all ranks are in this process"
    if memory == "loopback":
        raise ContractError(
            "memory='loopback' is for one process; the group has "
            f"{group_size(group)} processes: use memory='auto', or group=LoopbackGroup(R) in one of them"
        )
    obstacle = _obstacle("cuda" if device.type == "cuda" else "shm", group, device)
    if memory == "auto":
        direct = "cuda" if device.type == "cuda" else "shm"
        return ("collective", obstacle) if obstacle else (direct, "all ranks are on one host")
    if memory in ("shm", "cuda"):
        obstacle = _obstacle(memory, group, device)
        if obstacle:
            raise CapabilityError(f"memory={memory!r} cannot be used: {obstacle}; use memory='collective'")
    return memory, "asked for"


def _obstacle(memory: str, group: Any, device: torch.device) -> str:
    """What keeps this memory from working here; "" if nothing does."""
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if not Topology.detect().one_node(ranks):
        return "the group's ranks are on several hosts"
    if memory == "shm":
        if device.type != "cpu":
            return f"shared memory holds CPU tensors, the layer is on {device}"
        if sys.platform != "linux" or not os.path.isdir(SHM_DIRECTORY):
            return f"this system has no {SHM_DIRECTORY}"
        return ""
    return "" if device.type == "cuda" else f"the layer is on {device}"


_open: dict[tuple[Any, ...], SymmetricMemory] = {}


def open_memory(
    memory: str, group: Any, device: torch.device | str = "cpu", timeout_s: float = 60.0
) -> SymmetricMemory:
    """The memory of `group` on `device`, made at the first call and shared by all layers. Collective."""
    device = torch.device(device)
    name, reason = choose(memory, group, device)
    key = (name, _identity(group), device, timeout_s)
    found = _open.get(key)
    if found is None or (found.failure is not None and found.recovers):
        _open[key] = found = _make(name, group, device, timeout_s, reason)
    return found


def _identity(group: Any) -> Any:
    """What tells groups apart, without keeping a destroyed one alive by its address."""
    if isinstance(group, LoopbackGroup):
        return group.num_ranks
    if group_size(group) == 1:
        return 1
    group = group if group is not None else dist.group.WORLD
    return (group.group_name, id(dist.distributed_c10d._get_default_store()))


def _make(name: str, group: Any, device: torch.device, timeout_s: float, reason: str) -> SymmetricMemory:
    if name == "loopback":
        return LoopbackMemory(group_size(group), device, timeout_s, reason)
    if name == "shm":
        return SharedMemory(group, timeout_s=timeout_s, reason=reason)
    if name == "cuda":
        from moonep.symmetric.cuda import CudaMemory

        return CudaMemory(group, device=device, timeout_s=timeout_s, reason=reason)
    return CollectiveMemory(group, device=device, timeout_s=timeout_s, reason=reason)
