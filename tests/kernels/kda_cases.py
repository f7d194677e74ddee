"""Inputs, the fp64 truth and the error metric that the tests of the KDA kernels share.

Runs on a CUDA device where there is one, else in Triton's interpreter on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.kda import chunk_kda, kda_gate, naive_recurrent_kda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    T: int = 70
    B: int = 1
    H: int = 1
    HV: int = 1
    K: int = 64
    V: int = 64
    dtype: torch.dtype = torch.bfloat16
    gate: str = "bounded"  # bounded, softplus or given
    beta: int = 1  # 0 given, 1 sigmoid, 2 twice the sigmoid
    l2_norm: bool = True
    v_first: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    raw_gate: float | None = None
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.B if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def flags(self) -> dict:
        return {
            "use_qk_l2norm_in_kernel": self.l2_norm,
            "use_gate_in_kernel": self.gate != "given",
            "use_beta_sigmoid_in_kernel": self.beta > 0,
            "allow_neg_eigval": self.beta == 2,
            "lower_bound": -5.0 if self.gate == "bounded" else None,
            "state_v_first": self.v_first,
            "output_final_state": True,
            "cu_seqlens": None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, device=DEVICE),
        }


def make_inputs(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    B, T, HV = case.B, case.T, case.HV
    keys = {name: normal(B, T, case.H, case.K) for name in "qk"}
    if not case.l2_norm:
        keys = {name: torch.nn.functional.normalize(x, dim=-1) for name, x in keys.items()}
    g = 2 * normal(B, T, HV, case.K) - 3
    if case.gate == "given":
        g = -g.abs()
    if case.raw_gate is not None:
        g = torch.full_like(g, case.raw_gate)
    beta = normal(B, T, HV)
    inputs = {**keys, "v": normal(B, T, HV, case.V), "g": g, "beta": beta if case.beta else beta.sigmoid()}
    inputs = {name: x.to(DEVICE, case.dtype) for name, x in inputs.items()}
    state = (case.V, case.K) if case.v_first else (case.K, case.V)
    inputs["initial_state"] = normal(case.sequences, HV, *state).to(DEVICE)
    if case.gate != "given":
        inputs["A_log"] = 0.3 * normal(HV).to(DEVICE)
        inputs["dt_bias"] = 0.3 * normal(HV, case.K).to(DEVICE)
    return inputs


def triton(case: Case, inputs: dict[str, torch.Tensor], **overrides):
    return chunk_kda(**inputs, **{**case.flags(), **overrides}, backend="triton")


def truth(case: Case, inputs: dict[str, torch.Tensor]):
    """The recurrence in fp64, gates and norms included."""
    x = {name: t.double() for name, t in inputs.items()}
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    if case.l2_norm:
        q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if case.gate != "given":
        g = kda_gate(g, x["A_log"], x["dt_bias"], -5.0 if case.gate == "bounded" else None)
    beta = case.beta * beta.sigmoid() if case.beta else beta
    state = x["initial_state"].transpose(-1, -2) if case.v_first else x["initial_state"]
    cu_seqlens = case.flags()["cu_seqlens"]
    o, final = naive_recurrent_kda(q, k, x["v"], g, beta, None, state, True, cu_seqlens)
    return o, final.transpose(-1, -2) if case.v_first else final


def with_gradients(
    function, case: Case, inputs: dict[str, torch.Tensor], do, d_final
) -> dict[str, torch.Tensor]:
    """Outputs and all gradients of `function(case, inputs)` under the given output gradients."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, final = function(case, leaves)
    torch.autograd.backward([o, final], [do.to(o.dtype), d_final.to(final.dtype)])
    results = {"o": o.detach(), "final_state": final.detach()}
    return results | {f"d{name}": x.grad for name, x in leaves.items()}


def output_gradients(case: Case, tokens: int | None = None):
    """Random gradients of o (zero from `tokens` on) and of the final state."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    do = torch.randn(case.B, case.T, case.HV, case.V, generator=generator)
    state = (case.V, case.K) if case.v_first else (case.K, case.V)
    d_final = torch.randn(case.sequences, case.HV, *state, generator=generator)
    if tokens is not None:
        do[:, tokens:] = 0
        d_final.zero_()
    return do.to(DEVICE, case.dtype), d_final.to(DEVICE)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the error over RMS of the truth."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-12)).item()


__all__ = [
    "DEVICE",
    "Case",
    "error",
    "make_inputs",
    "output_gradients",
    "replace",
    "triton",
    "truth",
    "with_gradients",
]
