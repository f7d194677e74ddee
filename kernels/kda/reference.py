"""Plain references of Kimi Delta Attention: the recurrence, its chunkwise R/U form, and the gates.

Legend: B batch, T tokens, N sequences, H query/key heads, HV value heads (HV % H == 0), K key dim, V value
dim, C tokens of a chunk. `g` is the log decay (<= 0), `beta` the write strength. State is [N, HV, K, V].

Sources: Kimi Linear (KDA recurrence, eq. 9), Kimi K3 report eq. 1-4 (lower-bounded gate, chunkwise form).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype

KdaResult = tuple[torch.Tensor, torch.Tensor | None]


def kda_gate(
    raw_g_BTHK: torch.Tensor,
    A_log_H: torch.Tensor | None,
    dt_bias_HK: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """Log decay from its logits: `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, or, without a bound,
    `-exp(A_log) * softplus(g + dt_bias)`.

    Args:
        raw_g_BTHK: [..., H, K] logits.
        A_log_H: [H], one scalar a head; None means exp(A_log) = 1.
        dt_bias_HK: [H, K] or [H * K], or None.
        lower_bound: the bound (K3: -5) or None for the softplus gate of Kimi Linear and Gated DeltaNet.

    Returns:
        [..., H, K] log decay, fp32 (fp64 for fp64 logits).
    """
    return _Gate.apply(raw_g_BTHK, A_log_H, dt_bias_HK, lower_bound)


def naive_kda_gate(
    raw_g_BTHK: torch.Tensor,
    A_log_H: torch.Tensor | None,
    dt_bias_HK: torch.Tensor | None = None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """`kda_gate` in plain words."""
    dtype = accumulation_dtype(raw_g_BTHK)
    z = raw_g_BTHK.to(dtype)
    if dt_bias_HK is not None:
        z = z + dt_bias_HK.to(dtype).view(raw_g_BTHK.shape[-2:])
    rate = 1.0 if A_log_H is None else _rate(A_log_H, dtype)
    return -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


def _rate(A_log_H: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """exp(A_log) [H, 1], held below infinity: an infinite rate times a zero logit has no value."""
    return A_log_H.to(dtype).exp().clamp(max=torch.finfo(dtype).max).unsqueeze(-1)


class _Gate(torch.autograd.Function):
    """Backward written out. With y = exp(A) z: g = bound * sigmoid(y), or g = -exp(A) softplus(z)."""

    @staticmethod
    def forward(ctx: Any, raw, A_log, dt_bias, lower_bound):
        dtype = accumulation_dtype(raw)
        z = raw.to(dtype)
        if dt_bias is not None:
            z = z + dt_bias.to(dtype).view(raw.shape[-2:])
        rate = z.new_ones(1) if A_log is None else _rate(A_log, dtype)
        gate = F.softplus(z).mul_(-rate) if lower_bound is None else torch.sigmoid(rate * z).mul_(lower_bound)
        ctx.save_for_backward(z, rate, gate)
        ctx.lower_bound, ctx.dtype = lower_bound, raw.dtype
        ctx.parameters = [None if p is None else (p.shape, p.dtype) for p in (A_log, dt_bias)]
        return gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gate):
        z, rate, gate = ctx.saved_tensors
        A_log, dt_bias = ctx.parameters
        over = tuple(range(z.dim() - 2))
        if ctx.lower_bound is None:
            d_z = d_gate * torch.sigmoid(z) * -rate
            d_A = d_gate * gate
        else:
            # d g / d y = g (1 - g / bound), an exact 0 where the sigmoid is saturated.
            d_z = (d_gate * gate).mul_(1 - gate / ctx.lower_bound).mul_(rate)
            d_A = d_z * z
        d_A = None if A_log is None else d_A.sum((*over, -1)).view(A_log[0]).to(A_log[1])
        d_bias = None if dt_bias is None else d_z.sum(over).view(dt_bias[0]).to(dt_bias[1])
        return d_z.to(ctx.dtype), d_A, d_bias, None


def naive_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> KdaResult:
    """KDA, token by token: decay, then the delta rule on the decayed state, then the read-out.

        S <- diag(exp g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T (scale q_t)

    Args:
        q, k: [B, T, H, K].  v: [B, T, HV, V].  g: [B, T, HV, K] log decay.  beta: [B, T, HV].
        scale: of the queries; default K ** -0.5.
        initial_state: [N, HV, K, V], N = B or the number of sequences.
        cu_seqlens: [N + 1] boundaries of sequences packed into B = 1; empty sequences are allowed.

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state [N, HV, K, V] (fp32, or fp64) or None.
    """
    return _by_sequence(_recurrent, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def naive_chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    chunk_size: int = 64,
) -> KdaResult:
    """KDA by chunks in the R/U form; arguments and results of `naive_recurrent_kda`, and `chunk_size`.

    With G the running sum of g inside a chunk and H the state at its start:

        A_rs = beta_r sum_d k_rd k_sd e^(G_rd - G_sd)   (s < r)
        P_rs = scale sum_d q_rd k_sd e^(G_rd - G_sd)    (s <= r)
        R = beta (V - (K e^G) H)         (I + A) U = R
        O = scale (Q e^G) H + P U        H' = e^(G_C) H + (K e^(G_C - G))^T U

    Every exponent is a difference that is <= 0, taken pair by pair: exact for any gate, at C * C * K memory.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} is out of range; allowed: 1 or more")

    def chunked(q, k, v, g, beta, state):
        inputs = (q, k, v, g, beta)
        outs = [inputs[2][:, :, :0]]
        for start in range(0, inputs[0].shape[2], chunk_size):
            q, k, v, g, beta = (x[:, :, start : start + chunk_size] for x in inputs)
            out, state = _one_chunk(q, k, v, g, beta, state)
            outs.append(out)
        return torch.cat(outs, 2), state

    return _by_sequence(chunked, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)


def _recurrent(q, k, v, g, beta, state):
    outs = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + k[:, :, t].unsqueeze(-1) * (beta[:, :, t].unsqueeze(-1) * error).unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return (torch.stack(outs, 2) if outs else v.clone()), state


def _one_chunk(q, k, v, g, beta, state):
    """One chunk of every sequence: [B, HV, C, ...] inputs (q scaled), state [B, HV, K, V]."""
    # Summed in fp64: one gate of -1000 would cost an fp32 sum the digits of every later difference.
    G = g.to(torch.float64).clamp(min=-1e4).cumsum(2)
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    exponent = G.unsqueeze(3) - G.unsqueeze(2)
    decay = exponent.masked_fill(~causal[..., None], -torch.inf).exp().to(q.dtype)
    A = beta.unsqueeze(-1) * torch.einsum("bhrd,bhsd,bhrsd->bhrs", k, k, decay).tril(-1)
    P = torch.einsum("bhrd,bhsd,bhrsd->bhrs", q, k, decay)
    from_start, to_end = G.exp().to(q.dtype), (G[:, :, -1:] - G).exp().to(q.dtype)
    R = beta.unsqueeze(-1) * (v - (k * from_start) @ state)
    U = torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True)
    out = (q * from_start) @ state + P @ U
    state = from_start[:, :, -1].unsqueeze(-1) * state + (k * to_end).transpose(-1, -2) @ U
    return out, state


def _by_sequence(
    one: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None,
    initial_state: torch.Tensor | None,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None,
) -> KdaResult:
    """Run `one(q, k, v, g, beta, state)` on [B, HV, T, ...] tensors, sequence by sequence."""
    dtype = accumulation_dtype(v)
    groups = v.shape[2] // q.shape[2]
    q, k = (x.to(dtype).repeat_interleave(groups, 2).transpose(1, 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    v_dtype = v.dtype
    v, g, beta = (x.to(dtype).transpose(1, 2) for x in (v, g, beta))
    bounds = None if cu_seqlens is None else [int(c) for c in cu_seqlens]
    n = v.shape[0] if bounds is None else len(bounds) - 1
    if initial_state is None:
        state = v.new_zeros(n, v.shape[1], q.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(dtype)
    if bounds is None:
        out, state = one(q, k, v, g, beta, state)
    else:
        outs, states = [v[:, :, :0]], [state[:0]]
        for i, (start, end) in enumerate(itertools.pairwise(bounds)):
            o, s = one(*(x[:, :, start:end] for x in (q, k, v, g, beta)), state[i : i + 1])
            outs.append(o)
            states.append(s)
        out, state = torch.cat(outs, 2), torch.cat(states)
    return out.transpose(1, 2).to(v_dtype), (state if output_final_state else None)
