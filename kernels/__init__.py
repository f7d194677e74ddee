"""One folder an operator family; each operator has a PyTorch reference beside its Triton kernel."""

from __future__ import annotations

from kernels.backend import triton_interprets

if triton_interprets():
    from kernels.interpreter import repair

    repair()
