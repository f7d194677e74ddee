"""Small models the tests share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model import K3Config, K3Model


def small_config(**changes: Any) -> K3Config:
    """Five layers (KDA, MLA, KDA, MLA, MLA), odd numbers of heads, two depth blocks and an unfinished one."""
    values: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_layers": 5,
        "mla_every": 2,
        "kda_num_heads": 3,
        "kda_head_dim": 8,
        "mla_num_heads": 3,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "dense_ffn_size": 40,
        "num_experts": 6,
        "top_k": 2,
        "latent_size": 16,
        "expert_ffn_size": 24,
        "attention_residual_block_size": 2,
    }
    return K3Config(**{**values, **changes})


def awake(model: nn.Module, seed: int = 1) -> nn.Module:
    """Give every parameter that starts at a special value (zero queries, unit norms, A = 1) a random one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.3)
    return model


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> K3Model:
    """A K3Model of `small_config(**changes)` in which every mechanism is at work."""
    torch.manual_seed(seed)
    model = K3Model(small_config(**changes)).to(dtype)
    awake(model)
    return model


def random_tokens(*shape: int, seed: int = 3, vocab: int = 50) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
