"""Small kernels that the tests of the interpreter and of the compile check run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    row = tl.arange(0, N)
    index = row[:, None] * N + row[None, :]
    c = tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index), input_precision=PRECISION)
    tl.store(c_ptr + index, c)


@triton.jit
def elementwise_kernel(a_ptr, b_ptr, sum_ptr, fma_ptr, less_ptr, total_ptr, prefix_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    a = tl.load(a_ptr + index)
    b = tl.load(b_ptr + index)
    tl.store(sum_ptr + index, a + b)
    tl.store(fma_ptr + index, tl.fma(a, b, a))
    tl.store(less_ptr + index, ((a < b) & (b > 0)).to(tl.int8))
    tl.store(total_ptr, tl.sum(a, 0))
    tl.store(prefix_ptr + index, tl.cumsum(a, 0))


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(y_ptr + index, tl.load(x_ptr + index).to(y_ptr.dtype.element_ty))


@triton.jit
def loop_kernel(n_ptr, out_ptr):
    total = 0
    for i in range(tl.load(n_ptr)):
        total += i
    for i in tl.range(0, tl.load(n_ptr)):
        total += i
    tl.store(out_ptr, total)


@triton.jit
def square_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr)
    tl.store(out_ptr, x * x)


@triton.jit
def spilling_kernel(x_ptr, y_ptr, N: tl.constexpr):
    row = tl.arange(0, N)
    index = row[:, None] * N + row[None, :]
    x = tl.load(x_ptr + index)
    tl.store(y_ptr + index, x * tl.sum(x, 0)[None, :] + x * tl.sum(x, 1)[:, None])
