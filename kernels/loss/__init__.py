"""Cross-entropy of a linear head."""

from kernels.loss.reference import linear_cross_entropy, naive_linear_cross_entropy

__all__ = ["linear_cross_entropy", "naive_linear_cross_entropy"]
