"""Runs a function on several gloo processes of this machine, with bounded waiting.

    results = run_ranks(function, 2, *arguments)      # function(rank, *arguments) -> anything picklable

The function must be at the top level of a module. Processes come from a fork server that has torch loaded, so
one more costs tenths of a second.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed"])


class RankError(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 60.0,
    may_die: frozenset[int] | set[int] = frozenset(),
) -> list[Any]:
    """What the function returned on every rank (None for ranks in `may_die` that died).

    Raises:
        RankError: the first rank that raised, died, or was still running after `timeout_s`.
    """
    port = free_port()
    ranks = []
    for rank in range(world_size):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_main, args=(theirs, function, rank, world_size, port, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks, time.monotonic() + timeout_s, set(may_die))
    finally:
        for process, _ in ranks:
            if process.is_alive():
                process.kill()
            process.join(10)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _collect(ranks: list[tuple[Any, Connection]], deadline: float, may_die: set[int]) -> list[Any]:
    results: list[Any] = [None] * len(ranks)
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(pending.values())} still run after the time allowed")
        for connection in ready:
            rank = pending.pop(connection)  # type: ignore[arg-type]
            try:
                good, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                if rank in may_die:
                    continue
                raise RankError(f"rank {rank} died") from None
            if not good:
                raise RankError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return results


def _main(
    connection: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=timedelta(seconds=60))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        answer = (True, function(rank, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # By value: torch would send handles that end with this process.
    connection.send_bytes(pickle.dumps(answer))
    # Rank 0 holds the store and others may still need it: the parent ends all of them together.
    time.sleep(600)
