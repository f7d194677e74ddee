"""Routing workloads and traces, policies under test, cost model, hardware profiles and reports."""

from __future__ import annotations

import moonep.simulate.patterns  # noqa: F401  registers its workloads
from moonep.simulate.workloads import WORKLOADS, BoundWorkload, Workload, make_workload, register_workload

__all__ = ["WORKLOADS", "BoundWorkload", "Workload", "make_workload", "register_workload"]
