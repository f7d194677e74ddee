"""Multi-token prediction: one more layer that predicts the token after next.

h'_t = Block( W [RMSNorm(h_t) ; RMSNorm(embedding(token_{t+1}))] ), then the shared head; its target is
token t+2. Embedding and head are the main model's.

Shapes: B batch, T time, D hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from model.attention_residuals import AttentionResidual, ResidualStream
from model.block import Block
from model.config import K3Config
from model.latent_moe import BalancerFactory, ExpertsFactory, Run
from model.layers import Linear, RMSNorm


class MTPLayer(nn.Module):
    """A backbone layer over the last hidden state and the next token's embedding, projected 2D -> D."""

    def __init__(
        self, config: K3Config, experts: ExpertsFactory | None = None, balancer: BalancerFactory | None = None
    ):
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = Linear(2 * config.hidden_size, config.hidden_size)
        self.block = Block(config, config.num_layers, experts, balancer, first=True)
        self.output_residual = AttentionResidual(config)
        self.output_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        next_embedding_BTD: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        mask_BT: torch.Tensor | None,
        run: Run,
    ) -> torch.Tensor:
        """The normed hidden state that the shared head reads, [B, T, D]."""
        joined = torch.cat([self.hidden_norm(hidden_BTD), self.embedding_norm(next_embedding_BTD)], dim=-1)
        stream = ResidualStream(self.input_proj(joined))
        self.block(stream, cu_seqlens, mask_BT, None, run)
        return self.output_norm(self.output_residual(stream.sources()))


def mtp_targets(
    tokens_BT: torch.Tensor, targets_BT: torch.Tensor, cu_seqlens: torch.Tensor | None, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(next tokens, targets two ahead), [B, T] each; ignored where the next token is of another document
    or absent.
    """
    next_tokens = tokens_BT.roll(-1, dims=1)
    targets = targets_BT.roll(-1, dims=1)
    if cu_seqlens is None:
        targets[:, -1] = ignore_index
        return next_tokens, targets
    ends = torch.zeros(tokens_BT.shape[1] + 1, dtype=torch.bool, device=tokens_BT.device)
    ends[cu_seqlens[1:].long()] = True
    return next_tokens, targets.masked_fill(ends[1:], ignore_index)
