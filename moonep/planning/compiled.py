"""Runs the rules of solvers.py over a batch: as plain Python where the work is small, through numba where it
is not.

Both run the same functions on the same integers. numba costs a second to import and some to compile (once; it
keeps its result on disk), so small plans, and machines without numba, never touch it.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from moonep.errors import ContractError
from moonep.planning import solvers
from moonep.planning.allocation import MAX_TOKENS

PYTHON_WORK = 1 << 16  # elements of alloc in one call, about 10 ms of plain Python


@cache
def _compiled() -> tuple[Any, Any]:
    """(sum_sources, solve_batch) compiled; kept on disk where some folder can be written."""
    from numba import njit
    from numba.extending import register_jitable

    for helper in solvers.HELPERS:
        register_jitable(helper)
    try:
        kept = njit(cache=True, nogil=True)
        return kept(solvers.sum_sources), kept(solvers.solve_batch)
    except RuntimeError:  # nowhere to write, as in a read-only installation without a home
        return njit(nogil=True)(solvers.sum_sources), njit(nogil=True)(solvers.solve_batch)


def _numba_pays(size: int) -> bool:
    return size > PYTHON_WORK and find_spec("numba") is not None


def sum_over_sources(counts: torch.Tensor, use_numba: bool | None = None) -> np.ndarray:
    """`counts [N, R, E]` integers on the CPU -> `[N, E]` int64 tokens an expert.

    Raises `ContractError` where a count is negative or a plan has more than 2^31 - 1 tokens.
    """
    batch, num_ranks, num_experts = counts.shape
    array = counts.numpy()
    if not counts.numel():
        return np.zeros((batch, num_experts), dtype=np.int64)
    if use_numba or (use_numba is None and _numba_pays(counts.numel())):
        totals = np.zeros((batch, num_experts), dtype=np.int64)
        flat = np.ascontiguousarray(array).reshape(-1)
        least = int(_compiled()[0](flat, batch, num_ranks, num_experts, totals.reshape(-1)))
    else:
        totals, least = array.sum(1, dtype=np.int64), int(array.min())
    most = int(totals.sum(1).max())
    if least < 0 or most > MAX_TOKENS:
        came = f"a count of {least}" if least < 0 else f"a plan of {most} tokens"
        raise ContractError(
            f"tokens_per_expert has {came}; counts are at least 0, a plan has at most {MAX_TOKENS}"
        )
    return totals


def _state(num_ranks: int, num_experts: int, slots: int, as_array: bool) -> solvers.State:
    # A step of shed_surplus fills a slot; a step of upstream's rule ends an expert or a quota.
    moves = num_ranks * slots + num_experts + num_ranks
    sizes = (*[num_ranks] * 4, num_experts, *[num_ranks] * 2, *[moves] * 3)
    return solvers.State(*(np.zeros(n, dtype=np.int64) if as_array else [0] * n for n in sizes))


def solve(
    rule: int, totals: np.ndarray, num_ranks: int, slots: int, tau: int, use_numba: bool | None = None
) -> torch.Tensor:
    """`totals [N, E]` int64 tokens an expert -> `alloc [N, R, E]` int32. `use_numba=None` decides by size."""
    batch, num_experts = totals.shape
    alloc = np.zeros(
        (batch, num_ranks, num_experts), dtype=np.int32
    )  # numpy asks for huge pages, torch does not
    if use_numba is None:
        use_numba = _numba_pays(alloc.size)
    program = _compiled()[1] if use_numba else solvers.solve_batch
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
    return torch.from_numpy(alloc)
