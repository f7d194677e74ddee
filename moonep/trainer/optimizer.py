"""AdamW with decoupled weight decay on matrices only, grouped so that DeepSpeed can partition it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from model.k3 import decays


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, `decay` and `no_decay`.

    Within a group parameters whose size is not a multiple of eight elements come last: DeepSpeed lays a group
    out in one flat buffer, and one odd size would leave every following weight misaligned for 16-byte loads.
    """
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named:
        if parameter.requires_grad:
            split[decays(name, parameter)].append(parameter)
    for members in split.values():
        members.sort(key=lambda p: p.numel() % 8 != 0)
    groups = [
        {"name": "decay", "params": split[True], "weight_decay": weight_decay},
        {"name": "no_decay", "params": split[False], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_adamw(
    groups: list[dict[str, Any]], *, lr: float, betas: Iterable[float], eps: float, fused: bool
) -> torch.optim.AdamW:
    """torch's AdamW; `fused` runs one kernel a group (CUDA). Elementwise: partitioning changes no result."""
    first, second = betas
    return torch.optim.AdamW(groups, lr=lr, betas=(first, second), eps=eps, fused=fused)
