"""The FFN over expert-grouped rows, with two sets of weights: home experts, and copied ones in their slots.

Legend: N rows, G groups, H dispatched width, Hi expert FFN width. Groups 0 .. epn-1 are home experts;
the slots of copied experts follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.moe.reference import ExpertWeights
from kernels.moe.situ import Factors, situ_backward, situ_factors, situ_forward
from kernels.precision import accumulation_dtype

ACTIVATIONS = ("situ",)


def grouped_ffn(
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> torch.Tensor:
    """`down(situ(gate x) * cap(up x))` of each row with its group's expert; differentiable once.

    Args:
        rows_NH: [N, H], grouped: group i is rows `offsets[i-1]` to `offsets[i]`. Rows after the last
        offset are
            not read; their results and gradients are zero.
        offsets_G: [G] int32 end offsets; empty groups are fine.
        home: (gate [epn, Hi, H], up [epn, Hi, H], down [epn, H, Hi]).
        copies: the same for `G - epn` slots; None when there are none.
        activation: "situ".

    Returns:
        [N, H] in rows' dtype.

    Raises:
        ValueError: unknown activation, or more groups than weights.
    """
    _check(rows_NH, offsets_G, home, copies, activation)
    none = (None, None, None)
    return _GroupedFFN.apply(rows_NH, offsets_G, beta_gate, beta_up, *home, *(copies or none))


class FFNGradients(NamedTuple):
    """Gradients of the grouped FFN.

    Attributes:
        rows: [N, H] in rows' dtype; zero after the last offset.
        home: (d_gate, d_up, d_down) of the home experts.
        copies: the same of the copied ones; None where there are none.
        row_weights: [N] in the accumulation dtype; zero after the last offset; None without row weights.
    """

    rows: torch.Tensor
    home: ExpertWeights
    copies: ExpertWeights | None
    row_weights: torch.Tensor | None


@torch.no_grad()
def grouped_ffn_forward(
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    row_weights_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    save: bool = True,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> tuple[torch.Tensor, Factors | None]:
    """`grouped_ffn` without autograd: (out [N, H], what `grouped_ffn_backward` takes as `saved`).

    Args:
        row_weights_N: [N] in the accumulation dtype; row i of the result is then `row_weights[i]` times the
            FFN's. Applied to the narrow side of the down projection, where a product costs least.
        out: [N, H] to write into, `rows` itself if wanted; rows after the last offset are then left alone.
        save: whether the second result is wanted; else it is None.
    """
    _check(rows_NH, offsets_G, home, copies, activation)
    out = torch.zeros_like(rows_NH) if out is None else out
    saved = _empty_factors(rows_NH, home) if save else None
    for piece, ends, weights, _ in _sets(offsets_G, home, copies):
        factors = _factors(rows_NH[piece], ends, weights, beta_gate, beta_up)
        h = situ_forward(factors, beta_gate, beta_up)
        if row_weights_N is not None:
            h.mul_(row_weights_N[piece].unsqueeze(1))
        out[piece] = grouped_matmul(h.to(rows_NH.dtype), weights[2].mT, ends)
        if saved is not None:
            for whole, part in zip(saved, factors, strict=True):
                whole[piece] = part
    return out, saved


@torch.no_grad()
def grouped_ffn_backward(
    d_out_NH: torch.Tensor,
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    saved: Factors | None = None,
    row_weights_N: torch.Tensor | None = None,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
    grad_dtype: torch.dtype | None = None,
) -> FFNGradients:
    """Gradients of `grouped_ffn`, or of `grouped_ffn_forward` with the same `row_weights_N`.

    Args:
        saved: what `grouped_ffn_forward` returned; None computes it again.
        grad_dtype: of the weight gradients; None takes the weights' dtype.
    """
    _check(rows_NH, offsets_G, home, copies, activation)
    d_rows = torch.zeros_like(rows_NH)
    d_home: ExpertWeights = _empty_like(home, grad_dtype)
    d_copies = None if copies is None else _empty_like(copies, grad_dtype)
    dtype = accumulation_dtype(rows_NH)
    d_weights = None if row_weights_N is None else rows_NH.new_zeros(len(rows_NH), dtype=dtype)
    for piece, ends, (gate_w, up_w, down_w), which in _sets(offsets_G, home, copies):
        d_gate_w, d_up_w, d_down_w = (g[: len(ends)] for g in (d_home, d_copies)[which])  # type: ignore[union-attr]
        x, d_out = rows_NH[piece], d_out_NH[piece]
        if saved is None:
            factors = _factors(x, ends, (gate_w, up_w, down_w), beta_gate, beta_up)
        else:
            factors = Factors(*(part[piece] for part in saved))
        unweighted = grouped_matmul(d_out, down_w, ends)
        d_h = unweighted
        if row_weights_N is not None:
            d_h = unweighted.to(dtype) * row_weights_N[piece].unsqueeze(1)
        d_gate, d_up, h = situ_backward(d_h, factors, beta_gate, beta_up)
        if d_weights is not None and row_weights_N is not None:
            d_weights[piece] = torch.linalg.vecdot(unweighted.to(dtype), h)
            h = h * row_weights_N[piece].unsqueeze(1)
        d_gate, d_up, h = (t.to(x.dtype) for t in (d_gate, d_up, h))
        d_rows[piece] = grouped_matmul(d_gate, gate_w, ends).add_(grouped_matmul(d_up, up_w, ends))
        d_gate_w.copy_(grouped_outer(d_gate, x, ends))
        d_up_w.copy_(grouped_outer(d_up, x, ends))
        d_down_w.copy_(grouped_outer(d_out, h, ends))
    return FFNGradients(d_rows, d_home, d_copies, d_weights)


def _factors(
    x: torch.Tensor, ends: list[int], weights: ExpertWeights, beta_gate: float, beta_up: float
) -> Factors:
    gate, up = grouped_matmul(x, weights[0].mT, ends), grouped_matmul(x, weights[1].mT, ends)
    return situ_factors(gate, up, beta_gate, beta_up)


def _empty_factors(rows_NH: torch.Tensor, home: ExpertWeights) -> Factors:
    shape, dtype = (rows_NH.shape[0], home[0].shape[1]), accumulation_dtype(rows_NH)
    return Factors(*(rows_NH.new_empty(shape, dtype=dtype) for _ in range(3)))


def grouped_matmul(rows_NK: torch.Tensor, weight_GKM: torch.Tensor, ends_G: list[int]) -> torch.Tensor:
    """[N, M]: each group of rows times its own matrix. `ends_G[-1]` = N."""
    if _fits_grouped_mm(rows_NK, weight_GKM):
        return F.grouped_mm(rows_NK, weight_GKM[: len(ends_G)], offs=_as_tensor(tuple(ends_G)))
    out = rows_NK.new_empty(len(rows_NK), weight_GKM.shape[2])
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends_G])):
        torch.mm(rows_NK[start:end], weight_GKM[group], out=out[start:end])
    return out


def grouped_outer(a_NM: torch.Tensor, b_NK: torch.Tensor, ends_G: list[int]) -> torch.Tensor:
    """[G, M, K]: `a^T b` over the rows of each group; zero for an empty one."""
    if _fits_grouped_mm(a_NM, b_NK):
        return F.grouped_mm(a_NM.T, b_NK, offs=_as_tensor(tuple(ends_G)))
    out = a_NM.new_empty(len(ends_G), a_NM.shape[1], b_NK.shape[1])
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends_G])):
        torch.mm(a_NM[start:end].T, b_NK[start:end], out=out[group])
    return out


@lru_cache(maxsize=4)
def _as_tensor(ends_G: tuple[int, ...]) -> torch.Tensor:
    """On the CPU; one call of the FFN asks for the same two lists up to nine times."""
    return torch.tensor(ends_G, dtype=torch.int32)


def _fits_grouped_mm(a: torch.Tensor, b: torch.Tensor) -> bool:
    """What torch's grouped_mm takes on a CPU: fp32 or bf16, rows of a multiple of 16 bytes; one loop in
    C++.
    """
    if a.device.type != "cpu" or a.dtype != b.dtype or a.dtype not in (torch.float32, torch.bfloat16):
        return False
    size = a.element_size()
    rows_fit = all(stride == 1 or stride * size % 16 == 0 for x in (a, b) for stride in x.stride())
    return rows_fit and 1 in a.stride()[-2:] and 1 in b.stride()[-2:] and min(*a.shape, *b.shape) > 0


def _empty_like(weights: ExpertWeights, dtype: torch.dtype | None) -> ExpertWeights:
    gate, up, down = (torch.zeros_like(w, dtype=dtype) for w in weights)
    return gate, up, down


def _sets(
    offsets_G: torch.Tensor, home: ExpertWeights, copies: ExpertWeights | None
) -> Iterator[tuple[slice, list[int], ExpertWeights, int]]:
    """(rows, end offsets counted from the first of them, weights, 0 or 1) of the home groups and of the
    copies.
    """
    ends = offsets_G.tolist()
    epn, first = home[0].shape[0], 0
    for which, (weights, group) in enumerate(((home, ends[:epn]), (copies, ends[epn:]))):
        if weights is not None and group and group[-1] > first:
            yield slice(first, group[-1]), [end - first for end in group], weights, which
            first = group[-1]


def _check(rows_NH, offsets_G, home, copies, activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; allowed: {', '.join(ACTIVATIONS)}")
    experts = home[0].shape[0] + (0 if copies is None else copies[0].shape[0])
    if offsets_G.shape[0] > experts:
        raise ValueError(f"offsets names {offsets_G.shape[0]} groups; home and copies hold {experts} experts")
    for name, weights in (("home", home), ("copies", copies)):
        if weights is None:
            continue
        gate, up, down = weights
        width, inner = rows_NH.shape[1], gate.shape[1]
        if gate.shape != up.shape or gate.shape[2] != width or down.shape != (gate.shape[0], width, inner):
            raise ValueError(
                f"{name} must be gate, up [n, Hi, H={width}] and down [n, H, Hi]; "
                f"got {list(gate.shape)}, {list(up.shape)}, {list(down.shape)}"
            )


class _GroupedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_NH, offsets_G, beta_gate, beta_up, *weights):
        home = weights[:3]
        copies = None if weights[3] is None else weights[3:]
        ctx.betas = {"beta_gate": beta_gate, "beta_up": beta_up}
        out, saved = grouped_ffn_forward(rows_NH, offsets_G, home, copies, **ctx.betas)
        assert saved is not None
        ctx.save_for_backward(rows_NH, offsets_G, *saved, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        rows, offsets, *rest = ctx.saved_tensors
        saved, weights = Factors(*rest[:3]), rest[3:]
        copies = None if weights[3] is None else tuple(weights[3:])
        d = grouped_ffn_backward(d_out, rows, offsets, tuple(weights[:3]), copies, saved=saved, **ctx.betas)
        return d.rows, None, None, None, *d.home, *(d.copies or (None, None, None))
