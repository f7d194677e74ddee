"""Runs the rules of solvers.py over a batch: as plain Python where the work is small, through numba where it
is not.

Both run the same functions on the same integers. numba costs a second to import and some to compile (once; it
keeps its result on disk), so small plans, and machines without numba, never touch it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import numpy as np

from moonep.planning import solvers

PYTHON_WORK = (
    1 << 14
)  # elements of alloc in one call below which plain Python answers sooner than numba loads


@cache
def _numba_batch():
    """`solvers.solve_batch` compiled; the compiled code is kept on disk where some folder can be written."""
    from numba import njit
    from numba.extending import register_jitable

    for helper in solvers.HELPERS:
        register_jitable(helper)
    try:
        return njit(cache=True, nogil=True)(solvers.solve_batch)
    except RuntimeError:  # no writable place for the cache, as in a read-only installation
        return njit(nogil=True)(solvers.solve_batch)


def _state(num_ranks: int, num_experts: int, slots: int, as_array: bool) -> solvers.State:
    # A step of shed_surplus fills a slot; a step of upstream's rule ends an expert or a quota.
    moves = num_ranks * slots + num_experts + num_ranks
    sizes = (*[num_ranks] * 3, num_experts, *[num_ranks] * 2, *[moves] * 3)
    return solvers.State(*(np.zeros(n, dtype=np.int64) if as_array else [0] * n for n in sizes))


def solve(
    rule: int, totals: np.ndarray, num_ranks: int, slots: int, tau: int, use_numba: bool | None = None
) -> np.ndarray:
    """`totals [N, E]` int64 tokens an expert -> `alloc [N, R, E]` int32. `use_numba=None` decides by size."""
    batch, num_experts = totals.shape
    alloc = np.zeros((batch, num_ranks, num_experts), dtype=np.int32)
    if use_numba is None:
        use_numba = alloc.size > PYTHON_WORK and find_spec("numba") is not None
    program = _numba_batch() if use_numba else solvers.solve_batch
    flat = np.ascontiguousarray(totals).reshape(-1)
    state, best = (_state(num_ranks, num_experts, slots, use_numba) for _ in range(2))
    program(
        rule,
        flat if use_numba else flat.tolist(),  # Python reads a list three times as fast
        batch,
        num_ranks,
        num_experts // num_ranks,
        slots,
        tau,
        state,
        best,
        alloc.reshape(-1),
    )
    return alloc
