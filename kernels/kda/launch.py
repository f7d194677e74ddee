"""Sizes, workspace and launches of the KDA kernels. No launch reads a tensor on the host; grids depend on
shapes alone.

Legend: B batch, T tokens, N sequences, H query/key heads, HV value heads, K key and V value channels, C =
64 tokens of a chunk, KP = K padded to a power of two, S chunk slots (tiles.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.kda.gradient import kda_gradient_kernel
from kernels.kda.pairs import kda_pairs_kernel
from kernels.kda.prepare import kda_prepare_kernel
from kernels.kda.reverse_scan import kda_reverse_scan_kernel
from kernels.kda.scan import kda_scan_kernel

CHUNK = 64
# (channels of a slice, warps, registers of a thread or None) of the kernels that are parallel over chunks.
PREPARE_SHAPE: tuple[int, int, int | None] = (32, 4, None)
GRADIENT_SHAPE: tuple[int, int, int | None] = (32, 4, None)
GATES = {"given": 0, "bounded": 1, "softplus": 2}


@dataclass(frozen=True)
class Problem:
    """What a call computes, beyond its tensors: sizes and the work done inside the kernels."""

    B: int
    T: int
    N: int
    H: int
    HV: int
    K: int
    V: int
    scale: float
    gate: str = "given"
    lower_bound: float = 0.0
    beta: int = 0  # 0 given, 1 sigmoid, 2 twice the sigmoid
    l2_norm: bool = False
    v_first: bool = False
    varlen: bool = False
    covered: bool = False  # the packed sequences are known to reach the last token

    @property
    def new_output(self):
        """How outputs a token are made: tokens after the last packed sequence belong to none and read as
        zero."""
        return torch.zeros if self.varlen and not self.covered else torch.empty

    @property
    def KP(self) -> int:
        return max(64, triton.next_power_of_2(self.K))

    @property
    def slots(self) -> int:
        if self.varlen:
            return self.T // CHUNK + self.N
        return self.B * triton.cdiv(self.T, CHUNK)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        inner = (self.V, self.K) if self.v_first else (self.K, self.V)
        return (self.N, self.HV, *inner)


@dataclass
class Workspace:
    """Per chunk and head, what the first launch leaves for the scans; fp16 operands, fp32 vectors."""

    q_decayed: torch.Tensor  # [S, HV, C, KP]
    k_decayed: torch.Tensor  # [S, HV, C, KP]
    k_remaining: torch.Tensor  # [S, HV, C, KP]
    n: torch.Tensor  # [S, HV, C, C]
    p: torch.Tensor  # [S, HV, C, C]
    decay: torch.Tensor  # [S, HV, KP]
    beta: torch.Tensor  # [S, HV, C]
    row_scale: torch.Tensor  # [S, HV, 2, C] of q and k: 1 / norm, or the power of two that stands for it

    def without_operands(self) -> Workspace:
        """The vectors alone: what the backward still reads once the reverse scan is done."""
        none = self.q_decayed.new_empty(0)
        return replace(self, q_decayed=none, k_decayed=none, k_remaining=none, n=none, p=none)

    def tiles(self) -> list[TensorDescriptor]:
        """The operands of the scans as rows of [C, width] tiles: loads by the copy engine cost no address
        registers."""
        operands = (self.q_decayed, self.k_decayed, self.k_remaining, self.n, self.p)
        return [
            TensorDescriptor(
                x, [max(1, x.numel() // x.shape[-1]), x.shape[-1]], [x.shape[-1], 1], [CHUNK, x.shape[-1]]
            )
            for x in operands
        ]

    @staticmethod
    def allocate(problem: Problem, device: torch.device) -> Workspace:
        tiles = (problem.slots, problem.HV)

        def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
            return torch.empty(*tiles, *shape, dtype=dtype, device=device)

        keys = (CHUNK, problem.KP)
        return Workspace(
            empty(*keys),
            empty(*keys),
            empty(*keys),
            empty(CHUNK, CHUNK),
            empty(CHUNK, CHUNK),
            empty(problem.KP, dtype=torch.float32),
            empty(CHUNK, dtype=torch.float32),
            empty(2, CHUNK, dtype=torch.float32),
        )


@dataclass
class Saved:
    """What the forward scan leaves for the backward: Z [S, HV, C, V] and the state before each chunk [S, HV,
    V, KP]."""

    z: torch.Tensor
    h: torch.Tensor

    @staticmethod
    def allocate(problem: Problem, device: torch.device) -> Saved:
        tiles = (problem.slots, problem.HV)
        z = torch.empty(*tiles, CHUNK, problem.V, dtype=torch.bfloat16, device=device)
        return Saved(z, torch.empty(*tiles, problem.V, problem.KP, dtype=torch.bfloat16, device=device))


@cache
def token_masks(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """0/1 matrices [4, C, C] over pairs of tokens, made once a device.

    sums, fp16: row r names the tokens s <= r; s > r; s between r and the middle of its block of 32; and of
    64 tokens.
    spreads, bf16: their transposes.
    halves, fp16: pairs (r, s) of a block of 32 tokens with r in its second and s in its first half; the
    reverse; the
    same two for blocks of 64 tokens.
    """
    r = torch.arange(CHUNK, device=device)[:, None]
    s = torch.arange(CHUNK, device=device)[None, :]
    masks, halves = [s <= r, s > r], []
    for half in (16, 32):
        middle = r // (2 * half) * (2 * half) + half
        masks.append(((s >= middle) & (s <= r)) | ((s > r) & (s < middle)))
        meets = (r // (2 * half) == s // (2 * half)) & (r // half > s // half)
        halves += [meets, meets.T]
    sums = torch.stack(masks)
    spreads = sums.transpose(1, 2).to(torch.bfloat16).contiguous()
    return sums.to(torch.float16), spreads, torch.stack(halves).to(torch.float16)


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head of a [B, T, heads, dim] or [B, T, heads] tensor; channels are
    contiguous."""
    assert x.dim() == 3 or x.shape[-1] == 1 or x.stride(-1) == 1, x.stride()
    return x.stride(0), x.stride(1), x.stride(2)


