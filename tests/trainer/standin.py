"""A mixture-of-experts model small enough to check the engine alone: no runtime, no kernels."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.size = group, x.shape[0]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.size)[dist.get_rank(ctx.group)], None


class _SumAndKeepOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        ctx.group = group
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Linear experts, `num_experts / ep` of them here; every rank computes its own for the group's tokens."""

    def __init__(self, num_experts: int, width: int, group: dist.ProcessGroup | None):
        super().__init__()
        ep, rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
        every = torch.randn(num_experts, width, width) / width**0.5
        self.group, self.first = group, rank * (num_experts // ep)
        self.weight = nn.Parameter(every[self.first : self.first + num_experts // ep].clone())

    def forward(self, x, ids, weights):
        if self.group is not None:
            x, weights = _GatherTokens.apply(x, self.group), _GatherTokens.apply(weights, self.group)
            parts = [torch.empty_like(ids) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(parts, ids, group=self.group)
            ids = torch.cat(parts)
        y = torch.zeros_like(x)
        for local, weight in enumerate(self.weight):
            share = torch.where(ids == self.first + local, weights, 0).sum(1, keepdim=True)
            y = y + share * torch.tanh(x @ weight)
        return _SumAndKeepOwn.apply(y, self.group) if self.group is not None else y


class StandIn(nn.Module):
    """Embedding, one softmax-routed layer of experts, head. Returns (sum of losses, count)."""

    def __init__(self, vocab: int = 24, width: int = 16, num_experts: int = 8, top_k: int = 2, group=None):
        super().__init__()
        self.odd = nn.Parameter(torch.ones(3))
        self.embed = nn.Embedding(vocab, width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, group)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("routing_bias", torch.full((num_experts,), 1.0 + 2.0**-20))
        self.top_k = top_k

    def forward(self, tokens, cu_seqlens=None, targets=None):
        x = self.embed(tokens).flatten(0, 1)
        x = x * self.odd.sum()
        probabilities = torch.softmax(self.router(x), -1)
        weights, ids = probabilities.topk(self.top_k)
        hidden = x + self.experts(x, ids, weights / weights.sum(-1, keepdim=True))
        loss = F.cross_entropy(self.head(hidden).float(), targets.flatten(), reduction="sum")
        return loss, torch.tensor(targets.numel())
