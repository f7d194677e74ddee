"""`chunk_kda` on the Triton kernels: argument normalisation and the autograd function."""

from __future__ import annotations

from typing import Any

import torch

from kernels.kda import launch, segments
from kernels.kda.launch import Problem

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_DIM = 256


def unsupported(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None."""
    if any(x.dtype not in DTYPES for x in (q, v)):
        return f"dtype {q.dtype}/{v.dtype} of q/v; the Triton kernels take bfloat16, float16 and float32"
    if max(q.shape[-1], v.shape[-1]) > MAX_DIM:
        return f"head dimensions K={q.shape[-1]}, V={v.shape[-1]}; the Triton kernels take at most {MAX_DIM}"
    return None


def triton_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    lower_bound: float | None,
    state_v_first: bool,
    cu_seqlens: torch.Tensor | None,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA in two launches forward and at most four backward; arguments of `chunk_kda`, already checked."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    gate = "given" if not use_gate_in_kernel else "softplus" if lower_bound is None else "bounded"
    problem = Problem(
        B=B,
        T=T,
        N=B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        H=H,
        HV=HV,
        K=K,
        V=V,
        scale=float(scale),
        gate=gate,
        lower_bound=float(lower_bound or 0.0),
        beta=int(use_beta_sigmoid_in_kernel) * (2 if allow_neg_eigval else 1),
        l2_norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
        varlen=cu_seqlens is not None,
    )
    if initial_state is not None and tuple(initial_state.shape) != problem.state_shape:
        raise ValueError(
            f"initial_state must be {list(problem.state_shape)} with state_v_first={state_v_first}; "
            f"got {list(initial_state.shape)}"
        )
    o, final_state = KdaFunction.apply(
        *(_rows(x) for x in (q, k, v, g)),
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        problem,
        output_final_state,
    )
    return o, final_state


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous channels; any strides of batch, token and head are honoured in place."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


class KdaFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, problem: Problem, want_final
    ):
        A_log, dt_bias, initial_state = _flat(A_log), _flat(dt_bias), _flat(initial_state)
        parts = segments.split(problem, q.device)
        whole_shape = problem.state_shape
        if parts is not None:
            problem, cu_seqlens = parts
        work = launch.prepare(problem, q, k, g, beta, A_log, dt_bias, cu_seqlens)
        saved = launch.Saved.allocate(problem, q.device) if any(ctx.needs_input_grad) else None
        final = torch.empty(whole_shape, dtype=torch.float32, device=q.device) if want_final else None
        ctx.transition = None
        if parts is None:
            o = launch.scan(problem, work, v, initial_state, final, saved, cu_seqlens)
        else:
            o, ctx.transition = segments.scan(problem, work, v, initial_state, final, saved, cu_seqlens)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o)
        ctx.problem, ctx.work, ctx.saved = problem, work, saved
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    def backward(ctx: Any, do, d_final):
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, o = ctx.saved_tensors
        problem: Problem = ctx.problem
        do = torch.zeros_like(o) if do is None else _rows(do)
        d_initial = None if initial_state is None else torch.empty_like(initial_state, dtype=torch.float32)
        d_final = _flat(d_final)
        work = ctx.work
        if work is None:  # the second backward of a retained graph
            work = launch.prepare(problem, q, k, g, beta, A_log, dt_bias, cu_seqlens)
        if ctx.transition is None:
            reverse = launch.reverse_scan(problem, work, do, d_final, d_initial, cu_seqlens)
        else:
            reverse = segments.reverse_scan(problem, work, do, ctx.transition, d_final, d_initial, cu_seqlens)
        ctx.work, work = None, work.without_operands()
        grads = launch.gradient(
            problem, work, ctx.saved, q, k, v, g, beta, A_log, dt_bias, o, do, reverse, cu_seqlens
        )
        dq, dk = (_sum_group(x, problem).to(like.dtype) for x, like in ((grads.q, q), (grads.k, k)))
        d_A = (
            None
            if A_log is None or grads.A_log is None
            else grads.A_log.sum((0, 2)).view_as(A_log).to(A_log.dtype)
        )
        d_bias = None
        if dt_bias is not None and grads.dt_bias is not None:
            d_bias = grads.dt_bias.sum(0)[:, : problem.K].reshape(dt_bias.shape).to(dt_bias.dtype)
        if d_initial is not None:
            d_initial = d_initial.to(initial_state.dtype)
        return dq, dk, grads.v, grads.g, grads.beta, d_A, d_bias, d_initial, None, None, None


def _sum_group(x: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Gradient of a query/key head: the sum over the value heads that share it."""
    if problem.HV == problem.H:
        return x
    return x.view(problem.B, problem.T, problem.H, problem.HV // problem.H, problem.K).sum(3)
