"""The one rule that chooses between a Triton kernel and its PyTorch reference."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

BACKENDS = ("auto", "triton", "reference")


def triton_interprets() -> bool:
    """True where Triton kernels run in the interpreter (TRITON_INTERPRET=1), on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def triton_available() -> bool:
    """True where Triton can be imported. Does not import it."""
    return importlib.util.find_spec("triton") is not None


def use_triton(backend: str, tensor: torch.Tensor) -> bool:
    """Whether an operator on `tensor` runs its Triton kernel.

    "auto" takes Triton on CUDA and the reference elsewhere; "triton" insists (CPU tensors need
    TRITON_INTERPRET=1).

    Raises:
        ValueError: unknown backend, or Triton asked for where it cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; allowed: {', '.join(BACKENDS)}")
    if backend == "reference":
        return False
    runs = triton_available() and (tensor.is_cuda or triton_interprets())
    if backend == "auto":
        return runs and tensor.is_cuda
    if not runs:
        raise ValueError(
            f"backend='triton' cannot run on device {tensor.device}; use backend='auto', a CUDA tensor, "
            "or set TRITON_INTERPRET=1 before the first import"
        )
    return True
