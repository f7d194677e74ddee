"""One layer: mix over depth, norm, mix over time; mix over depth, norm, FFN."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from model.attention_residuals import AttentionResidual, ResidualStream
from model.config import K3Config
from model.kda import KimiDeltaAttention
from model.latent_moe import BalancerFactory, ExpertsFactory, LatentMoE, Run
from model.layers import GatedFFN, RMSNorm
from model.mla import GatedMLA


class Block(nn.Module):
    """Layer `layer` of the model (K3 report section 2.2 gives the order of reads and writes).

    `first`: nothing lies below but the embedding, so the mixer reads it unmixed.
    """

    def __init__(
        self,
        config: K3Config,
        layer: int,
        experts: ExpertsFactory | None = None,
        balancer: BalancerFactory | None = None,
        first: bool = False,
    ):
        super().__init__()
        self.layer = layer
        self.closes_block = first or layer % config.attention_residual_block_size == 0
        self.mixer_residual = None if first else AttentionResidual(config)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: GatedMLA | KimiDeltaAttention
        self.mixer = GatedMLA(config) if config.is_mla(layer) else KimiDeltaAttention(config)
        self.ffn_residual = AttentionResidual(config)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn: nn.Module
        if config.is_moe(layer):
            self.ffn = LatentMoE(config, layer, experts, balancer)
        else:
            self.ffn = GatedFFN(config, config.dense_ffn_size)

    def forward(
        self,
        stream: ResidualStream,
        cu_seqlens: torch.Tensor | None,
        mask_BT: torch.Tensor | None,
        cache: Any,
        run: Run,
    ) -> None:
        """Read the stream and add this layer's two outputs to it."""

        def mix(*sources: torch.Tensor) -> torch.Tensor:
            return self.mixer(self.mixer_norm(self._mixed(self.mixer_residual, sources)), cu_seqlens, cache)

        def ffn_input(*sources: torch.Tensor) -> torch.Tensor:
            return self.ffn_norm(self._mixed(self.ffn_residual, sources))

        mixed = run(mix, *stream.sources())
        if self.closes_block:
            stream.close_block()
        stream.add(mixed)
        if isinstance(self.ffn, LatentMoE):
            stream.add(self.ffn(run(ffn_input, *stream.sources()), mask_BT, run))
        else:
            stream.add(run(lambda *sources: self.ffn(ffn_input(*sources)), *stream.sources()))

    @staticmethod
    def _mixed(site: AttentionResidual | None, sources: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return sources[0] if site is None else site(list(sources))
