"""What the KDA kernels share: chunk slots, masked loads, gates, fp16 operands under a row scale.

Legend: C = 64 tokens of a chunk, B = 16 tokens of a block, D channels of a slice. A *slot* is the place of
one chunk in the workspace: sequence n of a packed batch owns the slots from cu_seqlens[n] // C + n on. That
is never less than the ceil(length / C) it needs, so a program finds its chunk by bisection and no host or
extra launch counts chunks. All exponents are base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
# 2^-160 is zero in fp32, so a stronger decay of one token changes nothing; the clamp keeps sums of exponents
# small
# enough to be exact where it matters.
MIN_LOG2_DECAY = tl.constexpr(-160.0)
NORM_EPS = tl.constexpr(1e-6)

GATE_GIVEN = tl.constexpr(0)
GATE_BOUNDED = tl.constexpr(1)
GATE_SOFTPLUS = tl.constexpr(2)


@triton.jit
def locate_chunk(slot, cu_seqlens_ptr, T, num_sequences, VARLEN: tl.constexpr):
    """(sequence, first token in its batch row, tokens of this chunk, at most C, <= 0 for an unused slot)."""
    if VARLEN:
        low = 0
        high = num_sequences - 1
        while low < high:
            middle = (low + high + 1) // 2
            start = tl.load(cu_seqlens_ptr + middle).to(tl.int32)
            if start // CHUNK + middle <= slot:
                low = middle
            else:
                high = middle - 1
        start = tl.load(cu_seqlens_ptr + low).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + low + 1).to(tl.int32)
        first = start + (slot - start // CHUNK - low) * CHUNK
        return low, first, tl.minimum(end - first, CHUNK)
    chunks = (T + CHUNK - 1) // CHUNK
    sequence = slot // chunks
    first = (slot - sequence * chunks) * CHUNK
    return sequence, first, tl.minimum(T - first, CHUNK)


@triton.jit
def locate_sequence(sequence, cu_seqlens_ptr, T, VARLEN: tl.constexpr):
    """(first slot, first token in its batch row, length) of a sequence."""
    if VARLEN:
        start = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
        end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32)
        return start // CHUNK + sequence, start, end - start
    chunks = (T + CHUNK - 1) // CHUNK
    return sequence * chunks, 0, T


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def gate_log2(raw, rate, bias, lower_bound, GATE: tl.constexpr):
    """Log2 decay of a token from its logit (or its given log decay), clamped to what fp32 can tell from
    zero."""
    if GATE == 0:
        decay = raw
    elif GATE == 1:
        decay = lower_bound * sigmoid(rate * (raw + bias))
    else:
        decay = -rate * softplus(raw + bias)
    return tl.maximum(decay * LOG2E, MIN_LOG2_DECAY)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(-LOG2E * tl.abs(x))) * (1.0 / LOG2E)


@triton.jit
def gate_rate(A_log_ptr, head, HAS_A: tl.constexpr):
    """exp(A_log), finite: the product with a vanished derivative must be zero, not NaN."""
    if HAS_A:
        return tl.exp2(LOG2E * tl.minimum(tl.load(A_log_ptr + head).to(tl.float32), 85.0))
    return 1.0


@triton.jit
def write_strength(raw, BETA: tl.constexpr):
    """beta: given (0), sigmoid (1) or twice the sigmoid (2)."""
    if BETA == 0:
        return raw
    return BETA * sigmoid(raw)


@triton.jit
def row_exponent(x):
    """Biased exponent of each row's largest magnitude, held where its power of two and the inverse are
    normal."""
    bits = tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True)
    return tl.maximum(bits >> 23, 15)


@triton.jit
def inverse_unit(exponent):
    """2^(14 - e): brings a row whose largest magnitude has (biased) exponent e to 2^14..2^15."""
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_half(x, exponent):
    """x / 2^(e - 14) as fp16 per row, and the power of two that undoes it.

    The largest magnitude becomes 2^14..2^15, so that values down to 2^-28 of it stay normal: a token's
    rounding does
    not depend on later tokens of the row.
    """
    unit = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (x * inverse_unit(exponent)[:, None]).to(tl.float16), unit


@triton.jit
def add_product(total, decay, x_half, unit, exponent, tile):
    """total * decay + (x_half * unit) @ tile, with the product accumulated in place: no second accumulator
    is live.

    total is scaled by an exact power of two and back; `exponent` must be at least that of total minus 20.
    """
    scaled = total * decay[None, :] * inverse_unit(exponent)[:, None]
    return tl.dot(x_half, tile, acc=scaled) * unit[:, None]


@triton.jit
def power_of_two_norm(sum_of_squares):
    """2^-round(log2 |x|): scales a row of any magnitude near 1 without rounding it; 1 for a zero row."""
    exponent = tl.floor(0.5 * tl.log2(tl.maximum(sum_of_squares, 1e-36)) + 0.5)
    return tl.where(sum_of_squares > 1e-36, tl.exp2(-exponent), 1.0)
