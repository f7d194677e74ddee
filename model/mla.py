"""Gated multi-head latent attention without positions (K3 report section 2.1.2, eq. 7).

Shapes: B batch, T time, D hidden size, h heads, n/r "nope" and "rope" parts of a query or key (neither is
rotated), v value width, c latent width.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from model.config import K3Config
from model.layers import Linear, RMSNorm, at_least_fp32


@dataclass
class MLACache:
    """Compressed keys and values of the tokens seen: c + r numbers a token, whatever the number of heads."""

    latent: torch.Tensor  # [B, max_length, c + r]: normed latent, then the shared key part
    length: int = 0

    def append(self, latent_BTc: torch.Tensor) -> torch.Tensor:
        """Store new tokens; returns all stored so far, [B, length, c + r]."""
        end = self.length + latent_BTc.shape[1]
        if end > self.latent.shape[1]:
            raise ValueError(f"the cache holds {self.latent.shape[1]} tokens; {end} were given")
        self.latent[:, self.length : end] = latent_BTc
        self.length = end
        return self.latent[:, :end]


class GatedMLA(nn.Module):
    """y = W_o [ sigmoid(W_g x) * attention(q, k, v) ], queries and keys/values through low-rank latents."""

    def __init__(self, config: K3Config):
        super().__init__()
        d, heads = config.hidden_size, config.mla_num_heads
        self.num_heads, self.rank = heads, config.kv_lora_rank
        self.nope, self.rope, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = config.qk_head_dim**-0.5
        self.q_down_proj = Linear(d, config.q_lora_rank)
        self.q_norm = RMSNorm(config.q_lora_rank, config.mla_norm_eps)
        self.q_up_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_down_proj = Linear(d, self.rank + self.rope)
        self.kv_norm = RMSNorm(self.rank, config.mla_norm_eps)
        self.kv_up_proj = Linear(self.rank, heads * (self.nope + self.value))
        self.gate_proj = Linear(d, heads * self.value)
        self.out_proj = Linear(heads * self.value, d, config.output_gain)

    def make_cache(self, batch: int, max_length: int, like: torch.Tensor) -> MLACache:
        """An empty cache for `max_length` tokens, of the dtype and device of `like`."""
        return MLACache(like.new_empty(batch, max_length, self.rank + self.rope))

    def forward(
        self, x_BTD: torch.Tensor, cu_seqlens: torch.Tensor | None = None, cache: MLACache | None = None
    ) -> torch.Tensor:
        """Mix tokens causally.

        Args:
            x_BTD: normed input.
            cu_seqlens: [N+1] end offsets of packed documents, with B = 1; attention stays within a document.
            cache: attends to the tokens it holds too, and appends these.
        """
        B, T, _ = x_BTD.shape
        q_BThk = self.q_up_proj(self.q_norm(self.q_down_proj(x_BTD))).view(B, T, self.num_heads, -1)
        c, k_rope = self.kv_down_proj(x_BTD).split([self.rank, self.rope], dim=-1)
        c = self.kv_norm(c)
        if cache is None:
            o_BThv = causal_attention(q_BThk, *self._expand(c, k_rope), self.scale, cu_seqlens)
        else:
            c, k_rope = cache.append(torch.cat([c, k_rope], dim=-1)).split([self.rank, self.rope], dim=-1)
            attend = self._absorbed if T == 1 else self._expanded_with_past
            o_BThv = attend(q_BThk, c, k_rope)
        gate = torch.sigmoid(self.gate_proj(x_BTD))
        return self.out_proj(gate * o_BThv.reshape(B, T, -1))

    def _expand(self, c_BTc: torch.Tensor, k_rope_BTr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, T, h, n + r] and values [B, T, h, v] from the latent."""
        B, T, _ = c_BTc.shape
        kv = self.kv_up_proj(c_BTc).view(B, T, self.num_heads, self.nope + self.value)
        k_nope, v = kv.split([self.nope, self.value], dim=-1)
        shared = k_rope_BTr.unsqueeze(2).expand(B, T, self.num_heads, self.rope)
        return torch.cat([k_nope, shared], dim=-1), v

    def _expanded_with_past(
        self, q_BThk: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor
    ) -> torch.Tensor:
        """T queries that are the last of the cached tokens (prefill, possibly in pieces)."""
        k, v = self._expand(c, k_rope)
        if q_BThk.shape[1] == k.shape[1]:
            return causal_attention(q_BThk, k, v, self.scale)
        rows = torch.arange(k.shape[1] - q_BThk.shape[1], k.shape[1], device=k.device)
        mask = torch.arange(k.shape[1], device=k.device) <= rows.unsqueeze(1)
        o = F.scaled_dot_product_attention(
            q_BThk.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=self.scale
        )
        return o.transpose(1, 2)

    def _absorbed(self, q_BThk: torch.Tensor, c_BSc: torch.Tensor, k_rope_BSr: torch.Tensor) -> torch.Tensor:
        """One query against the latents themselves: W_k moves to the query and W_v to the output, so that
        a step reads c + r numbers a cached token instead of expanding h (n + v) of them."""
        weight = self.kv_up_proj.weight.view(self.num_heads, self.nope + self.value, self.rank)
        w_k, w_v = weight.split([self.nope, self.value], dim=1)
        q_nope, q_rope = q_BThk.split([self.nope, self.rope], dim=-1)
        q_latent = torch.einsum("bthn,hnc->bthc", q_nope, w_k)
        scores = torch.einsum("bthc,bsc->bhts", q_latent, c_BSc)
        scores = scores + torch.einsum("bthr,bsr->bhts", q_rope, k_rope_BSr)
        weights = torch.softmax(at_least_fp32(scores) * self.scale, dim=-1).to(c_BSc.dtype)
        return torch.einsum("bthc,hvc->bthv", torch.einsum("bhts,bsc->bthc", weights, c_BSc), w_v)


