"""Symmetric memory: one interface, four memories."""

from __future__ import annotations

from moonep.symmetric.base import Region, SymmetricMemory
from moonep.symmetric.choose import MEMORIES, choose, group_size, open_memory
from moonep.symmetric.collective import CollectiveMemory
from moonep.symmetric.loopback import LoopbackGroup, LoopbackMemory
from moonep.symmetric.shm import SharedMemory

__all__ = [
    "MEMORIES",
    "CollectiveMemory",
    "LoopbackGroup",
    "LoopbackMemory",
    "Region",
    "SharedMemory",
    "SymmetricMemory",
    "choose",
    "group_size",
    "open_memory",
]
