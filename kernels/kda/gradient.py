"""Third backward launch: gradients of q, k and the decay, in parallel over chunks, value heads and slices of
K.

With H the state before and dS its gradient after the chunk, U = beta Z, W = beta X, and the exponent
factors f of prepare.py (each pair of a row r and an earlier key s meets at one halfway point: q_r f_r, k_r
f_r against k_s f_s):

    dq = e^G (scale dO H^T) + sum f (dP (k f)) + diag(dP) k
    dk = e^G (-W H^T) + sum f (dL (k f)) + e^(G_C - G) (U dS^T) + sum f (dP^T (q f) + dL^T (k f)) + diag(dP) q

The decay's gradient follows the same sums: an exponent is a 0/1 sum of log decays, so its gradient is
spread back over exactly those tokens. Every term carries the decay it passes through, so nothing cancels: a
token whose decay is zero gets a zero, not the noise of a difference.

Legend: C = 64 tokens of a chunk, four blocks (axis 0) of B = 16 tokens (axis 1), D channels of a slice (axis
2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.prepare import between_mask, half_mask, load_mask, split_half, sums
from kernels.kda.tiles import (
    BLOCK,
    CHUNK,
    gate_log2,
    gate_rate,
    locate_chunk,
    sigmoid,
    softplus,
)


@triton.jit
def split_bfloat16(x):
    """x as a sum of two bf16 numbers: 16 bits, at any magnitude."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def spread(masks_ptr, which, x):
    """Sums of x [C, D] over the tokens that a 0/1 mask names, to 16 bits of the terms."""
    high, low = split_bfloat16(x)
    ones = load_mask(masks_ptr, which)
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def in_blocks(mask, x_t):
    """x_t [4, D, B] times a 0/1 mask [B, B], for either split of x_t."""
    return tl.dot(x_t, tl.broadcast_to(mask.to(x_t.dtype), (4, BLOCK, BLOCK)))


@triton.jit
def blocks_transposed(x):
    """[C, D] -> [4, D, B]: blocks of tokens, channels first."""
    return tl.permute(x.reshape(4, BLOCK, x.shape[1]), (0, 2, 1))


@triton.jit
def across_blocks(
    q, k, g_high, g_low, dp, dp_t, dl, unit, sum_masks_ptr, spread_masks_ptr, half_masks_ptr, which
):
    """Parts [C, D] of dq, dk and dg from the pairs that meet in the middle of 2h tokens, h = 16 (0) or 32
    (1)."""
    f = tl.exp2(sums(load_mask(sum_masks_ptr, which + 2), g_high, g_low))
    k_f = k * f.to(tl.float16)
    q_f = q * f.to(tl.float16)
    f *= unit
    rows = load_mask(half_masks_ptr, 2 * which)
    keys = load_mask(half_masks_ptr, 2 * which + 1)
    dq = tl.dot(dp * rows, k_f) * f
    dk = tl.dot(dl * (rows + keys), k_f)
    dk = tl.dot(dp_t * keys, q_f, acc=dk) * f
    return dq, dk, spread(spread_masks_ptr, which + 2, q * dq + k * dk)


@triton.jit
def within_blocks(q_t, k_t, g_high_t, g_low_t, dp, dp_t, dl, unit, level, r, s):
    """The same for h < 16, all blocks at once and channels first [4, D, B]: no operand moves between
    threads."""
    rows = half_mask(r, s, level)
    keys = half_mask(s, r, level)
    to_token = between_mask(s, r, level)
    f = tl.exp2(in_blocks(to_token, g_high_t) + in_blocks(to_token, g_low_t))
    k_f = k_t * f.to(tl.float16)
    q_f = q_t * f.to(tl.float16)
    f *= unit
    dq = tl.dot(k_f, tl.where(keys, dp_t, 0.0)) * f
    dk = tl.dot(k_f, tl.where(rows | keys, dl, 0.0))
    dk = tl.dot(q_f, tl.where(rows, dp, 0.0), acc=dk) * f
    high, low = split_bfloat16(q_t * dq + k_t * dk)
    from_token = between_mask(r, s, level)
    return dq, dk, in_blocks(from_token, high) + in_blocks(from_token, low)


@triton.jit
def gate_gradient(dg, raw, rate, bias, lower_bound, GATE: tl.constexpr):
    """Gradients of the logit and of A_log from that of the (natural) log decay."""
    if GATE == 0:
        return dg, tl.zeros_like(dg)
    x = raw + bias
    if GATE == 1:
        s = sigmoid(rate * x)
        d_raw = dg * (lower_bound * s * (1.0 - s)) * rate
        return d_raw, d_raw * x
    return -dg * rate * sigmoid(x), -dg * rate * softplus(x)


