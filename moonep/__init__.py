"""Expert parallelism with balanced ranks: the same integer plan on a CPU, one GPU, or many."""

from __future__ import annotations

from moonep.buffer import Buffer
from moonep.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    MoonEPError,
    PeerFailure,
    PeerTimeout,
    RankDisagreement,
)
from moonep.experts import MoonEPExperts
from moonep.plan import Plan
from moonep.planning import check_allocation, plan_allocation, register_policy
from moonep.pools import ExpertPools
from moonep.quantile import NoBalancer, QuantileBalancer, SignBalancer
from moonep.symmetric import LoopbackGroup

__all__ = [
    "Buffer",
    "CapabilityError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "ExpertPools",
    "LoopbackGroup",
    "MoonEPError",
    "MoonEPExperts",
    "NoBalancer",
    "PeerFailure",
    "PeerTimeout",
    "Plan",
    "QuantileBalancer",
    "RankDisagreement",
    "SignBalancer",
    "check_allocation",
    "plan_allocation",
    "register_policy",
]
