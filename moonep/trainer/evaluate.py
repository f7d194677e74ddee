"""Loss over a validation split, in nats a token and bits per byte."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from moonep.errors import DataError
from moonep.trainer.batches import IGNORE, Batch, consecutive_starts, make_batch
from moonep.trainer.splits import TokenSplit


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: TokenSplit,
    *,
    context: int,
    capacity: int,
    rank: int = 0,
    world_size: int = 1,
    max_tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Mean loss over non-overlapping windows of a split. Collective: every rank makes the same number of
    calls.

    A token is predicted from what its window holds before it, so a longer context gives a lower loss. The
    first token of a window that is no document's first has its target in the window before.

    Args:
        model: `model(tokens, cu_seqlens=, targets=) -> (sum of losses, count)`; put into eval mode meanwhile.
        split: what to evaluate on.
        context: tokens of a window; cut to `capacity`.
        capacity: most tokens one forward call of a rank may have.
        rank, world_size: this rank among all that share the work.
        max_tokens: use windows of about so many tokens, spread evenly over the split; None: all of them.
        device: where the model lives.

    Returns:
        `val_loss` (nats a token), `val_bits_per_byte`, `val_tokens` (targets counted), the same on every
        rank.

    Raises:
        DataError: no target to predict.
    """
    context = min(context, capacity)
    starts = window_starts(split, context, max_tokens)
    per_call = capacity // context
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, targets, text bytes
    for first in range(0, len(starts), per_call * world_size):
        mine = starts[first + rank * per_call : first + (rank + 1) * per_call]
        batch = make_batch(split, mine.tolist(), context) if len(mine) else _nothing(context)
        cu_seqlens = None if batch.cu_seqlens is None else batch.cu_seqlens.to(device)
        loss, _ = model(batch.tokens.to(device), cu_seqlens=cu_seqlens, targets=batch.targets.to(device))
        valid = batch.targets[batch.targets != IGNORE].numpy()
        counts = torch.tensor([0.0, len(valid), float(split.token_bytes[valid].sum())], dtype=torch.float64)
        sums += counts.to(device)
        sums[0] += loss.double()
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(sums)
    return _report(sums.tolist(), split)


def window_starts(split: TokenSplit, context: int, max_tokens: int | None) -> NDArray[np.int64]:
    """Starts of the windows to evaluate: all that cover the split, or evenly spread ones of `max_tokens` in
    all.
    """
    starts = consecutive_starts(split, context)
    if max_tokens is None or max_tokens >= len(starts) * context:
        return starts
    count = max(1, max_tokens // context)
    return starts[np.arange(count) * len(starts) // count]


def _nothing(context: int) -> Batch:
    """A call without targets, for a rank that has no window left while others have."""
    tokens = torch.zeros(1, context, dtype=torch.int64)
    return Batch(tokens, torch.full_like(tokens, IGNORE), None)


def _report(sums: list[float], split: TokenSplit) -> dict[str, float]:
    loss, targets, text_bytes = sums
    if not targets:
        raise DataError(f"the {split.name} split has no token to predict; give more text by data.path=")
    bits_per_byte = loss / math.log(2) / text_bytes if text_bytes else math.nan
    return {"val_loss": loss / targets, "val_bits_per_byte": bits_per_byte, "val_tokens": int(targets)}
