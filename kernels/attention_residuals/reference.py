"""Attention Residuals: a softmax mixture of earlier layers' outputs (Alg. 1 of their report; K3 eq. 8-10).

Legend: n sources, D width, Q queries of one block. Each source is [..., D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype


class Partial(NamedTuple):
    """Attention over some of the sources.

    Attributes:
        output: [..., D], normalised over these sources alone.
        logsumexp: [...] of their scores; it holds the maximum too, so that no merge can overflow.
    """

    output: torch.Tensor
    logsumexp: torch.Tensor


def attention_residual(
    sources: Sequence[torch.Tensor], norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """`sum_i softmax_i(<query, rms_norm(x_i, norm_weight)>) x_i`: keys are normalised, values are not.

    One autograd function that walks the sources and keeps three numbers a token and source; no stacked
    copy of the sources is made. Differentiable once.

    Args:
        sources: n >= 1 tensors [..., D] of one shape.
        norm_weight_D, query_D: [D].
        eps: of the RMS norm.

    Returns:
        [..., D] in the sources' dtype; scores, softmax and sum in fp32 (fp64).

    Raises:
        ValueError: no sources, or shapes that differ.
    """
    _check(sources)
    return _AttentionResidual.apply(norm_weight_D, query_D, eps, *sources)


def naive_attention_residual(
    sources: Sequence[torch.Tensor], norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """`attention_residual` in plain words, over a stack of the sources."""
    dtype = accumulation_dtype(sources[0])
    x = torch.stack([source.to(dtype) for source in sources])
    weight = _scores(x, norm_weight_D, query_D, eps).softmax(0)
    return (weight.unsqueeze(-1) * x).sum(0).to(sources[0].dtype)


def block_phase_one(
    sources: Sequence[torch.Tensor], norm_weights_QD: torch.Tensor, queries_QD: torch.Tensor, eps: float
) -> list[Partial]:
    """Phase one: all Q queries of a block over its finished sources at once, as they depend on no activation.

    Returns:
        Q partial results, one a query, in fp32 (fp64), to be completed by `merge_partial`.

    Raises:
        ValueError: no sources, or shapes that differ.
    """
    _check(sources)
    dtype = accumulation_dtype(sources[0])
    x = torch.stack([source.to(dtype) for source in sources])
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scores = inverse_rms * (x @ (queries_QD * norm_weights_QD).to(dtype).T)
    weight, logsumexp = scores.softmax(0), scores.logsumexp(0)
    outputs = ((weight[..., i, None] * x).sum(0) for i in range(queries_QD.shape[0]))
    return [Partial(output, logsumexp[..., i]) for i, output in enumerate(outputs)]


def merge_partial(
    partial: Partial,
    source: torch.Tensor | None,
    norm_weight_D: torch.Tensor,
    query_D: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Phase two: add one more source, the block's running sum, by the online softmax. Exact.

    Returns:
        `attention_residual` over phase one's sources and `source`; over phase one's alone when it is None.
    """
    output, logsumexp = partial
    if source is None:
        return output
    wide = source.to(output.dtype)
    share = torch.sigmoid(_scores(wide, norm_weight_D, query_D, eps) - logsumexp).unsqueeze(-1)
    return torch.lerp(output, wide, share).to(source.dtype)


def _scores(x: torch.Tensor, norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float) -> torch.Tensor:
    inverse_rms = torch.rsqrt(x.square().mean(-1) + eps)
    return inverse_rms * (x @ (query_D * norm_weight_D).to(x.dtype))


def _check(sources: Sequence[torch.Tensor]) -> None:
    if len(sources) == 0:
        raise ValueError("attention residuals need at least one source; got none")
    for i, source in enumerate(sources):
        if source.shape != sources[0].shape:
            raise ValueError(f"source {i} is {list(source.shape)}; source 0 is {list(sources[0].shape)}")


class _AttentionResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, norm_weight, query, eps, *sources):
        dtype, width = accumulation_dtype(sources[0]), sources[0].shape[-1]
        key = (query * norm_weight).to(dtype)
        rows = [source.reshape(-1, width).to(dtype) for source in sources]
        inverse_rms = torch.stack([(x * x).sum(-1) for x in rows]).div_(width).add_(eps).rsqrt_()
        scores = torch.stack([x @ key for x in rows]).mul_(inverse_rms)
        weight = scores.softmax(0)
        out = rows[0] * weight[0].unsqueeze(1)
        for x, share in zip(rows[1:], weight[1:], strict=True):
            out.addcmul_(x, share.unsqueeze(1))
        ctx.save_for_backward(norm_weight, query, inverse_rms, scores, weight, *sources)
        return out.view(sources[0].shape).to(sources[0].dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out):
        norm_weight, query, inverse_rms, scores, weight, *sources = ctx.saved_tensors
        dtype, width = weight.dtype, sources[0].shape[-1]
        key = (query * norm_weight).to(dtype)
        d_out = d_out.reshape(-1, width).to(dtype)
        rows = [source.reshape(-1, width).to(dtype) for source in sources]
        d_scores = torch.stack([(x * d_out).sum(-1) for x in rows])
        d_scores = weight * (d_scores - (weight * d_scores).sum(0))
        pull = d_scores * inverse_rms  # d score / d x = inverse_rms key - score inverse_rms^2 x / D
        shrink = -pull * scores * inverse_rms / width
        d_key = torch.zeros_like(key)
        d_sources = []
        for i, (x, source) in enumerate(zip(rows, sources, strict=True)):
            d_key.addmv_(x.T, pull[i])
            d_x = (d_out * weight[i].unsqueeze(1)).addcmul_(x, shrink[i].unsqueeze(1)).addr_(pull[i], key)
            d_sources.append(d_x.view(source.shape).to(source.dtype))
        d_norm_weight = (d_key * query.to(dtype)).to(norm_weight.dtype)
        return d_norm_weight, (d_key * norm_weight.to(dtype)).to(query.dtype), None, *d_sources
