"""Second backward launch: all gradients of a chunk, in parallel over chunks and value heads.

With H the state before and dS its gradient after the chunk, U = beta Z, W = beta X, and the exponent factors f of
prepare.py (each pair of a row r and an earlier key s meets at one halfway point: q_r f_r, k_r f_r against k_s f_s):

    dP = scale tril(dO U^T),     dL = -tril_strict(W U^T)
    dq = e^G (scale dO H^T) + sum f (dP (k f)) + diag(dP) k
    dk = e^G (-W H^T) + sum f (dL (k f)) + e^(G_C - G) (U dS^T) + sum f (dP^T (q f) + dL^T (k f)) + diag(dP) q
    dbeta = X.Z,   dv = W

The decay's gradient follows the same sums: an exponent is a 0/1 sum of log decays, so its gradient is spread back over
exactly those tokens. Every term carries the decay it passes through, so nothing cancels: a token whose decay is zero
gets a zero, not the noise of a difference.

The norm's gradient needs q.dq = o.dO and k.dk = 2 beta dbeta - v.dv alone, both sums over V.

Legend: C = 64 tokens of a chunk, four blocks (axis 0) of B = 16 tokens (axis 1), D channels of a slice (axis 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.prepare import between_mask, half_mask, split_half, sum_over
from kernels.kda.tiles import (
    BLOCK,
    CHUNK,
    NORM_EPS,
    gate_log2,
    gate_rate,
    locate_chunk,
    power_of_two_norm,
    sigmoid,
    softplus,
)


@triton.jit
def split_bfloat16(x):
    """x as a sum of two bf16 numbers: 16 bits, at any magnitude."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def spread(mask, x):
    """Masked sums over the tokens of a block: [B, B] 0/1 times [4, B, D]."""
    high, low = split_bfloat16(x)
    ones = tl.broadcast_to(mask.to(tl.bfloat16), (4, mask.shape[1], mask.shape[2]))
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def diagonal_blocks(x, SIZE: tl.constexpr):
    """[C, C] -> [C / SIZE, SIZE, SIZE], the blocks on its diagonal."""
    COUNT: tl.constexpr = CHUNK // SIZE
    i = tl.arange(0, COUNT)
    same = i[:, None, None, None] == i[None, None, :, None]
    return tl.sum(tl.where(same, x.reshape(COUNT, SIZE, COUNT, SIZE), 0.0), axis=2)


