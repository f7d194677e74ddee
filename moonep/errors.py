"""The errors of the runtime. A message is one line: what is wrong, what came, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Mapping


class MoonEPError(Exception):
    """Base of every error this package raises on purpose."""


class ContractError(MoonEPError, ValueError):
    """An argument or a configuration key is outside its contract."""


class ConfigError(ContractError):
    """A configuration key is unknown, has the wrong type, or contradicts another."""


class DataError(MoonEPError, ValueError):
    """A corpus or a trace is missing, empty, too short or malformed."""


class CheckpointError(MoonEPError):
    """A checkpoint is truncated, altered, or belongs to another model."""


class CapabilityError(MoonEPError, RuntimeError):
    """This machine lacks something; the message says what, and which fallback exists."""


class RankDisagreement(MoonEPError, RuntimeError):
    """Ranks of one group called with different values.

    Attributes:
        what: name of the value on which the ranks disagree.
        values: rank -> value, for every rank of the group.
    """

    def __init__(self, what: str, values: Mapping[int, object]):
        self.what = what
        self.values = dict(values)
        listing = ", ".join(f"rank {rank}: {value}" for rank, value in sorted(self.values.items()))
        super().__init__(f"ranks disagree on {what} ({listing}); every rank must pass the same value")


class PeerTimeout(MoonEPError, TimeoutError):
    """A peer did not arrive in time.

    Attributes:
        phases: rank -> the phase in which that rank stopped ("?" where it left no trace).
        timeout_s: seconds waited.
    """

    def __init__(self, phases: Mapping[int, str], timeout_s: float, detail: str = ""):
        self.phases = dict(phases)
        self.timeout_s = timeout_s
        listing = ", ".join(f"rank {rank} in {phase}" for rank, phase in sorted(self.phases.items()))
        suffix = f"; {detail}" if detail else ""
        super().__init__(f"no answer within {timeout_s:g} s from: {listing}{suffix}")


class PeerFailure(MoonEPError, RuntimeError):
    """Another rank of the group raised; this rank stops too.

    Attributes:
        rank: the rank that failed first.
        reason: what it said.
    """

    def __init__(self, rank: int, reason: str):
        self.rank = rank
        self.reason = reason
        super().__init__(f"stopped because rank {rank} failed: {reason}")
