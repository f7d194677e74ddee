"""The exchange of rows, weights and gradients between ranks."""

from __future__ import annotations

from moonep.exchange.base import Exchange
from moonep.exchange.collective import CollectiveExchange
from moonep.exchange.stacked import StackedExchange
from moonep.planning import Geometry
from moonep.symmetric import CollectiveMemory, SymmetricMemory

__all__ = ["CollectiveExchange", "Exchange", "StackedExchange", "make_exchange"]


def make_exchange(memory: SymmetricMemory, geometry: Geometry) -> Exchange:
    """The exchange that fits a memory."""
    if isinstance(memory, CollectiveMemory):
        return CollectiveExchange(memory, geometry)
    return StackedExchange(memory, geometry)
