"""The planner: who computes which tokens, and where every token then lies. Integers only."""

from __future__ import annotations

from moonep.planning.allocation import (
    check_allocation,
    default_slots,
    plan_allocation,
    register_policy,
    registered_policies,
    tau_in_thousandths,
)
from moonep.planning.layout import Geometry, Layout, destinations, layout, mark_duplicates
from moonep.planning.policies import guaranteed_load
from moonep.planning.statistics import PlanStatistics, plan_statistics

__all__ = [
    "Geometry",
    "Layout",
    "PlanStatistics",
    "check_allocation",
    "default_slots",
    "destinations",
    "guaranteed_load",
    "layout",
    "mark_duplicates",
    "plan_allocation",
    "plan_statistics",
    "register_policy",
    "registered_policies",
    "tau_in_thousandths",
]