@triton.jit
def power_of_two_unit(x):
    """(2^-e, 2^e) that bring the largest magnitude of a tile to 2^14..2^15, for fp16."""
    bits = tl.max(tl.max(tl.abs(x), axis=1), axis=0).to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(
        tl.float32, bitcast=True
    )


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
    v_ptr,
    g_ptr,
    A_log_ptr,
    dt_bias_ptr,
    o_ptr,
    do_ptr,
    x_ptr,
    z_ptr,
    h_ptr,
    dh_ptr,
    beta_ptr,
    cu_seqlens_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
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
    v_stride_b,
    v_stride_t,
    v_stride_h,
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
    D: tl.constexpr,
    GATE: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    VARLEN: tl.constexpr,
):
    program = tl.program_id(0)
    slot = program // HV
    head = program % HV
    tile = tl.cast(program, tl.int64)
    sequence, first, rows = locate_chunk(slot, cu_seqlens_ptr, T, num_sequences, VARLEN)
    if rows <= 0:
        if GATE != 0:
            for d in tl.range(0, KP, D):
                tl.store(
                    d_bias_partial_ptr + tile * KP + d + tl.arange(0, D), tl.zeros((D,), dtype=tl.float32)
                )
            tl.store(d_A_partial_ptr + tile, 0.0)
        return
    batch = tl.cast(0 if VARLEN else sequence, tl.int64)

    # Tiles over V: rows [C, VP].
    token = tl.arange(0, CHUNK)
    value = tl.arange(0, VP)
    position = (first + token).to(tl.int64)
    inside_v = (token < rows)[:, None] & (value < V)[None, :]
    do_row = do_ptr + batch * do_stride_b + head * do_stride_h + position * do_stride_t
    v_row = v_ptr + batch * v_stride_b + head * v_stride_h + position * v_stride_t
    out_row = ((batch * T + position) * HV + head) * V
    do = tl.load(do_row[:, None] + value[None, :], mask=inside_v, other=0.0).to(tl.bfloat16)
    x = tl.load(x_ptr + out_row[:, None] + value[None, :], mask=inside_v, other=0.0)
    z = tl.load(z_ptr + tile * (CHUNK * V) + token[:, None] * V + value[None, :], mask=inside_v, other=0.0)
    beta = tl.load(beta_ptr + tile * CHUNK + token)

    # Squares [C, C] and row scalars [C].
    r64 = token[:, None]
    s64 = token[None, :]
    dp = tl.dot(do, tl.trans(z)) * beta[None, :]
    dl = tl.dot(x.to(tl.bfloat16), tl.trans(z)) * (-beta[:, None] * beta[None, :])
    d_beta = tl.sum(x.to(tl.float32) * z.to(tl.float32), axis=1)
    values = tl.load(v_row[:, None] + value[None, :], mask=inside_v, other=0.0).to(tl.float32)
    outputs = tl.load(o_ptr + out_row[:, None] + value[None, :], mask=inside_v, other=0.0).to(tl.float32)
    q_dq = tl.sum(outputs * do.to(tl.float32), axis=1)
    k_dk = 2.0 * beta * d_beta - beta * tl.sum(values * x.to(tl.float32), axis=1)

    block = tl.arange(0, 4)[:, None, None]
    token3 = tl.arange(0, BLOCK)[None, :, None]
    row = block * BLOCK + token3
    present = row < rows
    position3 = (first + row).to(tl.int64)
    key_head = head // GROUP
    q_row_ptr = q_ptr + batch * q_stride_b + key_head * q_stride_h + position3 * q_stride_t
    k_row_ptr = k_ptr + batch * k_stride_b + key_head * k_stride_h + position3 * k_stride_t
    g_row_ptr = g_ptr + batch * g_stride_b + head * g_stride_h + position3 * g_stride_t
    out_key_row = ((batch * T + position3) * HV + head) * K
    channel = tl.arange(0, KP)[None, None, :]
    whole = present & (channel < K)
    q_all = tl.load(q_row_ptr + channel, mask=whole, other=0.0).to(tl.float32)
    k_all = tl.load(k_row_ptr + channel, mask=whole, other=0.0).to(tl.float32)
    q_squares = tl.sum(q_all * q_all, axis=2, keep_dims=True)
    k_squares = tl.sum(k_all * k_all, axis=2, keep_dims=True)
    if L2NORM:
        q_scale = tl.rsqrt(q_squares + NORM_EPS)
        k_scale = tl.rsqrt(k_squares + NORM_EPS)
    else:
        q_scale = power_of_two_norm(q_squares)
        k_scale = power_of_two_norm(k_squares)
        dp = dp / q_scale.reshape(CHUNK, 1)
    dp = tl.where(r64 >= s64, dp * scale, 0.0)
    dl = tl.where(r64 > s64, dl, 0.0)

    # The value gradient takes the place of X.
    d_value = x.to(tl.float32) * beta[:, None]
    strength = beta
    if not L2NORM:
        square = (k_scale * k_scale).reshape(CHUNK)
        d_value *= k_scale.reshape(CHUNK, 1)
        d_beta /= square
        strength *= square
    tl.store(x_ptr + out_row[:, None] + value[None, :], d_value.to(x_ptr.dtype.element_ty), mask=inside_v)
    if BETA == 1:
        d_beta *= strength * (1.0 - strength)
    elif BETA == 2:
        d_beta *= strength * (1.0 - 0.5 * strength)
    d_beta = d_beta.to(dbeta_ptr.dtype.element_ty)
    tl.store(dbeta_ptr + (batch * T + position) * HV + head, d_beta, mask=token < rows)

    # fp16 operands of the products within the chunk: whole, in halves of 32 and in blocks of 16 tokens.
    to_unit, unit = power_of_two_unit(tl.maximum(tl.abs(dp), tl.abs(dl)))
    on_diagonal = tl.sum(tl.where(r64 == s64, dp, 0.0), axis=1).reshape(4, BLOCK, 1)
    dp64 = (dp * to_unit).to(tl.float16)
    dl64 = (dl * to_unit).to(tl.float16)
    r32 = tl.arange(0, 32)[None, :, None]
    s32 = tl.arange(0, 32)[None, None, :]
    mask32 = half_mask(r32, s32, 16)
    dp32 = tl.where(mask32, diagonal_blocks(dp64, 32), 0.0)
    dl32 = tl.where(mask32, diagonal_blocks(dl64, 32), 0.0)
    dp16 = diagonal_blocks(dp64, 16)
    dl16 = diagonal_blocks(dl64, 16)
    dp64_t = tl.trans(dp64)
    dl64_t = tl.trans(dl64)
    dp32_t = tl.permute(dp32, (0, 2, 1))
    dl32_t = tl.permute(dl32, (0, 2, 1))
    dp16_t = tl.permute(dp16, (0, 2, 1))
    dl16_t = tl.permute(dl16, (0, 2, 1))

    beta3 = beta.reshape(4, BLOCK, 1)
    q_dq = q_dq.reshape(4, BLOCK, 1)
    k_dk = k_dk.reshape(4, BLOCK, 1)
    do_scale = scale if L2NORM else scale / q_scale
    rate = gate_rate(A_log_ptr, head, HAS_A)
    r16 = tl.arange(0, BLOCK)[None, :, None]
    s16 = tl.arange(0, BLOCK)[None, None, :]
    source = tl.arange(0, 4)[None, :, None]
    x_half = x.to(tl.bfloat16)
    d_A = 0.0
    for d in tl.range(0, KP, D, num_stages=1):
        column = d + tl.arange(0, D)[None, None, :]
        inside = present & (column < K)
        q = tl.load(q_row_ptr + column, mask=inside, other=0.0).to(tl.float32) * q_scale
        k = tl.load(k_row_ptr + column, mask=inside, other=0.0).to(tl.float32) * k_scale
        raw = tl.load(g_row_ptr + column, mask=inside, other=0.0).to(tl.float32)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(dt_bias_ptr + head * K + column, mask=column < K, other=0.0).to(tl.float32)
        g = tl.where(inside, gate_log2(raw, rate, bias, lower_bound, GATE), 0.0)
        g_high, g_low = split_half(g)
        before_token = sum_over(s16 <= r16, g_high, g_low)
        after_token = sum_over(s16 > r16, g_high, g_low)
        total = tl.sum(g, axis=1, keep_dims=True)
        totals = total.reshape(1, 4, D)
        before_block = tl.sum(tl.where(source < block, totals, 0.0), axis=1, keep_dims=True)
        after_block = tl.sum(tl.where(source > block, totals, 0.0), axis=1, keep_dims=True)
        is_neighbour = ((block == 2) & (source == 3)) | ((block == 1) & (source == 0))

        # Products with the states on either side.
        state_tile = tile * (V * KP) + value[:, None] * KP + d + tl.arange(0, D)[None, :]
        h = tl.load(h_ptr + state_tile, mask=(value < V)[:, None], other=0.0)
        dh = tl.load(dh_ptr + state_tile, mask=(value < V)[:, None], other=0.0)
        from_start = tl.exp2(before_token + before_block)
        to_end = tl.exp2(after_token + after_block)
        dq = tl.dot(do, h).reshape(4, BLOCK, D) * do_scale * from_start
        dk = tl.dot(x_half, h).reshape(4, BLOCK, D) * -beta3 * from_start
        later = q * dq + k * dk
        dk_end = tl.dot(z, dh).reshape(4, BLOCK, D) * beta3 * to_end
        earlier = k * dk_end
        dk += dk_end
        through_state = tl.sum(h.to(tl.float32) * dh.to(tl.float32), axis=0).reshape(1, 1, D)
        through_state *= tl.exp2(tl.sum(total, axis=0, keep_dims=True))
        carry_in = tl.where(source > block, tl.sum(later, axis=1, keep_dims=True).reshape(1, 4, D), 0.0)
        carry_in += tl.where(source < block, tl.sum(earlier, axis=1, keep_dims=True).reshape(1, 4, D), 0.0)

        # Halves of 32 tokens.
        pair_total = tl.where(block == 0, source == 1, (block == 3) & (source == 2))
        neighbour = tl.sum(tl.where(pair_total, totals, 0.0), axis=1, keep_dims=True)
        second = block >= 2
        f = tl.exp2(tl.where(second, before_token, after_token) + neighbour)
        f_row = tl.where(second, f, 0.0)
        f_key = tl.where(second, 0.0, f)
        k_keys = (k * f_key).to(tl.float16).reshape(CHUNK, D)
        k_rows = (k * f_row).to(tl.float16).reshape(CHUNK, D)
        q_rows = (q * f_row).to(tl.float16).reshape(CHUNK, D)
        f_row *= unit
        f_key *= unit
        dq_part = tl.dot(dp64, k_keys).reshape(4, BLOCK, D) * f_row
        dk_part = tl.dot(dl64, k_keys).reshape(4, BLOCK, D) * f_row
        dk_key = tl.dot(dl64_t, k_rows, acc=tl.dot(dp64_t, q_rows)).reshape(4, BLOCK, D) * f_key
        dq += dq_part
        dk += dk_part + dk_key
        row_part = q * dq_part + k * dk_part
        key_part = k * dk_key
        later += row_part
        earlier += key_part
        reached = tl.sum(row_part + key_part, axis=1, keep_dims=True).reshape(1, 4, D)
        carry_in += tl.where(is_neighbour, reached, 0.0)
        carry = tl.sum(carry_in, axis=1, keep_dims=True) + through_state

        # Halves of 16 tokens.
        second = block % 2 == 1
        f = tl.exp2(tl.where(second, before_token, after_token))
        k_f = (k * f).to(tl.float16).reshape(2, 32, D)
        q_f = (q * f).to(tl.float16).reshape(2, 32, D)
        f *= unit
        dq_part = tl.dot(dp32, k_f).reshape(4, BLOCK, D) * f
        dk_part = tl.dot(dl32, k_f).reshape(4, BLOCK, D) * f
        dk_key = tl.dot(dl32_t, k_f, acc=tl.dot(dp32_t, q_f)).reshape(4, BLOCK, D) * f
        dq += dq_part
        dk += dk_part + dk_key
        later += q * dq_part + k * dk_part
        earlier += k * dk_key
        dg = spread(s16 >= r16, later) + spread(s16 < r16, earlier) + carry

        # Halves of 8, 4, 2 and 1 tokens.
        for level in tl.static_range(4):
            between = between_mask(r16, s16, 1 << level)
            mask = half_mask(r16, s16, 1 << level)
            mask_t = half_mask(s16, r16, 1 << level)
            f = tl.exp2(sum_over(between, g_high, g_low))
            k_f = (k * f).to(tl.float16)
            q_f = (q * f).to(tl.float16)
            f *= unit
            dq_part = tl.dot(tl.where(mask, dp16, 0.0), k_f) * f
            dk_part = tl.dot(tl.where(mask, dl16, 0.0), k_f) * f
            dk_key = tl.dot(tl.where(mask_t, dp16_t, 0.0), q_f)
            dk_part += tl.dot(tl.where(mask_t, dl16_t, 0.0), k_f, acc=dk_key) * f
            dq += dq_part
            dk += dk_part
            dg += spread(between_mask(s16, r16, 1 << level), q * dq_part + k * dk_part)

        dq += on_diagonal * k
        dk += on_diagonal * q
        if L2NORM:
            dq -= q * q_dq
            dk -= k * k_dk
        dq *= q_scale
        dk *= k_scale
        tl.store(dq_ptr + out_key_row + column, dq.to(dq_ptr.dtype.element_ty), mask=inside)
        tl.store(dk_ptr + out_key_row + column, dk.to(dk_ptr.dtype.element_ty), mask=inside)
        d_raw, d_rate = gate_gradient(tl.where(inside, dg, 0.0), raw, rate, bias, lower_bound, GATE)
        tl.store(dg_ptr + out_key_row + column, d_raw.to(dg_ptr.dtype.element_ty), mask=inside)
        if GATE != 0:
            d_bias = tl.sum(
                tl.sum(tl.where(inside, d_raw, 0.0), axis=1, keep_dims=True), axis=0, keep_dims=True
            )
            tl.store(d_bias_partial_ptr + tile * KP + column, d_bias)
            d_A += tl.sum(tl.where(inside, d_rate, 0.0))
    if GATE != 0:
        tl.store(d_A_partial_ptr + tile, d_A)