@triton.jit(do_not_specialize=["T", "num_sequences"])
def kda_gradient_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    A_log_ptr,
    dt_bias_ptr,
    do_ptr,
    x_ptr,
    z_ptr,
    h_ptr,
    dh_ptr,
    beta_ptr,
    row_scale_ptr,
    dp_ptr,
    dp_t_ptr,
    dl_ptr,
    rows_ptr,
    unit_ptr,
    sum_masks_ptr,
    spread_masks_ptr,
    half_masks_ptr,
    cu_seqlens_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    d_bias_partial_ptr,
    d_A_partial_ptr,
    lower_bound,
    scale,
    T,
    num_sequences,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    g_stride_b,
    g_stride_t,
    g_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    D: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    L2NORM: tl.constexpr,
    VARLEN: tl.constexpr,
):
    SLICES: tl.constexpr = KP // D
    part = tl.program_id(0)
    program = part // SLICES
    d = (part % SLICES) * D
    slot = program // HV
    head = program % HV
    tile = tl.cast(program, tl.int64)
    channel = d + tl.arange(0, D)
    sequence, first, rows = locate_chunk(slot, cu_seqlens_ptr, T, num_sequences, VARLEN)
    if rows <= 0:
        if GATE != 0:
            tl.store(d_bias_partial_ptr + tile * KP + channel, tl.zeros((D,), dtype=tl.float32))
            tl.store(d_A_partial_ptr + tl.cast(part, tl.int64), 0.0)
        return
    batch = tl.cast(0 if VARLEN else sequence, tl.int64)
    token = tl.arange(0, CHUNK)
    position = (first + token).to(tl.int64)
    present = token < rows
    out_row = (batch * T + position) * HV + head
    column = channel[None, :]

    # Products with the states on either side, by slices of V.
    do_row = do_ptr + batch * do_stride_b + head * do_stride_h + position * do_stride_t
    dq = tl.zeros((CHUNK, D), dtype=tl.float32)
    dk = tl.zeros((CHUNK, D), dtype=tl.float32)
    dk_end = tl.zeros((CHUNK, D), dtype=tl.float32)
    through_state = tl.zeros((BV, D), dtype=tl.float32)
    for v0 in tl.range(0, VP, BV, num_stages=STAGES):
        value = v0 + tl.arange(0, BV)
        value_tile = tile * (CHUNK * V) + token[:, None] * V + value[None, :]
        state_tile = tile * (V * KP) + value[:, None] * KP + column
        do = tl.load(
            do_row[:, None] + value[None, :], mask=present[:, None] & (value < V)[None, :], other=0.0
        )
        x = tl.load(x_ptr + value_tile, mask=(value < V)[None, :], other=0.0)
        z = tl.load(z_ptr + value_tile, mask=(value < V)[None, :], other=0.0)
        h = tl.load(h_ptr + state_tile, mask=(value < V)[:, None], other=0.0)
        dh = tl.load(dh_ptr + state_tile, mask=(value < V)[:, None], other=0.0)
        dq = tl.dot(do.to(tl.bfloat16), h, acc=dq)
        dk = tl.dot(x, h, acc=dk)
        dk_end = tl.dot(z, dh, acc=dk_end)
        through_state += h.to(tl.float32) * dh.to(tl.float32)
    dg = tl.sum(through_state, axis=0, keep_dims=True)

    beta = tl.load(beta_ptr + tile * CHUNK + token)
    q_scale = tl.load(row_scale_ptr + tile * (2 * CHUNK) + token)
    k_scale = tl.load(row_scale_ptr + tile * (2 * CHUNK) + CHUNK + token)
    do_scale = tl.full((CHUNK,), 1.0, tl.float32) * scale
    if not L2NORM:
        do_scale /= q_scale
    inside = present[:, None] & (column < K)
    key_head = head // GROUP
    q_row = (q_ptr + batch * q_stride_b + key_head * q_stride_h + position * q_stride_t)[:, None]
    k_row = (k_ptr + batch * k_stride_b + key_head * k_stride_h + position * k_stride_t)[:, None]
    g_row = (g_ptr + batch * g_stride_b + head * g_stride_h + position * g_stride_t)[:, None]
    q = tl.load(q_row + column, mask=inside, other=0.0).to(tl.float32) * q_scale[:, None]
    k = tl.load(k_row + column, mask=inside, other=0.0).to(tl.float32) * k_scale[:, None]
    raw = tl.load(g_row + column, mask=inside, other=0.0).to(tl.float32)
    rate = gate_rate(A_log_ptr, head, HAS_A)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + head * K + column, mask=column < K, other=0.0).to(tl.float32)
    g = tl.where(inside, gate_log2(raw, rate, bias, lower_bound, GATE), 0.0)
    g_high, g_low = split_half(g)
    q = q.to(tl.float16)
    k = k.to(tl.float16)

    r64 = token[:, None]
    s64 = token[None, :]
    from_start = tl.exp2(sums(load_mask(sum_masks_ptr, 0), g_high, g_low))
    to_end = tl.exp2(sums(load_mask(sum_masks_ptr, 1), g_high, g_low))
    dq *= do_scale[:, None] * from_start
    dk *= -beta[:, None] * from_start
    dk_end *= beta[:, None] * to_end
    dg = dg * tl.exp2(tl.sum(g, axis=0, keep_dims=True))
    dg += spread(spread_masks_ptr, 0, q * dq + k * dk) + spread(spread_masks_ptr, 1, k * dk_end)
    dk += dk_end
    rows_tile = rows_ptr + tile * (3 * CHUNK) + token
    unit = tl.load(unit_ptr + tile)
    square = tile * (CHUNK * CHUNK) + r64 * CHUNK + s64
    dp = tl.load(dp_ptr + square)
    dp_t = tl.load(dp_t_ptr + square)
    dl = tl.load(dl_ptr + square)

    # Halves of 32 and 16 tokens.
    for which in tl.range(0, 2, num_stages=1):
        dq_part, dk_part, dg_part = across_blocks(
            q, k, g_high, g_low, dp, dp_t, dl, unit, sum_masks_ptr, spread_masks_ptr, half_masks_ptr, which
        )
        dq += dq_part
        dk += dk_part
        dg += dg_part

    # Halves of 8, 4, 2 and 1 tokens: each block by itself, channels first, so that no operand moves between
    # threads.
    r16 = tl.arange(0, BLOCK)[None, :, None]
    s16 = tl.arange(0, BLOCK)[None, None, :]
    corner = tile * (CHUNK * CHUNK) + tl.arange(0, 4)[:, None, None] * (BLOCK * CHUNK + BLOCK)
    block_tile = corner + r16 * CHUNK + s16
    dp16 = tl.load(dp_ptr + block_tile)
    dp16_t = tl.load(dp_t_ptr + block_tile)
    dl16 = tl.load(dl_ptr + block_tile)
    q_t = blocks_transposed(q)
    k_t = blocks_transposed(k)
    g_high_t = blocks_transposed(g_high)
    g_low_t = blocks_transposed(g_low)
    dq_t = tl.zeros((4, D, BLOCK), dtype=tl.float32)
    dk_t = tl.zeros((4, D, BLOCK), dtype=tl.float32)
    dg_t = tl.zeros((4, D, BLOCK), dtype=tl.float32)
    for level in tl.range(0, 4, num_stages=1):
        dq_inner, dk_inner, dg_inner = within_blocks(
            q_t, k_t, g_high_t, g_low_t, dp16, dp16_t, dl16, unit, level, r16, s16
        )
        dq_t += dq_inner
        dk_t += dk_inner
        dg_t += dg_inner
    on_diagonal = tl.load(rows_tile)
    dq += tl.permute(dq_t, (0, 2, 1)).reshape(CHUNK, D) + on_diagonal[:, None] * k
    dk += tl.permute(dk_t, (0, 2, 1)).reshape(CHUNK, D) + on_diagonal[:, None] * q
    dg += tl.permute(dg_t, (0, 2, 1)).reshape(CHUNK, D)

    if L2NORM:
        dq -= q * tl.load(rows_tile + CHUNK)[:, None]
        dk -= k * tl.load(rows_tile + 2 * CHUNK)[:, None]
    key_tile = (out_row * K)[:, None] + column
    tl.store(dq_ptr + key_tile, (dq * q_scale[:, None]).to(dq_ptr.dtype.element_ty), mask=inside)
    tl.store(dk_ptr + key_tile, (dk * k_scale[:, None]).to(dk_ptr.dtype.element_ty), mask=inside)
    d_raw, d_rate = gate_gradient(tl.where(inside, dg, 0.0), raw, rate, bias, lower_bound, GATE)
    tl.store(dg_ptr + key_tile, d_raw.to(dg_ptr.dtype.element_ty), mask=inside)
    if GATE != 0:
        d_bias = tl.sum(tl.where(inside, d_raw, 0.0), axis=0)
        tl.store(d_bias_partial_ptr + tile * KP + channel, d_bias)
        d_A = tl.sum(tl.sum(tl.where(inside, d_rate, 0.0), axis=1), axis=0)
        tl.store(d_A_partial_ptr + tl.cast(part, tl.int64), d_A)
