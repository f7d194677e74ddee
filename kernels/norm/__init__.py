"""L2, RMS and gated RMS normalisation."""

from kernels.norm.reference import gated_rms_norm, l2_norm, naive_gated_rms_norm, naive_l2_norm, rms_norm

__all__ = ["gated_rms_norm", "l2_norm", "naive_gated_rms_norm", "naive_l2_norm", "rms_norm"]
