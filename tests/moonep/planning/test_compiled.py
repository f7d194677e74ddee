"""Plain Python and numba run the same rules to the same bits."""

from __future__ import annotations

import pytest
import torch

from moonep.planning import default_slots, solvers
from moonep.planning.compiled import solve, sum_over_sources
from tests.moonep.planning.routing import PATHOLOGIES, popularity


@pytest.mark.slow  # numba compiles for about ten seconds where it has no cache yet
def test_numba_equals_python():
    pytest.importorskip("numba")
    for num_ranks, num_experts in ((1, 3), (2, 16), (8, 32), (64, 64)):
        counts = torch.stack(
            [(popularity(kind, num_ranks, num_experts, seed=5) * 41).to(torch.int32) for kind in PATHOLOGIES]
        )
        totals = sum_over_sources(counts, use_numba=False)
        assert (sum_over_sources(counts, use_numba=True) == totals).all()
        for rule in (solvers.STATIC, solvers.MOONEP, solvers.BOUNDED):
            for tau in (1000, 1020):
                for slots in (default_slots(num_ranks, num_experts), 1):
                    plain = solve(rule, totals, num_ranks, slots, tau, use_numba=False)
                    assert torch.equal(plain, solve(rule, totals, num_ranks, slots, tau, use_numba=True))