def prepare(problem: Problem, q, k, g, beta, A_log, dt_bias, cu_seqlens) -> Workspace:
    """First launch: operands of the scans, in parallel over chunks and value heads."""
    work = Workspace.allocate(problem, q.device)
    if problem.slots == 0:
        return work
    kda_prepare_kernel[(problem.slots * problem.HV,)](
        q,
        k,
        g,
        beta,
        A_log,
        dt_bias,
        token_masks(q.device)[0],
        cu_seqlens,
        work.q_decayed,
        work.k_decayed,
        work.k_remaining,
        work.n,
        work.p,
        work.decay,
        work.beta,
        work.row_scale,
        problem.lower_bound,
        problem.T,
        problem.N,
        *row_strides(q),
        *row_strides(k),
        *row_strides(g),
        *row_strides(beta),
        HV=problem.HV,
        GROUP=problem.HV // problem.H,
        K=problem.K,
        KP=problem.KP,
        D=PREPARE_SHAPE[0],
        GATE=GATES[problem.gate],
        HAS_A=A_log is not None,
        HAS_BIAS=dt_bias is not None,
        BETA=problem.beta,
        L2NORM=problem.l2_norm,
        VARLEN=problem.varlen,
        num_warps=PREPARE_SHAPE[1],
        maxnreg=PREPARE_SHAPE[2],
        num_stages=1,
    )
    return work


