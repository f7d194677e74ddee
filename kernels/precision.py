"""The dtype in which a reference computes."""

from __future__ import annotations

import torch


def accumulation_dtype(x: torch.Tensor) -> torch.dtype:
    """fp64 for fp64 tensors, fp32 for every other float dtype."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
