"""Kimi Delta Attention: a gated delta rule whose decay has one value per key channel."""

from kernels.kda.interface import chunk_kda, fused_recurrent_kda
from kernels.kda.reference import kda_gate, naive_chunk_kda, naive_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda", "kda_gate", "naive_chunk_kda", "naive_recurrent_kda"]
