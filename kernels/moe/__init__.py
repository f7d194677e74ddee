"""Mixture of experts: the router's choice, Quantile Balancing's histogram, SiTU-GLU, the grouped FFN."""

from kernels.moe.grouped import grouped_ffn, grouped_ffn_backward, grouped_ffn_forward
from kernels.moe.init import draw_expert_seed, expert_init, expert_seed
from kernels.moe.reference import (
    naive_grouped_ffn,
    naive_quantile_histogram,
    naive_router_topk,
    naive_situ_glu,
)
from kernels.moe.routing import quantile_histogram, router_topk
from kernels.moe.situ import situ_glu

__all__ = [
    "draw_expert_seed",
    "expert_init",
    "expert_seed",
    "grouped_ffn",
    "grouped_ffn_backward",
    "grouped_ffn_forward",
    "naive_grouped_ffn",
    "naive_quantile_histogram",
    "naive_router_topk",
    "naive_situ_glu",
    "quantile_histogram",
    "router_topk",
    "situ_glu",
]