def causal_attention(
    q_BThk: torch.Tensor,
    k_BThk: torch.Tensor,
    v_BThv: torch.Tensor,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v over earlier tokens of the same document; [B, T, h, v].

    On the CPU, documents of equal length that follow each other are one batch, and each such run is one
    call. On CUDA
    nothing reads the lengths: half precision takes the variable-length flash kernel, fp32 a block mask.
    """
    if cu_seqlens is None:
        return _sdpa(q_BThk, k_BThk, v_BThv, scale)
    if q_BThk.is_cuda:
        return _packed_cuda(q_BThk, k_BThk, v_BThv, scale, cu_seqlens)
    outputs = []
    for start, count, length in equal_length_runs(cu_seqlens.tolist()):
        rows = slice(start, start + count * length)
        q, k, v = (t[0, rows].unflatten(0, (count, length)) for t in (q_BThk, k_BThk, v_BThv))
        outputs.append(_sdpa(q, k, v, scale).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0)


def equal_length_runs(boundaries: list[int]) -> list[tuple[int, int, int]]:
    """Runs (start, count, length) of consecutive non-empty documents of one length, from their boundaries."""
    runs: list[tuple[int, int, int]] = []
    for start, end in itertools.pairwise(boundaries):
        length = end - start
        if length == 0:
            continue
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of [B, T, h, .] tensors."""
    q, k, v_heads = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    missing = k.shape[-1] - v.shape[-1]
    if not q.is_cuda and missing > 0:
        # torch's fused CPU kernel wants equal widths; zeros are cheaper than the unfused path
        v_heads = F.pad(v_heads, (0, missing))
    o = F.scaled_dot_product_attention(q, k, v_heads, is_causal=True, scale=scale)
    return o[..., : v.shape[-1]].transpose(1, 2)


def _packed_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    total = q.shape[1]
    if q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        missing = k.shape[-1] - v.shape[-1]
        offsets = cu_seqlens.to(torch.int32)
        o = varlen_attn(
            q[0],
            k[0],
            F.pad(v[0], (0, missing)),
            offsets,
            offsets,
            total,
            total,
            scale=scale,
            window_size=(-1, 0),
        )
        assert isinstance(o, torch.Tensor)
        return o[..., : v.shape[-1]].unsqueeze(0)
    positions = torch.arange(total, device=q.device)
    document = torch.searchsorted(cu_seqlens.to(positions.dtype), positions, right=True)
    mask = (document.unsqueeze(1) == document) & (positions.unsqueeze(1) >= positions)
    o = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return o.transpose(1, 2)
