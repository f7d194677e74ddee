"""The K3 text model: KDA and Gated MLA, Attention Residuals, Stable LatentMoE."""

from __future__ import annotations

from model.config import K3Config, ModelConfigError

__all__ = ["K3Config", "ModelConfigError"]