def scan(
    problem: Problem,
    work: Workspace,
    v: torch.Tensor,
    initial_state: torch.Tensor | None,
    final_state: torch.Tensor | None,
    saved: Saved | None,
    cu_seqlens: torch.Tensor | None,
    want_output: bool = True,
) -> torch.Tensor:
    """Second launch: o [B, T, HV, V] (empty unless wanted), and `final_state` and `saved` where given."""
    rows = problem.T if want_output else 0
    o = problem.new_output(problem.B, rows, problem.HV, problem.V, dtype=v.dtype, device=v.device)
    BV, warps, stages = scan_shape(problem)
    kda_scan_kernel[(triton.cdiv(problem.V, BV), problem.N * problem.HV)](
        *work.tiles(),
        work.decay,
        work.beta,
        work.row_scale,
        v,
        o,
        None if saved is None else saved.z,
        None if saved is None else saved.h,
        initial_state,
        final_state,
        cu_seqlens,
        problem.scale,
        problem.T,
        *row_strides(v),
        HV=problem.HV,
        K=problem.K,
        V=problem.V,
        KP=problem.KP,
        BV=BV,
        V_FIRST=problem.v_first,
        HAS_INITIAL=initial_state is not None,
        HAS_FINAL=final_state is not None,
        SAVE=saved is not None,
        OUTPUT=want_output,
        SCALED=not problem.l2_norm,
        VARLEN=problem.varlen,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    return o


def scan_shape(problem: Problem) -> tuple[int, int, int]:
    """(value channels of a program, warps, pipeline stages) of the forward scan, measured on H200."""
    if problem.KP > 128:
        return 64, 8, 1
    if problem.V > 64 and problem.N * problem.HV > 66:
        return 128, 8, 2
    return 64, 4, 2


def reverse_scan_shape(problem: Problem) -> tuple[int, int, int]:
    """The same of the reverse scan: without staging two programs share a multiprocessor."""
    if problem.KP > 128:
        return 64, 8, 1
    return 64, 4, 1 if problem.N * problem.HV > 66 else 2


def reverse_scan(
    problem: Problem,
    work: Workspace,
    do: torch.Tensor,
    d_final_state: torch.Tensor | None,
    d_initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Saved:
    """First backward launch: X and dS after each chunk, as `Saved`; fills `d_initial_state`."""
    out = Saved.allocate(problem, do.device)
    BV, warps, stages = reverse_scan_shape(problem)
    kda_reverse_scan_kernel[(triton.cdiv(problem.V, BV), problem.N * problem.HV)](
        *work.tiles(),
        work.decay,
        work.beta,
        work.row_scale,
        do,
        out.z,
        out.h,
        d_final_state,
        d_initial_state,
        cu_seqlens,
        problem.scale,
        problem.T,
        *row_strides(do),
        HV=problem.HV,
        K=problem.K,
        V=problem.V,
        KP=problem.KP,
        BV=BV,
        V_FIRST=problem.v_first,
        HAS_FINAL=d_final_state is not None,
        HAS_INITIAL=d_initial_state is not None,
        SCALED=not problem.l2_norm,
        VARLEN=problem.varlen,
        STAGES=stages,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@dataclass
class Gradients:
    """q, k [B, T, HV, K] (per value head), g [B, T, HV, K], beta [B, T, HV]; parameters summed per chunk,
    fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    dt_bias: torch.Tensor | None  # [S, HV, KP]
    A_log: torch.Tensor | None  # [S, HV, slices]

    @staticmethod
    def allocate(problem: Problem, q, v, g, beta) -> Gradients:
        keys = (problem.B, problem.T, problem.HV, problem.K)
        partial = (problem.slots, problem.HV)
        slices = problem.KP // GRADIENT_SHAPE[0]

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=q.device)

        key_dtype = q.dtype if problem.HV == problem.H else torch.float32
        parameters = problem.gate != "given"

        def output(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return problem.new_output(*shape, dtype=dtype, device=q.device)

        return Gradients(
            output(*keys, dtype=key_dtype),
            output(*keys, dtype=key_dtype),
            output(*keys[:3], problem.V, dtype=v.dtype),
            output(*keys, dtype=g.dtype),
            output(*keys[:3], dtype=beta.dtype),
            empty(*partial, problem.KP) if parameters else None,
            empty(*partial, slices) if parameters else None,
        )


def gradient(
    problem: Problem,
    work: Workspace,
    saved: Saved,
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    o,
    do,
    reverse: Saved,
    cu_seqlens,
) -> Gradients:
    """Second and third backward launches: every gradient of the inputs."""
    out = Gradients.allocate(problem, q, v, g, beta)
    if problem.slots == 0:
        return out
    tiles = (problem.slots, problem.HV)
    dp, dp_t, dl = (torch.empty(*tiles, CHUNK, CHUNK, dtype=torch.float16, device=q.device) for _ in range(3))
    rows = torch.empty(*tiles, 3, CHUNK, dtype=torch.float32, device=q.device)
    unit = torch.empty(*tiles, dtype=torch.float32, device=q.device)
    VP = max(16, triton.next_power_of_2(problem.V))
    kda_pairs_kernel[(problem.slots * problem.HV,)](
        v,
        o,
        do,
        reverse.z,
        saved.z,
        work.beta,
        work.row_scale,
        cu_seqlens,
        dp,
        dp_t,
        dl,
        rows,
        unit,
        out.v,
        out.beta,
        problem.scale,
        problem.T,
        problem.N,
        *row_strides(v),
        *row_strides(do),
        HV=problem.HV,
        V=problem.V,
        VP=VP,
        BETA=problem.beta,
        L2NORM=problem.l2_norm,
        VARLEN=problem.varlen,
        num_warps=4,
        num_stages=1,
    )
    channels, warps, registers = GRADIENT_SHAPE
    kda_gradient_kernel[(problem.slots * problem.HV * (problem.KP // channels),)](
        q,
        k,
        g,
        A_log,
        dt_bias,
        do,
        reverse.z,
        saved.z,
        saved.h,
        reverse.h,
        work.beta,
        work.row_scale,
        dp,
        dp_t,
        dl,
        rows,
        unit,
        *token_masks(q.device),
        cu_seqlens,
        out.q,
        out.k,
        out.g,
        out.dt_bias,
        out.A_log,
        problem.lower_bound,
        problem.scale,
        problem.T,
        problem.N,
        *row_strides(q),
        *row_strides(k),
        *row_strides(g),
        *row_strides(do),
        HV=problem.HV,
        GROUP=problem.HV // problem.H,
        K=problem.K,
        V=problem.V,
        KP=problem.KP,
        VP=VP,
        BV=min(VP, 64),
        STAGES=2,
        D=channels,
        GATE=GATES[problem.gate],
        HAS_A=A_log is not None,
        HAS_BIAS=dt_bias is not None,
        L2NORM=problem.l2_norm,
        VARLEN=problem.varlen,
        num_warps=warps,
        maxnreg=registers,
        num_stages=1,
    )
    return out
