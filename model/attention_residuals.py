"""Block Attention Residuals: a learned softmax over depth in place of the residual sum (K3 report section
2.2).

Shapes: D hidden size. A *source* is the embedding, the sum of a finished block of layers, or the running
sum of the present block, each [..., D].
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.attention_residuals import attention_residual
from model.config import K3Config


class AttentionResidual(nn.Module):
    """One mixing site: sum_i softmax_i(<query * norm_weight, source_i / rms(source_i)>) source_i.

    The pseudo-query starts at zero, so that every site starts as the plain mean of its sources.
    """

    def __init__(self, config: K3Config):
        super().__init__()
        self.norm_weight = nn.Parameter(torch.ones(config.hidden_size))
        self.query = nn.Parameter(torch.zeros(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, sources: list[torch.Tensor]) -> torch.Tensor:
        return attention_residual(sources, self.norm_weight, self.query, self.eps)


class ResidualStream:
    """What passes from layer to layer: a snapshot for each finished block, and the running sum of the
    present one.

    There is no other residual path: nothing adds a layer's input to its output.
    """

    def __init__(self, embedding: torch.Tensor):
        self.snapshots: list[torch.Tensor] = []
        self.running: torch.Tensor | None = embedding

    def sources(self) -> list[torch.Tensor]:
        """All that a site may mix now, oldest first."""
        return self.snapshots if self.running is None else [*self.snapshots, self.running]

    def close_block(self) -> None:
        """The running sum (at first: the embedding) becomes a snapshot and a new sum begins."""
        assert self.running is not None, "a block was closed twice without a layer between"
        self.snapshots = [*self.snapshots, self.running]
        self.running = None

    def add(self, output: torch.Tensor) -> None:
        """Add a mixer's or an FFN's output to the running sum."""
        self.running = output if self.running is None else self.running + output
