"""Repairs Triton 3.6's interpreter so that TRITON_INTERPRET=1 runs on a CPU are numerical evidence.

As shipped, the interpreter multiplies the bit patterns of bfloat16 operands, truncates fp32 -> bfloat16,
rounds float8 wrongly, computes tf32 as fp32 and refuses bf16x3. `repair()` replaces those pieces, turns on
the integer overflow checks, and is called when the `kernels` package is imported with TRITON_INTERPRET=1.
It touches private names of Triton, hence the pin on 3.6.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter

SUPPORTED_TRITON = "3.6"
DOT_PRECISIONS = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
TORCH_DTYPES = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
FLOAT8 = (tl.float8e4nv, tl.float8e5)

_stock_convert_float = interpreter._convert_float


def _convert_float(data, source, target, rounding_mode):
    """Bits of `data` (type `source`) as `target`: to nearest even, float8 saturating as on Hopper."""
    source, target = source.scalar, target.scalar
    if source not in TORCH_DTYPES or target not in TORCH_DTYPES:
        return _stock_convert_float(data, source, target, rounding_mode)
    bits_in, bits_out = (np.dtype(f"uint{t.primitive_bitwidth}") for t in (source, target))
    values = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(_signed(bits_in)))
    values = values.view(TORCH_DTYPES[source])
    if rounding_mode == ir.ROUNDING_MODE.RTZ and (source, target) == (tl.float32, tl.bfloat16):
        values = (values.view(torch.int32) & -65536).view(torch.float32)
    if target in FLOAT8:
        limit = torch.finfo(TORCH_DTYPES[target]).max
        values = values.to(torch.float32).clamp(-limit, limit)
    converted = values.to(TORCH_DTYPES[target]).view(getattr(torch, _signed(bits_out).name))
    return converted.numpy().view(bits_out).reshape(np.shape(data))


def _signed(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"int{dtype.itemsize * 8}")


def _to_float32(handle) -> np.ndarray:
    """Values of a float handle of at most 32 bits, as fp32 numbers."""
    if handle.dtype.scalar in (tl.bfloat16, *FLOAT8):
        return _convert_float(handle.data, handle.dtype, tl.float32, None).view(np.float32)
    return handle.data.astype(np.float32, copy=False)


def _from_float32(values: np.ndarray, dtype):
    """Handle of type `dtype` that holds fp32 `values`, rounded."""
    values = np.asarray(values, dtype=np.float32)
    if dtype.scalar == tl.bfloat16:
        return interpreter.TensorHandle(_convert_float(values, tl.float32, tl.bfloat16, None), tl.bfloat16)
    return interpreter.TensorHandle(values, dtype.scalar)


def _is_bfloat16(*handles) -> bool:
    return any(handle.dtype.scalar == tl.bfloat16 for handle in handles)


def _binary_op(stock):
    def binary_op(self, lhs, rhs, op):
        if not _is_bfloat16(lhs, rhs):
            result = stock(self, lhs, rhs, op)
            if result.data.dtype == np.bool_:  # a comparison: later logic must not see its operands' type
                result.dtype = tl.int1
            return result
        output = op(_to_float32(lhs), _to_float32(rhs))
        if output.dtype == np.bool_:
            return interpreter.TensorHandle(output, tl.int1)
        return _from_float32(output, tl.bfloat16)

    return binary_op


def _cast(stock):
    """Casts between bfloat16 or float8 and every other type: as numbers, through fp32."""

    def cast(self, source, target):
        special = (tl.bfloat16, *FLOAT8)
        if target.scalar in special and not source.dtype.scalar.is_floating():
            bits = _convert_float(source.data.astype(np.float32), tl.float32, target, None)
            return interpreter.TensorHandle(bits, target.scalar)
        if source.dtype.scalar in special and not target.scalar.is_floating():
            return stock(self, interpreter.TensorHandle(_to_float32(source), tl.float32), target)
        if target.scalar in special or source.dtype.scalar in special:
            bits = _convert_float(source.data, source.dtype, target, None)
            return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(target)), target.scalar)
        return stock(self, source, target)

    return cast


def _fma(self, x, y, z):
    if _is_bfloat16(x, y, z):
        return _from_float32(_to_float32(x) * _to_float32(y) + _to_float32(z), tl.bfloat16)
    return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)


def _clampf(self, x, low, high, propagate_nans):
    if _is_bfloat16(x):
        return _from_float32(np.clip(*(_to_float32(h) for h in (x, low, high))), tl.bfloat16)
    return self.ternary_op(x, low, high, np.clip)


def _split(values: np.ndarray, parts: int, rounding) -> list[np.ndarray]:
    """`values` as a sum of `parts` terms of reduced precision, largest first."""
    terms = []
    for _ in range(parts):
        terms.append(rounding(values))
        values = values - terms[-1]
    return terms


def _round_bfloat16(values: np.ndarray) -> np.ndarray:
    return _to_float32(_from_float32(values, tl.bfloat16))


def _truncate_tf32(values: np.ndarray) -> np.ndarray:
    """wgmma reads 19 bits of its tf32 operands: it truncates, with no rounding instruction before it."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _round_tf32(values: np.ndarray) -> np.ndarray:
    return _truncate_tf32((np.ascontiguousarray(values).view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def _dot_fp32(a: np.ndarray, b: np.ndarray, precision) -> np.ndarray:
    """a @ b of fp32 operands, as the tensor cores compute it under `input_precision`."""
    modes = ir.INPUT_PRECISION
    if precision == modes.TF32:
        return np.matmul(_truncate_tf32(a), _truncate_tf32(b))
    parts, rounding = {
        modes.TF32x3: (2, _round_tf32),
        modes.BF16x3: (2, _round_bfloat16),
        modes.BF16x6: (3, _round_bfloat16),
    }.get(precision, (1, np.asarray))
    a_terms, b_terms = _split(a, parts, rounding), _split(b, parts, rounding)
    pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j < parts]
    return sum(np.matmul(a_terms[i], b_terms[j]) for i, j in reversed(pairs))  # smallest terms first


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    types = {a.dtype.scalar, b.dtype.scalar}
    if not all(t.is_floating() for t in types):
        product = np.matmul(a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
    if tl.float64 in types:
        return interpreter.TensorHandle(np.matmul(a.data, b.data) + d.data, d.dtype.scalar)
    precision = input_precision if tl.float32 in types else ir.INPUT_PRECISION.IEEE
    product = _dot_fp32(_to_float32(a), _to_float32(b), precision)
    total = product + (_to_float32(d) if _is_bfloat16(d) else d.data)
    if _is_bfloat16(d):
        return _from_float32(total, tl.bfloat16)
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _reduction(stock, numpy_op):
    """Sums of bfloat16 run in fp32 and are rounded once."""

    def reduction(self, input):
        if input.dtype != tl.bfloat16:
            return stock(self, input)
        kwargs = {"keepdims": self.keep_dims} if hasattr(self, "keep_dims") else {}
        total = numpy_op(_to_float32(input.handle), axis=self.axis, **kwargs)
        bits = _convert_float(np.asarray(total), tl.float32, tl.bfloat16, None)
        rounded = self.to_tensor(bits, input.dtype)
        return [rounded] if numpy_op is np.cumsum else rounded

    return reduction


def _patch_lang_tensor(stock):
    def patch(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


@cache
def repair() -> None:
    """Installs the repairs, once a process.

    Raises:
        RuntimeError: Triton's version is not the one whose private names this file replaces.
    """
    if not triton.__version__.startswith(SUPPORTED_TRITON):
        raise RuntimeError(
            f"TRITON_INTERPRET=1 needs triton=={SUPPORTED_TRITON}.*, got {triton.__version__}: "
            "kernels/interpreter.py repairs private parts of that version; "
            "install triton==3.6.0 or unset TRITON_INTERPRET"
        )
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = _convert_float
    builder.binary_op = _binary_op(builder.binary_op)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fma = _fma
    builder.create_clampf = _clampf
    builder.create_dot = _dot
    interpreter.ReduceOps.sum = _reduction(interpreter.ReduceOps.sum, np.sum)
    interpreter.ScanOps.cumsum = _reduction(interpreter.ScanOps.cumsum, np.cumsum)
    interpreter._patch_lang_tensor = _patch_lang_tensor(interpreter._patch_lang_tensor)
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, debug=True, allowed_dot_input_precisions=DOT_PRECISIONS
    )
