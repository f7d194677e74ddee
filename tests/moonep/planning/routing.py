"""Routings that planners find hard, for the tests of this folder."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

PATHOLOGIES = (
    "uniform",
    "one_hot_expert",
    "one_hot_rank",
    "one_hot_home_group",
    "power_law",
    "empty_experts",
    "skew_inside_a_group",
    "rotating_hotspot",
)


def popularity(kind: str, num_ranks: int, num_experts: int, seed: int) -> torch.Tensor:
    """`[R, E]` float64 weights: how likely source rank r routes to expert e."""
    generator = torch.Generator().manual_seed(seed)
    epn = num_experts // num_ranks
    weights = torch.ones(num_ranks, num_experts, dtype=torch.float64)
    noise = torch.rand(num_experts, generator=generator, dtype=torch.float64)
    pick = int(torch.randint(num_experts, (), generator=generator))
    if kind == "one_hot_expert":
        weights[:, pick] = 10.0 * num_experts
    elif kind == "one_hot_rank":  # one source rank sends everything to one expert
        weights[pick % num_ranks, pick] = 1000.0 * num_experts
    elif kind == "one_hot_home_group":
        home = pick // epn
        weights[:, home * epn : (home + 1) * epn] *= 50.0
    elif kind == "power_law":
        weights *= (1 / (noise.argsort() + 1.0)) ** 1.2
    elif kind == "empty_experts":
        weights *= torch.where(noise < 0.6, 0.0, noise)
        weights[:, pick] = 1.0
    elif kind == "skew_inside_a_group":
        weights *= (1 / (torch.arange(num_experts) % epn + 1.0)) ** 2 * (1 + noise)
    elif kind == "rotating_hotspot":  # every source rank has its own favourite
        rank = torch.arange(num_ranks)
        weights[rank, (rank * epn + pick) % num_experts] = 5.0 * num_experts
    return weights


def routed_ids(
    weights: torch.Tensor, tokens: list[int], top_k: int, duplicates: bool, seed: int
) -> list[torch.Tensor]:
    """One `[s, K]` int64 tensor of expert ids a source rank."""
    generator = torch.Generator().manual_seed(seed)
    ids = []
    for row, s in zip(weights + 1e-12, tokens, strict=True):
        draw = torch.multinomial(
            row.expand(max(s, 1), -1), top_k, replacement=duplicates, generator=generator
        )
        ids.append(draw[:s])
    return ids


def histogram(ids: list[torch.Tensor], num_experts: int) -> torch.Tensor:
    """`[R, E]` int32 counts."""
    return torch.stack([torch.bincount(i.reshape(-1), minlength=num_experts) for i in ids]).to(torch.int32)


@st.composite
def geometries(draw) -> tuple[int, int, int, int]:
    """(R, E, K, S), small and odd, with R = 1, epn = 1 and T < R among them."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8]))
    num_experts = num_ranks * draw(st.sampled_from([1, 2, 3, 5, 8]))
    top_k = draw(st.integers(1, min(4, num_experts)))
    return num_ranks, num_experts, top_k, draw(st.sampled_from([1, 2, 7, 40]))


@st.composite
def routings(draw) -> tuple[tuple[int, int, int, int], list[torch.Tensor]]:
    """A geometry and the ids each rank routes to; ranks may have no tokens, tokens may repeat an expert."""
    sizes = draw(geometries())
    num_ranks, num_experts, top_k, capacity = sizes
    weights = popularity(
        draw(st.sampled_from(PATHOLOGIES)), num_ranks, num_experts, draw(st.integers(0, 999))
    )
    tokens = draw(st.lists(st.integers(0, capacity), min_size=num_ranks, max_size=num_ranks))
    return sizes, routed_ids(weights, tokens, top_k, draw(st.booleans()), draw(st.integers(0, 999)))
