"""`chunk_kda` and `fused_recurrent_kda` in PyTorch: the path of CPUs, and of GPUs without Triton."""

from __future__ import annotations

import torch

from kernels.kda.reference import KdaResult, kda_gate, naive_chunk_kda, naive_recurrent_kda
from kernels.norm.reference import l2_norm
from kernels.precision import accumulation_dtype


def reference_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    form: str,
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
    """The flags of the public functions around the core; `form` is "chunk" or "recurrent"."""
    dtype = accumulation_dtype(v)
    if use_qk_l2norm_in_kernel:
        q, k = l2_norm(q.to(dtype)), l2_norm(k.to(dtype))
    if use_gate_in_kernel:
        g = kda_gate(g.to(dtype), A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta.to(dtype)) * (2.0 if allow_neg_eigval else 1.0)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    core = naive_recurrent_kda if form == "recurrent" else naive_chunk_kda
    out, state = core(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens)
    if state is not None and state_v_first:
        state = state.transpose(-1, -2).contiguous()
    return out, state
