"""Buffer: dispatch, combine, weight copies and gradient return by hand, with the calls of upstream MoonEP.

`MoonEPExperts` does all of it as one autograd operation; a Buffer is for programs that own their FFN. Both
stand on the same plan, agreement and exchange.

Legend: R ranks, E experts, epn = E/R, K top-k, S token capacity, s tokens of a rank in this call, H width,
NvS rows of a shard, nvs_s the first of them that this plan may fill.
"""

from __future__ import annotations

from typing import Any

import torch

from moonep.buffer_checks import check_construction, problem
from moonep.buffer_core import BufferCore, BufferPlan, Tensors
from moonep.plan import Plan
from moonep.planning import Geometry, registered_policies
from moonep.symmetric import Region
from moonep.views import CompletedEvent


class Buffer(BufferCore):
    """One static shard a rank, and the calls that fill and empty it. Collective to make, use and destroy.

    With `group=LoopbackGroup(R)` this process plays all R ranks: every tensor argument and result is then a
    list of R tensors (for R = 1 a tensor).

    Args:
        S: the most tokens of a rank in one call.
        H: width of a row.
        K: experts a token is routed to.
        E: routed experts, a multiple of R.
        num_ep_ranks: R, the size of `group`.
        num_sms, comm_stream_priority, enable_pdl: hints for a GPU; without meaning on a CPU.
        token_padding: rows of a group are padded to a multiple of it.
        group: a process group, `LoopbackGroup(R)`, or None: the default group, or one rank without one.
        explicitly_destroy: upstream's promise to call `destroy`. Memory is freed with the object either way,
            and never by a hidden collective.
        policy, tau, slots, max_imbalance: see `plan_allocation`; slots is epn unless given.
        memory: "auto", "shm", "collective", "cuda", "loopback".
        dtype: of rows. Route weights are fp32 (fp64 for fp64 rows).
        device: None: the current GPU where there is one, else the CPU.
        timeout_s: longest wait for a peer.
        debug: a zero-copy view that is used after a later call has overwritten it raises ContractError.

    Attributes:
        geometry: every size; `.shard_rows` is NvS.
        destroyed: whether `destroy` was called.

    Raises:
        ContractError: sizes or names outside their contract. RankDisagreement: ranks construct different
        buffers. CapabilityError: no room for the shard, or the memory asked for cannot work here.
    """

    def __init__(
        self,
        S: int,
        H: int,
        K: int,
        E: int,
        num_ep_ranks: int,
        num_sms: int | None = None,
        token_padding: int = 128,
        group: Any = None,
        comm_stream_priority: int = -1,
        enable_pdl: bool = True,
        explicitly_destroy: bool = False,
        *,
        policy: str = "bounded",
        tau: float = 1.0,
        slots: int | None = None,
        max_imbalance: float | None = None,
        memory: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
        debug: bool = False,
    ):
        check_construction(num_ep_ranks, group, H, policy, registered_policies(), dtype, timeout_s)
        if slots is None and E % num_ep_ranks == 0:
            slots = E // num_ep_ranks
        geometry = Geometry.build(
            num_ep_ranks,
            E,
            K,
            S,
            policy=policy,
            tau=tau,
            slots=slots,
            token_padding=token_padding,
            max_imbalance=max_imbalance,
        )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(geometry, H, dtype, policy, group, memory, device, timeout_s, debug)

    @property
    def hidden_nvsh_buffer_view(self) -> Any:
        """`[NvS, H]`: this rank's shard itself. Valid until the next dispatch or combine."""
        self._check_open()
        return self._give([self._rows.view(rank) for rank in self.local_ranks])

    @property
    def router_weight_buffer_view(self) -> Any:
        """`[NvS]`: the route weights beside the shard."""
        self._check_open()
        return self._give([self._weights.view(rank) for rank in self.local_ranks])

    @torch.no_grad()
    def dispatch(
        self,
        hidden_sh: Tensors,
        route_weights_sk: Tensors | None = None,
        topk_experts_sk: Tensors | None = None,
        tokens_per_expert: Tensors | None = None,
        plan: Plan | None = None,
        async_finish: bool = False,
        *,
        inter_rank_sync: bool = True,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
        total_num_tokens: int | None = None,
    ) -> tuple[Any, ...]:
        """Sends every token to the ranks that compute its experts, into expert-grouped rows. Collective.

        Args:
            hidden_sh: `[s, H]`, 0 <= s <= S. All ranks pass the same s unless total_num_tokens is given.
            route_weights_sk: `[s, K]`, or None.
            topk_experts_sk: `[s, K]` int32 or int64. Not with a plan.
            tokens_per_expert: `[E]` this rank's histogram, checked where given. Not with a plan.
            plan: sends rows where an earlier dispatch of the same s did (backward of combine).
            async_finish: appends an event to the result (complete already on a CPU).
            inter_rank_sync: accepted. Each call begins with an agreement of all ranks, which is the sync.
            zero_copy: returns the view of the shard itself, valid until the next dispatch or combine.
            router_weights_zero_copy: the same for route weights; zero_copy alone copies them.
            total_num_tokens: sum of s over the ranks; they may then differ. Ignored with a plan.

        Returns:
            hidden_nvsh `[nvs_s, H]`, defined inside cu_seqlens; route_weights_nvs `[nvs_s]` or None;
            cu_seqlens int32 `[2*epn]` padded end offset of each group (None with a plan); the plan.

        Raises:
            ContractError: an argument outside its contract, on the rank at fault (PeerFailure with its words
                on the others; the Buffer goes on). RankDisagreement, PeerTimeout, PeerFailure.
        """
        self._check_open()
        hidden, weights = self._take(hidden_sh), self._take(route_weights_sk)
        fresh, total = plan is None, -1 if total_num_tokens is None else total_num_tokens
        present = int(weights is not None)
        if plan is None:
            ids, counts = self._take(topk_experts_sk), self._take(tokens_per_expert)
            error = problem(lambda: self._check_fresh(hidden, weights, ids, counts, total))
            plan = self._plan(ids or [], present, total, error)
        else:
            error = problem(lambda: self._check_again(plan, hidden, weights, topk_experts_sk))
            self._agree("dispatch with a plan", error, plan, present)
        assert isinstance(plan, BufferPlan) and hidden is not None
        self._overwritten()
        with self.telling_peers():
            self.exchange.put_rows(plan, hidden, self._rows)
            if weights is not None:
                self.exchange.put_scalars(plan, [w.to(self.scalar_dtype) for w in weights], self._weights)
            self.exchange.complete("dispatch")
            rows = self._hand_out(self._rows, plan, zero_copy)
            scalars = (
                None if weights is None else self._hand_out(self._weights, plan, router_weights_zero_copy)
            )
        result = (rows, scalars, self.cu_seqlens(plan) if fresh else None, plan)
        return (*result, CompletedEvent()) if async_finish else result

    @torch.no_grad()
    def combine(
        self,
        plan: Plan,
        hidden_nvsh: Tensors,
        route_weights_nvs: Tensors | None = None,
        async_finish: bool = False,
        inter_rank_sync: bool = True,
        *,
        zero_copy: bool = False,
        router_weights_zero_copy: bool = False,
    ) -> tuple[Any, Any, CompletedEvent | None]:
        """Sums each token's K rows, unweighted, on its source rank. Collective.

        Args:
            plan: of the dispatch.
            hidden_nvsh: `[nvs_s, H]` or `[NvS, H]`; rows outside cu_seqlens are not read.
            route_weights_nvs: `[nvs_s]` or `[NvS]`, or None.
            async_finish, inter_rank_sync: as in dispatch.
            zero_copy: hidden_nvsh is the view that dispatch returned, written in place.
            router_weights_zero_copy: the same for route_weights_nvs.

        Returns:
            hidden_sh `[s, H]`; route_weights_sk `[s, K]` or None: each entry's scalar; an event or None.

        Raises:
            as dispatch.
        """
        self._check_open()
        rows, scalars = self._take(hidden_nvsh), self._take(route_weights_nvs)
        error = problem(lambda: self._check_combine(plan, rows, scalars, zero_copy, router_weights_zero_copy))
        self._agree("combine", error, plan, int(scalars is not None))
        assert isinstance(plan, BufferPlan) and rows is not None
        with self.telling_peers():
            if not zero_copy:
                self._fill(self._rows, plan, rows)
            if scalars is not None and not router_weights_zero_copy:
                self._fill(self._weights, plan, scalars)
            self.exchange.complete("combine")
            sums = self.exchange.sum_rows(plan, self._rows)
            taken = None if scalars is None else self.exchange.take_scalars(plan, self._weights)
        self._overwritten()
        gathered = None if taken is None else self._give(taken)
        return self._give(sums), gathered, CompletedEvent() if async_finish else None

    def prefetch_weight(
        self,
        plan: Plan,
        async_finish: bool = False,
        *,
        local_gate_weight: Tensors,
        local_up_weight: Tensors,
        local_down_weight: Tensors,
        gate_prefetch_buffer: torch.Tensor | Region,
        up_prefetch_buffer: torch.Tensor | Region,
        down_prefetch_buffer: torch.Tensor | Region,
        local_gate_scale: Tensors | None = None,
        local_up_scale: Tensors | None = None,
        local_down_scale: Tensors | None = None,
        gate_scale_prefetch_buffer: torch.Tensor | Region | None = None,
        up_scale_prefetch_buffer: torch.Tensor | Region | None = None,
        down_scale_prefetch_buffer: torch.Tensor | Region | None = None,
    ) -> CompletedEvent | None:
        """Copies the experts of a plan into the slots of the ranks that compute them. Collective.

        Args:
            local_*_weight: `[epn, ...]` this rank's experts, any dtype (uint8 for packed formats).
            *_prefetch_buffer: `[R, epn, ...]` every rank's slots: a view of `ExpertPools`, or memory that all
                ranks have mapped.
            local_*_scale, *_scale_prefetch_buffer: the same for scales, where weights have them.

        Raises:
            as dispatch.
        """
        self.copy_experts(
            plan,
            {
                "gate": (local_gate_weight, gate_prefetch_buffer),
                "up": (local_up_weight, up_prefetch_buffer),
                "down": (local_down_weight, down_prefetch_buffer),
                "gate scale": (local_gate_scale, gate_scale_prefetch_buffer),
                "up scale": (local_up_scale, up_scale_prefetch_buffer),
                "down scale": (local_down_scale, down_scale_prefetch_buffer),
            },
        )
        return CompletedEvent() if async_finish else None

    def reduce_grad(
        self,
        plan: Plan,
        async_finish: bool = False,
        *,
        local_gate_grad: Tensors,
        local_up_grad: Tensors,
        local_down_grad: Tensors,
        gate_reduce_buffer: torch.Tensor | Region,
        up_reduce_buffer: torch.Tensor | Region,
        down_reduce_buffer: torch.Tensor | Region,
    ) -> CompletedEvent | None:
        """Adds the gradients of copied experts to those at home, then zeroes the slots. Collective.

        Args:
            local_*_grad: `[epn, ...]` fp32 (fp64 for fp64), added to in place, in order of (rank, slot).
            *_reduce_buffer: `[R, epn, ...]` every rank's slots, as in prefetch_weight.

        Raises:
            as dispatch.
        """
        self.return_gradients(
            plan,
            {
                "gate": (local_gate_grad, gate_reduce_buffer),
                "up": (local_up_grad, up_reduce_buffer),
                "down": (local_down_grad, down_reduce_buffer),
            },
        )
        return CompletedEvent() if async_finish else None
