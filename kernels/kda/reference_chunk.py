"""`chunk_kda` and `fused_recurrent_kda` in PyTorch: the path of CPUs, and of GPUs without Triton.

Legend: cell one (chunk, value head), C tokens of a chunk, K key dim, V value dim. Sequences are cut into
chunks (`reference_layout`); what needs no state runs on all cells at once; a short loop carries the states.

Forward (R/U form), with H the state at a chunk's start, Q~ = scale q e^G, K~ = k e^G, K^ = k e^(G_C - G):

    R = beta (V - K~ H)     U = T R     O = Q~ H + P U     H' = e^(G_C) H + K^^T U

Backward (X form), with D = [-X; dO] stacked like rows = [beta k; scale q]:

    dU = P^T dO + K^ dH'     X = T^T dU     d_AP = tril(D U^T)     dH = e^(G_C) dH' + Q~^T dO - (beta K~)^T X
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kernels.kda.reference import KdaResult, kda_gate, naive_recurrent_kda
from kernels.kda.reference_intra import (
    Decay,
    factored_decay,
    mask_products_,
    pairwise_decay,
    products,
    products_backward,
    unit_inverse,
)
from kernels.kda.reference_layout import ChunkLayout, chunk_layout
from kernels.norm.reference import l2_norm
from kernels.precision import accumulation_dtype

# Measured on CPU at K = V = 32: 32 balances the work inside chunks against the scan. At K3's bound of -5
# a token, 16 always factors.
CHUNKS = (32, 16)
# Below this length the recurrence has fewer operations than one chunk.
RECURRENT_TOKENS = 4


def reference_kda(
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
) -> KdaResult:
    """The flags of the public functions around the chunkwise core; arguments as in `chunk_kda`."""
    dtype = accumulation_dtype(v)
    if use_qk_l2norm_in_kernel:
        q, k = l2_norm(q.to(dtype)), l2_norm(k.to(dtype))
    if use_gate_in_kernel:
        g = kda_gate(g.to(dtype), A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta.to(dtype))
        beta = 2 * beta if allow_neg_eigval else beta
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    if cu_seqlens is None and v.shape[1] <= RECURRENT_TOKENS:
        out, state = naive_recurrent_kda(q, k, v, g, beta, scale, initial_state, output_final_state)
    else:
        out, state = _ChunkKda.apply(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    return out, state


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        dtype, heads = accumulation_dtype(v), v.shape[2]
        layout, decay = _cut(q.shape, v.shape, g, cu_seqlens, dtype)
        k_c = layout.gather(k, layout.rows_qk, dtype)
        v_c = layout.gather(v, layout.rows_v, dtype)
        beta_c = layout.gather(beta.unsqueeze(-1), layout.rows_v, dtype)
        rows = torch.cat([beta_c * k_c, layout.gather(q, layout.rows_qk, dtype).mul_(scale)], 1)
        AP, decayed, k_back, k_tail = _intra(rows, k_c, decay)
        T = unit_inverse(AP[:, : layout.chunk])
        state = _sorted_states(initial_state, layout, heads, k_c.shape[-1], v_c)
        U, starts = _scan(layout, decay.total, decayed, k_tail, T, beta_c * v_c, state)
        out = torch.bmm(AP[:, layout.chunk :], U).baddbmm_(decayed[:, layout.chunk :], starts)
        ctx.layout, ctx.decay, ctx.scale = layout, decay, scale
        ctx.save_for_backward(rows, k_c, v_c, beta_c, AP, decayed, k_back, k_tail, T, U, starts)
        ctx.inputs = [(x.shape, x.dtype) for x in (q, k, v, g, beta.unsqueeze(-1))]
        ctx.state_dtype = None if initial_state is None else initial_state.dtype
        ctx.set_materialize_grads(False)
        final = layout.unsorted(state.unflatten(0, (-1, heads))) if output_final_state else None
        return layout.scatter(out, v.shape[:3]).to(v.dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out, d_final):
        rows, k, v, beta, AP, decayed, k_back, k_tail, T, U, starts = ctx.saved_tensors
        layout, decay, chunk = ctx.layout, ctx.decay, ctx.layout.chunk
        heads = ctx.inputs[2][0][2]
        d_o = torch.zeros_like(U) if d_out is None else layout.gather(d_out, layout.rows_v, U.dtype)
        d_state = _sorted_states(d_final, layout, heads, k.shape[-1], v)
        X, d_next = _reverse_scan(layout, decay.total, decayed, k_tail, AP, T, d_o, d_state)
        D = torch.cat([X.neg(), d_o], 1)
        d_tail = torch.bmm(U, d_next.mT)
        d_rows, d_k = _intra_backward(D, U, starts, d_tail, rows, k, AP, decayed, k_back, decay)
        d_total = (k_tail * d_tail).sum(1).addcmul_(decay.total, (starts * d_next).sum(-1))
        d_g = _decay_gradient(rows, d_rows, k, d_k, d_total)
        d_beta = (X * v).sum(-1, keepdim=True) + (d_rows[:, :chunk] * k).sum(-1, keepdim=True)
        d_k.addcmul_(d_rows[:, :chunk], beta)
        d_cells = [d_rows[:, chunk:] * ctx.scale, d_k, X * beta, d_g, d_beta]
        grads = [layout.gradient(x, *like) for x, like in zip(d_cells, ctx.inputs, strict=True)]
        d_initial = None
        if ctx.state_dtype is not None:
            d_initial = layout.unsorted(d_state.unflatten(0, (-1, heads))).to(ctx.state_dtype)
        return *grads[:4], grads[4].squeeze(-1), None, d_initial, None, None


def _cut(q_shape, v_shape, g, cu_seqlens, dtype) -> tuple[ChunkLayout, Decay]:
    """The largest chunk whose decay factors; the smallest with pairwise exponents if none does."""
    batch, tokens, heads, _ = q_shape
    for chunk in CHUNKS:
        layout = chunk_layout(batch, tokens, heads, v_shape[2], chunk, cu_seqlens, g.device)
        g_c = layout.gather(g, layout.rows_v, dtype)
        decay = factored_decay(g_c)
        if decay is not None:
            return layout, decay
    return layout, pairwise_decay(g_c)


def _intra(rows, k, decay: Decay):
    """AP, the decayed rows, e^-G k (None in the pairwise form) and e^(G_C - G) k."""
    decayed = (rows.unflatten(1, (2, -1)) * decay.forward.unsqueeze(1)).flatten(1, 2)
    if decay.tail is not None:
        return products(rows, k, decay), decayed, None, k * decay.tail
    assert decay.backward is not None
    k_back = k * decay.backward
    return mask_products_(torch.bmm(decayed, k_back.mT)), decayed, k_back, k_back * decay.total.unsqueeze(1)


def _intra_backward(D, U, starts, d_tail, rows, k, AP, decayed, k_back, decay: Decay):
    """Gradients of the undecayed rows, and of the keys where they stand as columns or feed the next state."""
    d_AP = mask_products_(torch.bmm(D, U.mT))
    d_decayed = torch.bmm(D, starts.mT)
    halves = (2, decay.forward.shape[1])
    if decay.tail is not None:
        d_rows, d_k = products_backward(d_AP, rows, k, decay)
        d_rows.unflatten(1, halves).addcmul_(d_decayed.unflatten(1, halves), decay.forward.unsqueeze(1))
        return d_rows, d_k.addcmul_(d_tail, decay.tail)
    d_rows = d_decayed.baddbmm_(d_AP, k_back)
    d_rows.unflatten(1, halves).mul_(decay.forward.unsqueeze(1))
    d_k = (d_tail * decay.total.unsqueeze(1)).baddbmm_(d_AP.mT, decayed)
    return d_rows, d_k.mul_(decay.backward)


def _decay_gradient(rows, d_rows, k, d_k, d_total):
    """d_g, the reversed running sum of dG = rows . d_rows - k . d_k (+ d_total in the last row)."""
    d_g = (rows * d_rows).unflatten(1, (2, -1)).sum(1).addcmul_(k, d_k, value=-1)
    step = d_g.unbind(1)
    step[-1].add_(d_total)
    for i in range(len(step) - 2, -1, -1):
        step[i].add_(step[i + 1])
    return d_g


def _scan(layout: ChunkLayout, total, decayed, k_tail, T, beta_v, state):
    """U of every cell and the state at its start; `state` becomes the final states."""
    U, starts = torch.empty_like(beta_v), beta_v.new_empty(len(beta_v), *state.shape[1:])
    k_decayed = decayed[:, : layout.chunk]
    for first, end in layout.steps:
        cells, running = slice(first, end), state[: end - first]
        starts[cells] = running
        R = torch.baddbmm(beta_v[cells], k_decayed[cells], running, alpha=-1)
        torch.bmm(T[cells], R, out=U[cells])
        running.mul_(total[cells].unsqueeze(-1)).baddbmm_(k_tail[cells].mT, U[cells])
    return U, starts


def _reverse_scan(layout: ChunkLayout, total, decayed, k_tail, AP, T, d_o, d_state):
    """X of every cell and the gradient of the state at its end; `d_state` becomes that of the initial
    states.
    """
    X, d_next = torch.empty_like(d_o), d_o.new_empty(len(d_o), *d_state.shape[1:])
    k_decayed = decayed[:, : layout.chunk]
    d_U = torch.bmm(AP[:, layout.chunk :].mT, d_o)
    from_out = torch.bmm(decayed[:, layout.chunk :].mT, d_o)
    for first, end in reversed(layout.steps):
        cells, running = slice(first, end), d_state[: end - first]
        d_next[cells] = running
        torch.bmm(T[cells].mT, d_U[cells].baddbmm_(k_tail[cells], running), out=X[cells])
        running.mul_(total[cells].unsqueeze(-1)).add_(from_out[cells])
        running.baddbmm_(k_decayed[cells].mT, X[cells], alpha=-1)
    return X, d_next


def _sorted_states(states, layout: ChunkLayout, heads: int, key_dim: int, like):
    """[N * HV, K, V] copy of `states` [N, HV, K, V] (zeros for None), longest sequence first."""
    if states is None:
        return like.new_zeros(len(layout.order) * heads, key_dim, like.shape[-1])
    return states.to(like.dtype).index_select(0, layout.order).flatten(0, 1)
