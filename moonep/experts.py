"""MoonEPExperts: routed experts spread over ranks, balanced at every call, as one autograd operation.

Legend: R ranks, E experts, epn = E/R home experts of a rank, K top-k, S token capacity, T tokens of a rank in
this call, H dispatched width, Hi FFN width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from kernels.moe.grouped import ACTIVATIONS, grouped_ffn_backward, grouped_ffn_forward
from kernels.moe.init import draw_expert_seed, expert_init
from kernels.precision import accumulation_dtype
from moonep.errors import ContractError, MoonEPError
from moonep.plan import Plan
from moonep.planning import Geometry, registered_policies
from moonep.symmetric import LoopbackGroup, choose, group_size
from moonep.workspace import DTYPES, Sizes, Workspace, shared_workspace

Tensors = torch.Tensor | Sequence[torch.Tensor]


class MoonEPExperts(nn.Module):
    """y = sum over k of weight_k x down_e(situ(gate_e x) * cap(up_e x)), e = expert_ids_k, over all ranks.

    A call plans who computes which tokens, sends rows, copies experts to the ranks that take over some of
    their tokens, computes, and brings sums home; the backward pass sends rows and copies again and returns
    the gradients of copies to their home. Gradients are summed over the group's tokens. A call is collective:
    every rank of the group makes it, with its own 0 <= T <= S tokens.

    Args:
        num_experts: E, a multiple of R.
        hidden: H.
        ffn_hidden: Hi.
        top_k: K.
        capacity: S, the most tokens of a rank in one call.
        group: a process group, `LoopbackGroup(R)`, or None: the default group, or one rank without one.
        policy: "bounded", "moonep", "static", or a registered one; see `plan_allocation`.
        tau: balance target; 1.0 is exact.
        slots: copied experts a rank may hold; None: what exact balance may need.
        max_imbalance: rank imbalance the shard is sized for when slots are fewer.
        memory: "auto", "shm", "collective", "cuda", "loopback".
        activation: "situ".
        beta_gate, beta_up: its bounds.
        timeout_s: longest wait for a peer.
        dtype, device: of the parameters.

    Attributes:
        gate_weight, up_weight: `[epn, Hi, H]`; down_weight: `[epn, H, Hi]`. In loopback all E experts.
        capacity: most tokens of one call of `forward`: S, or R * S in loopback.
        last_plan: the plan of the last call; `.statistics`, `.read_statistics`.

    Raises:
        ContractError: sizes or names outside their contract; at construction.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        ffn_hidden: int,
        top_k: int,
        capacity: int,
        *,
        group: Any = None,
        policy: str = "bounded",
        tau: float = 1.0,
        slots: int | None = None,
        max_imbalance: float | None = None,
        memory: str = "auto",
        activation: str = "situ",
        beta_gate: float = 4.0,
        beta_up: float = 25.0,
        timeout_s: float = 60.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        _check_choice("policy", policy, registered_policies())
        _check_choice("activation", activation, ACTIVATIONS)
        for name, value in (("hidden", hidden), ("ffn_hidden", ffn_hidden)):
            if value < 1:
                raise ContractError(f"{name}={value} must be at least 1")
        if not timeout_s > 0:
            raise ContractError(f"timeout_s={timeout_s} must be positive")
        self.num_ranks = group_size(group)
        self.geometry = Geometry.build(
            self.num_ranks,
            num_experts,
            top_k,
            capacity,
            policy=policy,
            tau=tau,
            slots=slots,
            max_imbalance=max_imbalance,
        )
        self.group, self.policy, self.memory, self.timeout_s = group, policy, memory, timeout_s
        self.hidden, self.ffn_hidden, self.top_k = hidden, ffn_hidden, top_k
        self.betas: dict[str, Any] = {"beta_gate": beta_gate, "beta_up": beta_up}
        choose(memory, group, device or "cpu")
        loopback = isinstance(group, LoopbackGroup) or self.num_ranks == 1
        self._ranks = self.num_ranks if loopback else 1
        self.capacity = capacity * self._ranks
        held = self.geometry.experts_per_rank * self._ranks
        options = {"dtype": dtype, "device": device}
        self.gate_weight = nn.Parameter(torch.empty(held, ffn_hidden, hidden, **options))  # type: ignore[arg-type]
        self.up_weight = nn.Parameter(torch.empty(held, ffn_hidden, hidden, **options))  # type: ignore[arg-type]
        self.down_weight = nn.Parameter(torch.empty(held, hidden, ffn_hidden, **options))  # type: ignore[arg-type]
        self.last_plan: Plan | None = None
        self.reset_parameters(draw_expert_seed())

    def reset_parameters(self, layer_seed: int) -> None:
        """Fills the weights: expert e's values follow from (layer_seed, e) alone, at any R."""
        rank = 0 if self._ranks == self.num_ranks else torch.distributed.get_rank(self.group)
        first = rank * self.geometry.experts_per_rank
        expert_init(self.gate_weight, self.up_weight, self.down_weight, layer_seed, first)

    @property
    def sizes(self) -> Sizes:
        """Sizes of the workspace this layer shares with others."""
        return Sizes(self.geometry, self.hidden, self.ffn_hidden, self.gate_weight.dtype)

    def workspace(self) -> Workspace:
        """Shard and pools, made at the first call. Collective then."""
        device, dtype = self.gate_weight.device, self.gate_weight.dtype
        if dtype not in DTYPES:
            raise ContractError(f"parameters are {dtype}; allowed: float32, float64, bfloat16")
        return shared_workspace(self.memory, self.group, device, self.timeout_s, self.sizes)

    def forward(self, x_TH: Tensors, expert_ids_TK: Tensors, route_weights_TK: Tensors) -> Any:
        """The routed experts of each token. Collective.

        Args:
            x_TH: `[T, H]` in the parameters' dtype. With a LoopbackGroup also a list of R such tensors; one
                tensor is then cut into R nearly equal parts.
            expert_ids_TK: `[T, K]` integers in `[0, E)`; an expert may occur twice.
            route_weights_TK: `[T, K]`, any float dtype; used in fp32 (fp64 for fp64).

        Returns:
            `[T, H]` in x's dtype; a list where a list came.

        Raises:
            ContractError: wrong dtype or shape, an id out of range, more tokens than S (on the rank at fault;
                PeerFailure with the same words on the others). RankDisagreement, PeerTimeout, PeerFailure.
        """
        listed = not isinstance(x_TH, torch.Tensor)
        workspace = self.workspace()
        error: Exception | None = None
        try:
            x, ids, weights = (self._split(t) for t in (x_TH, expert_ids_TK, route_weights_TK))
            self._check(x, ids, weights)
        except ContractError as problem:
            x, ids, weights, error = [], [], [], problem
        parameters = (self.gate_weight, self.up_weight, self.down_weight)
        tensors = (*x, *weights, *parameters)
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        plan = workspace.plan(self.policy, ids, needs_gradient, error)
        self.last_plan = plan
        if needs_gradient:
            workspace.training_regions()
        call = _Call(workspace, plan, self.betas, needs_gradient)
        y = _Experts.apply(call, *parameters, *x, *weights)
        if listed:
            return list(y)
        return y[0] if len(y) == 1 else torch.cat(y)

    def extra_repr(self) -> str:
        sizes = self.geometry
        return (
            f"experts={sizes.num_experts}, ranks={sizes.num_ranks}, hidden={self.hidden}, ffn_hidden="
            f"{self.ffn_hidden}, top_k={self.top_k}, capacity={sizes.capacity}, policy={self.policy}, "
            f"tau={sizes.tau_thousandths / 1000:g}, slots={sizes.slots}, shard_rows={sizes.shard_rows}"
        )

    def _split(self, tensors: Tensors) -> list[torch.Tensor]:
        if isinstance(tensors, torch.Tensor):
            return list(tensors.tensor_split(self._ranks)) if self._ranks > 1 else [tensors]
        if len(tensors) != self._ranks:
            raise ContractError(
                f"a list of {len(tensors)} tensors came; this process plays {self._ranks} ranks"
            )
        return list(tensors)

    def _check(self, x: list[torch.Tensor], ids: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        for x_TH, ids_TK, weights_TK in zip(x, ids, weights, strict=True):
            self._check_rank(x_TH, ids_TK, weights_TK)

    def _check_rank(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        parameter = self.gate_weight
        if x_TH.dim() != 2 or x_TH.shape[1] != self.hidden:
            raise ContractError(f"x has shape {list(x_TH.shape)}; expected [T, {self.hidden}]")
        if x_TH.dtype != parameter.dtype or x_TH.device != parameter.device:
            raise ContractError(
                f"x is {x_TH.dtype} on {x_TH.device}, the experts' parameters are {parameter.dtype} on "
                f"{parameter.device}; cast one to the other"
            )
        T, S = x_TH.shape[0], self.geometry.capacity
        if T > S:
            raise ContractError(f"{T} tokens exceed capacity={S}; split the call or raise capacity")
        for name, value in (("expert_ids", ids_TK), ("route_weights", weights_TK)):
            if tuple(value.shape) != (T, self.top_k):
                raise ContractError(f"{name} has shape {list(value.shape)}; expected [{T}, {self.top_k}]")
            if value.device != x_TH.device:
                raise ContractError(f"{name} is on {value.device}, x on {x_TH.device}; move one")
        if ids_TK.dtype not in (torch.int64, torch.int32, torch.int16):
            raise ContractError(f"expert_ids is {ids_TK.dtype}; expected int32 or int64")
        if not weights_TK.dtype.is_floating_point:
            raise ContractError(f"route_weights is {weights_TK.dtype}; expected a float dtype")
        if T:
            low, high = (int(v) for v in ids_TK.aminmax())
            if low < 0 or high >= self.geometry.num_experts:
                wrong = low if low < 0 else high
                raise ContractError(f"expert id {wrong} is outside 0 to {self.geometry.num_experts - 1}")


@dataclass(frozen=True)
class _Call:
    """One call of a layer: what forward and backward share beside tensors."""

    workspace: Workspace
    plan: Plan
    betas: dict[str, Any]
    needs_gradient: bool

    def per_rank(self, weights: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """(gate, up, down) of each local rank's home experts, as views."""
        epn = self.plan.geometry.experts_per_rank
        count = len(self.plan.local_ranks)
        return [tuple(w.detach()[i * epn : (i + 1) * epn] for w in weights) for i in range(count)]

    def offsets(self, rank: int) -> torch.Tensor:
        return self.plan.layout.offsets[rank]

    def send_copies(self, home: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for position, pool in enumerate(self.workspace.copies):
            self.workspace.exchange.put_weights(self.plan, [w[position] for w in home], pool)


def _forward(call: _Call, weights: Any, x: list[torch.Tensor], route_weights: list[torch.Tensor]) -> Any:
    space, plan = call.workspace, call.plan
    exchange, home = space.exchange, call.per_rank(weights)
    # The plan's gather was a barrier: every rank has left the last call's regions.
    exchange.put_rows(plan, x, space.rows)
    exchange.put_scalars(plan, route_weights, space.weights)
    call.send_copies(home)
    exchange.complete("dispatch")
    for place, rank in enumerate(plan.local_ranks):
        rows, used = space.rows.view(rank), plan.used_rows[rank]
        grouped_ffn_forward(
            rows[:used],
            call.offsets(rank),
            home[place],  # type: ignore[arg-type]
            space.copied(rank, space.copies),
            row_weights_N=space.weights.view(rank)[:used],
            out=rows[:used],
            save=False,
            **call.betas,
        )
    exchange.complete("combine")
    return exchange.sum_rows(plan, space.rows)


def _backward(
    call: _Call,
    weights: Any,
    x: list[torch.Tensor],
    route_weights: list[torch.Tensor],
    d_y: list[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """(d_x, d_route_weights, d_home) for each local rank."""
    space, plan = call.workspace, call.plan
    exchange, home = space.exchange, call.per_rank(weights)
    row_gradients, weight_gradients, copy_gradients = space.training_regions()
    exchange.enter("backward")
    exchange.put_rows(plan, x, space.rows)
    exchange.put_rows(plan, d_y, row_gradients)
    exchange.put_scalars(plan, route_weights, space.weights)
    call.send_copies(home)
    exchange.complete("backward dispatch")
    d_home = []
    for place, rank in enumerate(plan.local_ranks):
        used = plan.used_rows[rank]
        gradients = grouped_ffn_backward(
            row_gradients.view(rank)[:used],
            space.rows.view(rank)[:used],
            call.offsets(rank),
            home[place],  # type: ignore[arg-type]
            space.copied(rank, space.copies),
            row_weights_N=space.weights.view(rank)[:used],
            grad_dtype=weight_gradients.dtype,
            **call.betas,
        )
        space.rows.view(rank)[:used] = gradients.rows
        assert gradients.row_weights is not None
        weight_gradients.view(rank)[:used] = gradients.row_weights
        for pool, gradient in zip(copy_gradients, gradients.copies or (), strict=False):
            pool.view(rank).copy_(gradient)
        d_home.append(list(gradients.home))
    exchange.complete("backward combine")
    d_x = exchange.sum_rows(plan, space.rows)
    d_weights = exchange.take_scalars(plan, weight_gradients)
    for position, pool in enumerate(copy_gradients):
        exchange.take_gradients(plan, pool, [d[position] for d in d_home])
    return d_x, d_weights, d_home


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, gate, up, down, *tensors):
        count = len(call.plan.local_ranks)
        x, weights = list(tensors[:count]), list(tensors[count:])
        dtype = accumulation_dtype(gate)
        with _told(call):
            y = _forward(call, (gate, up, down), x, [w.to(dtype) for w in weights])
        if call.needs_gradient:
            ctx.call = call
            ctx.save_for_backward(gate, up, down, *tensors)
        return tuple(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_y):
        call, saved = ctx.call, ctx.saved_tensors
        parameters, tensors = saved[:3], saved[3:]
        count = len(call.plan.local_ranks)
        x, weights = list(tensors[:count]), list(tensors[count:])
        dtype = accumulation_dtype(parameters[0])
        with _told(call):
            d_x, d_weights, d_home = _backward(
                call, parameters, x, [w.to(dtype) for w in weights], [d.contiguous() for d in d_y]
            )
        d_parameters = [
            (parts[0] if count == 1 else torch.cat(parts)).to(p.dtype)
            for p, parts in zip(parameters, zip(*d_home, strict=True), strict=True)
        ]
        d_weights = [d.to(w.dtype) for d, w in zip(d_weights, weights, strict=True)]
        return None, *d_parameters, *d_x, *d_weights


class _told:
    """Tells the other ranks when this one fails inside the exchange, so that none waits for it."""

    def __init__(self, call: _Call):
        self.memory = call.workspace.memory

    def __enter__(self) -> None:
        self.memory.check_alive()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, MoonEPError):
            self.memory.abort(f"{type(error).__name__}: {error}")


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ContractError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")
