"""`chunk_kda` and `fused_recurrent_kda`, with the arguments of their namesakes in fla-core 0.6.0."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kernels.backend import use_triton
from kernels.kda.reference_chunk import reference_kda


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Kimi Delta Attention over whole sequences, differentiable once in every float tensor.

    Args:
        q, k: [B, T, H, K].
        v: [B, T, HV, V]; HV is a multiple of H (grouped value heads).
        g: [B, T, HV, K], the log decay, or its logits with `use_gate_in_kernel`.
        beta: [B, T, HV], the write strength, or its logits with `use_beta_sigmoid_in_kernel`.
        scale: of the queries; default K ** -0.5.
        initial_state: [N, HV, K, V] fp32 (fp64 with fp64 inputs), or [N, HV, V, K] with `state_v_first`;
            N = B, or the number of sequences.
        output_final_state: return the state after the last token of each sequence.
        use_qk_l2norm_in_kernel: q, k <- x / sqrt(sum x^2 + 1e-6).
        use_gate_in_kernel: g <- `kda_gate(g, A_log, dt_bias, lower_bound)`.
        use_beta_sigmoid_in_kernel: beta <- sigmoid(beta), or 2 sigmoid(beta) with `allow_neg_eigval`.
        safe_gate, disable_recompute, use_graph, max_num_seqs, cu_seqlens_cpu: accepted, without effect on the
            result: every gate is handled safely.
        lower_bound: bound of the gate (K3: -5), with `use_gate_in_kernel`; None takes the softplus gate.
        state_v_first: states are [N, HV, V, K].
        cu_seqlens: [N + 1] boundaries of sequences packed into B = 1; empty ones keep their state.
        A_log: [HV].  dt_bias: [HV * K] or [HV, K].
        chunk_size: 32 or 64; a hint that does not change the result beyond rounding.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns:
        o [B, T, HV, V] in v's dtype, and the final state or None.

    Raises:
        NotImplementedError: `return_intermediate_states`, `cp_context` or an unknown argument, by name.
        ValueError: shapes or flags that contradict each other.
    """
    state_v_first = _renamed_layout(kwargs, state_v_first)
    _refuse(kwargs, return_intermediate_states=return_intermediate_states, cp_context=cp_context)
    if chunk_size not in (32, 64):
        raise ValueError(f"chunk_size={chunk_size} is not supported; allowed: 32, 64")
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
        raise ValueError(f"lower_bound={lower_bound} with safe_gate=True; allowed: -5 <= lower_bound < 0")
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    _check(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, A_log, dt_bias)
    _check_flags(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, lower_bound)
    arguments = {
        "scale": k.shape[-1] ** -0.5 if scale is None else float(scale),
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "lower_bound": lower_bound,
        "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    return _run(backend, "chunk", q, k, v, g, beta, arguments)


def fused_recurrent_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    *,
    backend: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KDA for decoding; arguments, results and errors of `chunk_kda`, in fla-core's order."""
    state_v_first = _renamed_layout(kwargs, state_v_first)
    _refuse(kwargs)
    if not use_gate_in_kernel:
        A_log = dt_bias = lower_bound = None
    _check(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, A_log, dt_bias)
    _check_flags(use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, A_log, lower_bound)
    arguments = {
        "scale": k.shape[-1] ** -0.5 if scale is None else float(scale),
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "lower_bound": lower_bound,
        "state_v_first": state_v_first,
        "cu_seqlens": cu_seqlens,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    return _run(backend, "recurrent", q, k, v, g, beta, arguments)


def _run(backend, form, q, k, v, g, beta, arguments):
    """The Triton kernels where they are chosen, one path for both forms; else the reference."""
    if use_triton(backend, q):
        from kernels.kda.autograd import triton_kda, unsupported

        reason = unsupported(q, v)
        if reason is None:
            return triton_kda(q, k, v, g, beta, **arguments)
        if backend == "triton":
            raise NotImplementedError(f"backend='triton' does not support {reason}; use backend='auto'")
    return reference_kda(q, k, v, g, beta, **arguments)


def _renamed_layout(kwargs: dict[str, Any], state_v_first: bool) -> bool:
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("pass state_v_first or its old name transpose_state_layout, not both")
    warnings.warn("transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def _refuse(unknown: dict[str, Any], **unsupported: Any) -> None:
    for name in unknown:
        raise NotImplementedError(f"argument {name!r} is not supported")
    for name, value in unsupported.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"argument {name!r} is not supported; leave it at its default")


def _check_flags(gate_in_kernel, beta_sigmoid, allow_neg_eigval, A_log, lower_bound) -> None:
    if allow_neg_eigval and not beta_sigmoid:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True")
    if gate_in_kernel and A_log is None and lower_bound is None:
        raise ValueError("use_gate_in_kernel=True needs A_log, or lower_bound")


def _check(q, k, v, g, beta, initial_state, state_v_first, cu_seqlens, A_log, dt_bias) -> None:
    if q.dim() != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must have one shape [B, T, H, K]; got {list(q.shape)} and {list(k.shape)}")
    batch, tokens, heads, key_dim = q.shape
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or heads == 0 or v.shape[2] % heads:
        raise ValueError(f"v must be [B, T, HV, V] with HV a multiple of H={heads}; got {list(v.shape)}")
    value_heads, value_dim = v.shape[2:]
    gate_shape = (batch, tokens, value_heads, key_dim)
    for name, tensor, shape in (("g", g, gate_shape), ("beta", beta, gate_shape[:3])):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}; got {list(tensor.shape)}")
    if A_log is not None and A_log.numel() != value_heads:
        raise ValueError(f"A_log must have HV={value_heads} elements; got {A_log.numel()}")
    if dt_bias is not None and dt_bias.numel() != value_heads * key_dim:
        raise ValueError(f"dt_bias must have HV * K={value_heads * key_dim} elements; got {dt_bias.numel()}")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"cu_seqlens needs sequences packed into B=1; got B={batch}")
    if initial_state is not None:
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        wanted = [sequences, value_heads, key_dim, value_dim]
        if state_v_first:
            wanted[2:] = value_dim, key_dim
        if list(initial_state.shape) != wanted:
            layout = f"with state_v_first={state_v_first}"
            raise ValueError(f"initial_state must be {wanted} {layout}; got {list(initial_state.shape)}")
