"""The allocation contract: who computes which tokens, how it is asked for, and how a result is checked.

Shapes: R expert-parallel ranks, E routed experts, epn = E/R home experts of a rank (expert e lives on rank e
// epn). `tokens_per_expert [..., R, E]` counts tokens by source rank and expert; `alloc [..., R, E]` by
computing rank and expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from moonep.errors import ContractError

if TYPE_CHECKING:
    from moonep.planning.layout import Geometry

EXACT = 1000  # tau counts in thousandths
MAX_TOKENS = 2**31 - 1  # alloc is int32; products with tau then fit int64 by far


class Policy(Protocol):
    """A balancing rule: `tokens_per_expert [..., R, E]` integers, tau in thousandths, slots -> `alloc [...,
    R, E]` int32.
    """

    def __call__(
        self, tokens_per_expert: torch.Tensor, *, tau_thousandths: int, slots: int
    ) -> torch.Tensor: ...


_POLICIES: dict[str, Policy] = {}
_BUILT_IN: set[str] = set()


def register_policy(name: str) -> Callable[[Policy], Policy]:
    """Decorator: makes a function a policy that `plan_allocation(policy=name)` and every command know.

    The function takes `(tokens_per_expert, *, tau_thousandths, slots)` and returns `alloc`; see `Policy`.
    Every allocation it returns is checked against the hard invariants. Raises `ContractError` if the name is
    taken.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ContractError(f"register_policy: name {name!r} must be an identifier such as 'my_rule'")

    def register(policy: Policy) -> Policy:
        if _POLICIES.get(name, policy) is not policy:
            raise ContractError(f"register_policy: policy {name!r} exists already; choose another name")
        _POLICIES[name] = policy
        return policy

    return register


def registered_policies() -> tuple[str, ...]:
    """Names that `plan_allocation` takes."""
    return tuple(sorted(_POLICIES))


def tau_in_thousandths(tau: float) -> int:
    """`tau` as an integer count of thousandths. Raises `ContractError` unless it is at least 1 and a multiple
    of 0.001.
    """
    thousandths = round(tau * EXACT) if 1 <= tau < 10**6 else -1
    if thousandths < EXACT or abs(tau * EXACT - thousandths) > 1e-6:
        raise ContractError(
            f"tau={tau!r} must be at least 1 and a multiple of 0.001 (1.0 exact balance, 1.02 two per cent)"
        )
    return thousandths


