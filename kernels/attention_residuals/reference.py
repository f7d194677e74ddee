"""Attention Residuals: a softmax mixture of earlier layers' outputs (Attention Residuals report, Alg. 1; K3 eq. 8-10).

Legend: n sources, D width, Q queries of one block. Each source is [..., D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.precision import accumulation_dtype


class Partial(NamedTuple):
    """Attention over some of the sources: `output` [..., D] normalised over them, `logsumexp` [...] of their scores."""

    output: torch.Tensor
    logsumexp: torch.Tensor


def attention_residual(
    sources: Sequence[torch.Tensor], norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """`sum_i softmax_i(<query, rms_norm(x_i, norm_weight)>) x_i`: keys are normalised, values are not.

    Args:
        sources: n >= 1 tensors [..., D] of one shape.
        norm_weight_D, query_D: [D].
        eps: of the RMS norm.

    Returns:
        [..., D] in the sources' dtype; scores, softmax and sum in fp32 (fp64).

    Raises:
        ValueError: no sources.
    """
    if len(sources) == 0:
        raise ValueError("attention_residual needs at least one source")
    dtype = accumulation_dtype(sources[0])
    x = torch.stack([source.to(dtype) for source in sources])
    weight = softmax_scores(x, norm_weight_D, query_D, eps).softmax(0)
    return (weight.unsqueeze(-1) * x).sum(0).to(sources[0].dtype)


def softmax_scores(x: torch.Tensor, norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`<query * norm_weight, x / rms(x)>` over the last dimension."""
    inverse_rms = torch.rsqrt(x.square().mean(-1) + eps)
    return inverse_rms * (x @ (query_D * norm_weight_D).to(x.dtype))


def block_phase_one(
    sources: Sequence[torch.Tensor], norm_weights_QD: torch.Tensor, queries_QD: torch.Tensor, eps: float
) -> list[Partial]:
    """Phase one: all Q queries of a block over the block's finished sources at once (they depend on no activation).

    Returns:
        Q partial results, one a query, in fp32 (fp64), to be completed by `merge_partial`.
    """
    if len(sources) == 0:
        raise ValueError("block_phase_one needs at least one source")
    dtype = accumulation_dtype(sources[0])
    x = torch.stack([source.to(dtype) for source in sources])
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    scores = inverse_rms * (x @ (queries_QD * norm_weights_QD).to(dtype).T)
    weight, logsumexp = scores.softmax(0), scores.logsumexp(0)
    return [
        Partial((weight[..., i, None] * x).sum(0), logsumexp[..., i]) for i in range(queries_QD.shape[0])
    ]


def merge_partial(
    partial: Partial, source: torch.Tensor | None, norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Phase two: add one more source (the block's running sum) to a partial result by the online softmax. Exact.

    Returns:
        What `attention_residual` gives over phase one's sources and `source`; phase one's alone when it is None.
    """
    output, logsumexp = partial
    if source is None:
        return output
    wide = source.to(output.dtype)
    share = torch.sigmoid(softmax_scores(wide, norm_weight_D, query_D, eps) - logsumexp).unsqueeze(-1)
    return torch.lerp(output, wide, share).to(source.dtype)
