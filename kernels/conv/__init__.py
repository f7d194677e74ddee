"""Short causal depthwise convolution."""

from kernels.conv.reference import naive_short_convolution, short_convolution

__all__ = ["naive_short_convolution", "short_convolution"]
