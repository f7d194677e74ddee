"""A plain GPT, the yardstick of `tools.compare_char`: pre-norm Transformer, learned positions, GELU,
tied head.

Sizes and initialisation are those of nanoGPT's character setting (GPT-2's: std 0.02, projections into
the residual stream divided by sqrt(2 layers), no biases). Shapes: B batch, T time, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class GPTShape:
    """Sizes; `context` is the longest sequence."""

    vocab_size: int
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128


class Block(nn.Module):
    """Causal self-attention and a four times wider MLP, each behind a LayerNorm and added to the stream."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        d = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(d, bias=False)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.mlp_norm = nn.LayerNorm(d, bias=False)
        self.mlp_in = nn.Linear(d, 4 * d, bias=False)
        self.mlp_out = nn.Linear(4 * d, d, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x_BTD + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD))))


class PlainGPT(nn.Module):
    """Called as K3Model is: `(tokens, cu_seqlens=None, targets=) -> (sum of token losses, count)`."""

    def __init__(self, shape: GPTShape):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                out = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if out else 0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert cu_seqlens is None and targets is not None, "one document, with targets"
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.embedding.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return loss, (targets != -100).sum()

    def parameter_groups(self, weight_decay: float) -> list[dict]:
        """Matrices and embeddings decay, norms do not (nanoGPT's rule)."""
        parameters = list(self.parameters())
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
