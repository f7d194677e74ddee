"""Routing cases and the dense computation that expert-parallel layers are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.moe import naive_situ_glu


@dataclass(frozen=True)
class Case:
    """Sizes of a layer and the number of tokens of each rank."""

    num_ranks: int
    num_experts: int = 8
    hidden: int = 8
    ffn_hidden: int = 12
    top_k: int = 3
    capacity: int = 20
    pattern: str = "mixed"
    tokens: tuple[int, ...] = (20, 0, 7, 13, 20, 1, 2, 3)


PATTERNS = ("uniform", "one_hot", "one_rank_hot", "empty_experts", "duplicates", "mixed")


def draw_ids(case: Case, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[tokens, K] int32 expert ids of one rank."""
    E, shape = case.num_experts, (tokens, case.top_k)
    uniform = torch.randint(0, E, shape, generator=generator)
    if case.pattern == "one_hot":
        ids = torch.where(torch.rand(shape, generator=generator) < 0.8, E - 1, uniform)
    elif case.pattern == "one_rank_hot":
        ids = uniform % max(1, E // case.num_ranks)
    elif case.pattern == "empty_experts":
        ids = uniform // 2 * 2
    elif case.pattern == "duplicates":
        ids = uniform[:, :1].expand(shape).clone()
    elif case.pattern == "mixed":
        ids = uniform * torch.randint(0, 2, shape, generator=generator)
    else:
        ids = uniform
    return ids.to(torch.int32)


def draw(case: Case, dtype: torch.dtype, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """(x, ids, route weights, weights of the loss) of every rank; x and route weights want gradients."""
    generator = torch.Generator().manual_seed(seed)
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    ranks = []
    for rank in range(case.num_ranks):
        T = min(case.tokens[rank], case.capacity)
        x = torch.randn(T, case.hidden, generator=generator, dtype=torch.float64).to(dtype)
        weights = torch.rand(T, case.top_k, generator=generator, dtype=torch.float64).to(weight_dtype)
        d_y = torch.randn(T, case.hidden, generator=generator, dtype=torch.float64).to(dtype)
        ids = draw_ids(case, T, generator)
        ranks.append((x.requires_grad_(), ids, weights.requires_grad_(), d_y))
    return ranks


def dense(x_TH, ids_TK, weights_TK, gate, up, down) -> torch.Tensor:
    """sum_k weight_k down(situ(gate x) * cap(up x)), expert by expert, no dispatch."""
    y = torch.zeros_like(x_TH)
    for k in range(ids_TK.shape[1]):
        e = ids_TK[:, k].long()
        g = torch.einsum("th,tih->ti", x_TH, gate[e])
        u = torch.einsum("th,tih->ti", x_TH, up[e])
        y = y + weights_TK[:, k, None] * torch.einsum("ti,thi->th", naive_situ_glu(g, u), down[e])
    return y


def dense_results(ranks, parameters) -> dict[str, list[torch.Tensor]]:
    """y, d_x, d_weights of every rank and the parameters' gradients, by the dense computation in fp64."""
    leaves = [p.detach().double().requires_grad_() for p in parameters]
    y, d_x, d_w = [], [], []
    total = [torch.zeros_like(p) for p in leaves]
    for x, ids, weights, d_y in ranks:
        x, weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
        out = dense(x, ids, weights, *leaves)
        gradients = torch.autograd.grad(out, (x, weights, *leaves), d_y.double())
        y.append(out.detach())
        d_x.append(gradients[0])
        d_w.append(gradients[1])
        for sum_, gradient in zip(total, gradients[2:], strict=True):
            sum_ += gradient
    return {"y": y, "d_x": d_x, "d_w": d_w, "d_parameters": total}


def run_layer(layer, ranks) -> dict[str, list[torch.Tensor]]:
    """The same of a layer over the local ranks given."""
    x, ids, weights, d_y = ([rank[i] for rank in ranks] for i in range(4))
    for leaf in (*x, *weights, *layer.parameters()):
        leaf.grad = None
    y = layer(x, ids, weights)
    torch.autograd.backward(y, d_y)
    return {
        "y": [t.detach() for t in y],
        "d_x": [t.grad for t in x],
        "d_w": [t.grad for t in weights],
        "d_parameters": [p.grad for p in layer.parameters()],
    }
