"""Ranks meet through the key-value store of torch.distributed before they share anything: a bounded wait."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from moonep.errors import PeerTimeout

_serials: dict[tuple[int, ...], int] = {}


def group_ranks(group: Any) -> list[int]:
    """Global ranks of a process group (None: the default one)."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def meet(group: Any, timeout_s: float, phase: str = "start-up") -> dist.PrefixStore:
    """A store of this group alone, when all its ranks have come. Collective; the same order on every rank.

    Raises:
        PeerTimeout: names the ranks that did not come within `timeout_s`.
    """
    ranks = group_ranks(group)
    key = (id(dist.distributed_c10d._get_default_store()), *ranks)
    # Meetings of one group happen in the same order on every rank; each has keys of its own.
    _serials[key] = serial = _serials.get(key, -1) + 1
    name = f"moonep/{'-'.join(map(str, ranks))}/{serial}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    store.set(f"here{dist.get_rank(group)}", phase)
    wait_for(store, {rank: f"here{rank}" for rank in range(len(ranks))}, timeout_s, phase)
    return store


def wait_for(store: dist.Store, keys: dict[int, str], timeout_s: float, phase: str) -> list[str]:
    """The values under `rank -> key`, in this order, when all are there.

    Raises:
        PeerTimeout: names the ranks whose key did not come.
    """
    missing, deadline = dict(keys), time.monotonic() + timeout_s
    while missing := {rank: key for rank, key in missing.items() if not store.check([key])}:
        if time.monotonic() > deadline:
            raise PeerTimeout(dict.fromkeys(missing, "?"), timeout_s, f"this rank waited in {phase}")
        time.sleep(0.002)
    return [store.get(key).decode() for key in keys.values()]
