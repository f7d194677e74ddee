"""The exchange of rows, weights and gradients between ranks. Triton is imported only where a GPU needs it."""

from __future__ import annotations

from moonep.exchange.base import Exchange
from moonep.exchange.collective import CollectiveExchange
from moonep.exchange.device import DeviceExchange
from moonep.exchange.stacked import StackedExchange
from moonep.planning import Geometry
from moonep.symmetric import CollectiveMemory, SymmetricMemory

__all__ = ["CollectiveExchange", "DeviceExchange", "Exchange", "StackedExchange", "make_exchange"]


def make_exchange(memory: SymmetricMemory, geometry: Geometry) -> Exchange:
    """The exchange that fits a memory."""
    if isinstance(memory, CollectiveMemory):
        return CollectiveExchange(memory, geometry)
    if memory.device.type == "cuda":
        return DeviceExchange(memory, geometry)
    return StackedExchange(memory, geometry)