def default_slots(num_ranks: int, num_experts: int) -> int:
    """ceil(E * (R-1) / R^2): the copies a rank needs at most for exact balance (proof:
    solvers.fill_receivers).
    """
    return -(-num_experts * (num_ranks - 1) // num_ranks**2)


def check_shape(num_ranks: int, num_experts: int) -> None:
    """Raises `ContractError` unless R >= 1 and E is a positive multiple of R."""
    if num_ranks < 1:
        raise ContractError(f"num_ranks={num_ranks} must be at least 1")
    if num_experts < 1 or num_experts % num_ranks:
        raise ContractError(
            f"num_experts={num_experts} must be a positive multiple of the {num_ranks} expert-parallel ranks"
        )


def check_slots(slots: int | None, num_ranks: int, num_experts: int) -> int:
    """The slots a rank plans with: the default for None, at most epn. Raises `ContractError` if negative."""
    if slots is None:
        return default_slots(num_ranks, num_experts)
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 0:
        raise ContractError(f"slots={slots!r} must be a non-negative integer, or None for the proved bound")
    return min(slots, num_experts // num_ranks)


def plan_allocation(
    tokens_per_expert: torch.Tensor, *, policy: str = "bounded", tau: float = 1.0, slots: int | None = None
) -> torch.Tensor:
    """Decides on which rank every token is computed.

    Args:
        tokens_per_expert: `[..., R, E]` integers, tokens of source rank r for expert e; leading axes are a
        batch.
        policy: "static" (no moves), "moonep" (upstream's greedy rule), "bounded" (ours), or a registered
        name.
        tau: balance target of "bounded": no rank computes more than ceil(tau * total / R) tokens; counted in
        thousandths.
        slots: copied experts a rank may hold; None means ceil(E * (R-1) / R^2), which suffices for any input.
            More than epn are not used. With fewer the target may be missed: the plan is then the best the
            rule finds, and never worse than `guaranteed_load`; `plan_statistics` says by how much.

    Returns:
        `alloc [..., R, E]` int32 on the same device: tokens of expert e computed on rank d. Integer
        arithmetic only, so the result is the same bit for bit on every device.

    Raises:
        ContractError: wrong dtype or shape, E not divisible by R, unknown policy, tau below 1, negative
        slots.
    """
    num_ranks, num_experts = _check_counts(tokens_per_expert, "tokens_per_expert")
    if policy not in _POLICIES:
        raise ContractError(f"policy={policy!r} is unknown; choose one of {', '.join(registered_policies())}")
    slots = check_slots(slots, num_ranks, num_experts)
    alloc = _POLICIES[policy](tokens_per_expert, tau_thousandths=tau_in_thousandths(tau), slots=slots)
    if policy not in _BUILT_IN:
        _check_foreign(policy, tokens_per_expert, alloc, slots)
    return alloc


def check_allocation(
    tokens_per_expert: torch.Tensor,
    alloc: torch.Tensor,
    *,
    tau: float | None = None,
    slots: int | None = None,
    geometry: Geometry | None = None,
) -> list[str]:
    """Violations of the contract, one line each; an empty list means the allocation is valid.

    Always checked: shape, no negative entry, column sums equal the expert counts, at most 2*epn non-empty
    experts a rank. With `slots`: at most that many remote experts a rank. With `tau`: row sums at most
    ceil(tau * total / R), and at tau = 1 also at least floor(total / R). With `geometry`: the padded rows of
    a rank fit its shard, copies fit its slots.
    """
    num_ranks, num_experts = _check_counts(tokens_per_expert, "tokens_per_expert")
    if alloc.shape != tokens_per_expert.shape:
        return [f"alloc has shape {tuple(alloc.shape)}, tokens_per_expert {tuple(tokens_per_expert.shape)}"]
    alloc = alloc.to(torch.int64)
    totals = tokens_per_expert.to(torch.int64).sum(-2)
    rows, filled = alloc.sum(-1), alloc != 0
    epn = num_experts // num_ranks
    rank = torch.arange(num_ranks, device=alloc.device)
    remote = filled & (torch.arange(num_experts, device=alloc.device) // epn != rank[:, None])
    copies, groups = remote.sum(-1), filled.sum(-1)
    found: list[str] = []
    _report(found, alloc < 0, alloc, "alloc{at} = {value} is negative")
    _report(
        found,
        alloc.sum(-2) != totals,
        alloc.sum(-2) - totals,
        "expert{at}: allocated minus routed tokens = {value}",
    )
    _report(
        found,
        groups > 2 * epn,
        groups,
        f"rank{{at}} has {{value}} non-empty experts, more than 2*epn = {2 * epn}",
    )
    if geometry is not None:
        slots = geometry.slots if slots is None else min(slots, geometry.slots)
        pad = geometry.token_padding
        padded = (-(-alloc // pad) * pad).sum(-1)
        room = geometry.shard_rows
        _report(found, padded > room, padded, f"rank{{at}} needs {{value}} padded rows, its shard has {room}")
    if slots is not None:
        _report(found, copies > slots, copies, f"rank{{at}} holds {{value}} remote experts in {slots} slots")
    if tau is not None:
        thousandths, total = tau_in_thousandths(tau), totals.sum(-1)
        cap = -(-thousandths * total // (EXACT * num_ranks))[..., None]
        _report(
            found,
            rows > cap,
            rows,
            f"rank{{at}} computes {{value}} tokens, more than ceil({tau} * total / R)",
        )
        if thousandths == EXACT:
            _report(
                found,
                rows < total[..., None] // num_ranks,
                rows,
                "rank{at} computes {value} tokens, below floor(total / R)",
            )
    return found


def _check_counts(counts: torch.Tensor, name: str) -> tuple[int, int]:
    if not isinstance(counts, torch.Tensor) or counts.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ContractError(f"{name} must be an int32 or int64 tensor [..., R, E], got {_describe(counts)}")
    if counts.ndim < 2:
        raise ContractError(f"{name} must have shape [..., R, E], got {tuple(counts.shape)}")
    num_ranks, num_experts = counts.shape[-2:]
    check_shape(num_ranks, num_experts)
    return num_ranks, num_experts


def _describe(value: object) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _check_foreign(policy: str, counts: torch.Tensor, alloc: torch.Tensor, slots: int) -> None:
    if not isinstance(alloc, torch.Tensor) or alloc.dtype != torch.int32 or alloc.device != counts.device:
        raise ContractError(
            f"policy {policy!r} must return an int32 tensor on {counts.device}, got {_describe(alloc)}"
        )
    found = check_allocation(counts, alloc, slots=slots)
    if found:
        raise ContractError(f"policy {policy!r} broke its contract: {found[0]}")


def _report(found: list[str], wrong: torch.Tensor, values: torch.Tensor, line: str) -> None:
    """Adds one line for the first wrong element, with the number of others."""
    if not bool(wrong.any()):
        return
    where = wrong.nonzero()
    first = tuple(where[0].tolist())
    others = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
    found.append(line.format(at=list(first), value=int(values[first])) + others)
