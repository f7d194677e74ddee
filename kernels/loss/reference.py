"""Cross-entropy of a linear head that never holds the logits of all tokens.

Legend: T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype

# Logits held at once: 4 M fp32 numbers are 16 MB, a size that stays near the cache and keeps matmuls large.
LOGITS_AT_ONCE = 1 << 22


def naive_linear_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """All logits at once: what `linear_cross_entropy` is checked against."""
    dtype = accumulation_dtype(hidden_TD)
    logits = hidden_TD.to(dtype) @ weight_VD.to(dtype).T
    loss = F.cross_entropy(logits, targets_T, ignore_index=ignore_index, reduction="sum")
    return loss, (targets_T != ignore_index).sum()


def linear_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, targets_T: torch.Tensor, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over tokens of `-log softmax(hidden @ weight.T)[target]`, and the number of tokens counted.

    Gradients are formed in the forward pass, piece by piece, while a piece of logits is at hand; the backward
    pass scales them. Differentiable once.

    Args:
        hidden_TD: [T, D].  weight_VD: [V, D].
        targets_T: [T] int64; `ignore_index` marks tokens that do not count.

    Returns:
        The loss (fp32, or fp64 for fp64 inputs) and the count (int64), both 0-dim.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if hidden_TD.dim() != 2 or weight_VD.dim() != 2 or hidden_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden must be [T, D], weight [V, D]; got {list(hidden_TD.shape)}, {list(weight_VD.shape)}"
        )
    if targets_T.shape != hidden_TD.shape[:1]:
        raise ValueError(f"targets must be [T={hidden_TD.shape[0]}]; got {list(targets_T.shape)}")
    count = (targets_T != ignore_index).sum()
    need = (hidden_TD.requires_grad, weight_VD.requires_grad) if torch.is_grad_enabled() else (False, False)
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T, ignore_index, need), count


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, targets_T, ignore_index, need):
        dtype = accumulation_dtype(hidden_TD)
        tokens, vocabulary = hidden_TD.shape[0], weight_VD.shape[0]
        loss = hidden_TD.new_zeros((), dtype=dtype)
        d_hidden = torch.empty_like(hidden_TD, memory_format=torch.contiguous_format) if need[0] else None
        d_weight = torch.zeros_like(weight_VD, dtype=dtype) if need[1] else None
        step = max(1, LOGITS_AT_ONCE // max(1, vocabulary))
        for start in range(0, tokens, step):
            piece = slice(start, start + step)
            hidden = hidden_TD[piece]
            logits = (hidden @ weight_VD.T).to(dtype)
            valid = targets_T[piece] != ignore_index
            target = targets_T[piece].where(valid, 0).unsqueeze(1)
            logits.sub_(logits.amax(1, keepdim=True))
            at_target = logits.gather(1, target)
            share = logits.exp_()
            total = share.sum(1, keepdim=True)
            loss += (total.log() - at_target).squeeze(1).masked_fill_(~valid, 0).sum()
            if d_hidden is None and d_weight is None:
                continue
            share.div_(total)
            share.scatter_add_(1, target, share.new_full((1, 1), -1.0).expand_as(target))
            d_logits = share.masked_fill_(~valid.unsqueeze(1), 0).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight_VD, out=d_hidden[piece])
            if d_weight is not None:
                d_weight += (d_logits.T @ hidden).to(dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        d_hidden, d_weight = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = d_hidden * d_loss.to(d_hidden.dtype)
        if d_weight is not None:
            d_weight = (d_weight * d_loss).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None
