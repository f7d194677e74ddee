"""The K3 text model: KDA and Gated MLA, Attention Residuals, Stable LatentMoE."""

from __future__ import annotations

from model.config import K3Config, ModelConfigError
from model.k3 import K3Model, parameter_groups

__all__ = ["K3Config", "K3Model", "ModelConfigError", "parameter_groups"]
