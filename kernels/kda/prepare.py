"""First forward launch: everything of a chunk that does not need the state, in parallel over chunks and
heads.

With G the running sum of the log decay inside a chunk, L_rs = sum_d k_rd k_sd e^(G_rd - G_sd) for s < r, and
P_rs = sum_d q_rd k_sd e^(G_rd - G_sd) for s <= r, the program writes

    q~ = q e^G,   k~ = k e^G,   k^ = k e^(G_C - G),   e^(G_C),   beta,   P,   N = -(I + L diag(beta))^-1 L

so that the scan needs products alone: Z = Y + N (beta Y) with Y = V - K~ S, U = beta Z.

Exponents are split at halfway points: in a block of 2h tokens, a row of the second half and a key of the
first are both decayed to the middle, so each factor is at most 1 whatever the gate, fits fp16, and knows no
later token. Halves of 32, 16, 8, 4, 2, 1 tokens cover every pair s < r once.

Legend: C = 64 tokens of a chunk, four blocks (axis 0) of B = 16 tokens (axis 1), D channels of a slice (axis
2).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.tiles import (
    BLOCK,
    CHUNK,
    NORM_EPS,
    gate_log2,
    gate_rate,
    locate_chunk,
    power_of_two_norm,
    write_strength,
)


@triton.jit
def half_mask(r, s, level):
    """Pairs (row, key) of one block of 2h tokens, h = 2^level, with the row in its second and the key in its
    first half."""
    return ((r >> level + 1) == (s >> level + 1)) & ((r >> level) > (s >> level))


@triton.jit
def between_mask(r, s, level):
    """Tokens s whose decay lies between token r and the middle of its block of 2h tokens, h = 2^level."""
    middle = (((r >> level + 1) << 1) + 1) << level
    return ((s >= middle) & (s <= r)) | ((s > r) & (s < middle))


@triton.jit
def load_mask(masks_ptr, which):
    """One 0/1 matrix [C, C] of `launch.token_masks`: loaded, because built in registers it costs more than
    the product."""
    token = tl.arange(0, CHUNK)
    return tl.load(masks_ptr + which * (CHUNK * CHUNK) + token[:, None] * CHUNK + token[None, :])


@triton.jit
def sums(ones, high, low):
    """Sums of log decays [C, D] over the tokens that a 0/1 mask names, exact to fp32."""
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def sum_over(mask, high, low):
    """Masked sums over the tokens of a block: [4, B, B] 0/1 times [4, B, D], exact to fp32."""
    ones = tl.broadcast_to(mask.to(tl.float16), (high.shape[0], mask.shape[1], mask.shape[2]))
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def split_half(x):
    """x as a sum of two fp16 numbers: 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def inverse_in_block(lower, beta_s, r, s):
    """N of each block from its strictly lower L: [4, B, B]. Doubles the halves: N21 = -(I + N22 b) L21 (I +
    b N11)."""
    n = tl.where(half_mask(r, s, 0), -lower, 0.0)
    for level in tl.static_range(1, 4):
        part = tl.where(half_mask(r, s, level), lower, 0.0)
        right = part + tl.dot(part * beta_s, n, input_precision="bf16x3")
        n = n - right - tl.dot(n * beta_s, right, input_precision="bf16x3")
    return n


@triton.jit
def inverse_of_chunk(n, lower, beta_s, r, s):
    """N of the chunk from N of its blocks and L between blocks: [C, C]."""
    for level in tl.static_range(4, 6):
        part = tl.where(half_mask(r, s, level), lower, 0.0)
        right = part + tl.dot((part * beta_s).to(tl.float16), n.to(tl.float16))
        n = n - right - tl.dot((n * beta_s).to(tl.float16), right.to(tl.float16))
    return n


@triton.jit
def on_diagonal(x):
    """[4, B, B] blocks -> [C, C] with the blocks on its diagonal."""
    i = tl.arange(0, 4)
    same = i[:, None, None, None] == i[None, None, :, None]
    return tl.where(same, x[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)


@triton.jit(do_not_specialize=["T", "num_sequences"])
def kda_prepare_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    A_log_ptr,
    dt_bias_ptr,
    sum_masks_ptr,
    cu_seqlens_ptr,
    q_decayed_ptr,
    k_decayed_ptr,
    k_remaining_ptr,
    n_ptr,
    p_ptr,
    decay_ptr,
    beta_out_ptr,
    row_scale_ptr,
    lower_bound,
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
    beta_stride_b,
    beta_stride_t,
    beta_stride_h,
    HV: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
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
    sequence, first, rows = locate_chunk(slot, cu_seqlens_ptr, T, num_sequences, VARLEN)
    if rows <= 0:
        return
    batch = 0 if VARLEN else sequence
    token = tl.arange(0, CHUNK)
    row = token[:, None]
    present = row < rows
    position = (first + row).to(tl.int64)
    key_head = head // GROUP
    batch64 = tl.cast(batch, tl.int64)
    q_row_ptr = q_ptr + batch64 * q_stride_b + key_head * q_stride_h + position * q_stride_t
    k_row_ptr = k_ptr + batch64 * k_stride_b + key_head * k_stride_h + position * k_stride_t
    g_row_ptr = g_ptr + batch64 * g_stride_b + head * g_stride_h + position * g_stride_t

    channel = tl.arange(0, KP)[None, :]
    whole = present & (channel < K)
    q_all = tl.load(q_row_ptr + channel, mask=whole, other=0.0).to(tl.float32)
    k_all = tl.load(k_row_ptr + channel, mask=whole, other=0.0).to(tl.float32)
    q_squares = tl.sum(q_all * q_all, axis=1, keep_dims=True)
    k_squares = tl.sum(k_all * k_all, axis=1, keep_dims=True)
    if L2NORM:
        q_scale = tl.rsqrt(q_squares + NORM_EPS)
        k_scale = tl.rsqrt(k_squares + NORM_EPS)
    else:
        q_scale = power_of_two_norm(q_squares)
        k_scale = power_of_two_norm(k_squares)

    raw_beta = tl.load(
        beta_ptr + batch64 * beta_stride_b + head * beta_stride_h + position * beta_stride_t,
        mask=present,
        other=0.0,
    ).to(tl.float32)
    beta = tl.where(present, write_strength(raw_beta, BETA), 0.0)
    tile = tl.cast(program, tl.int64)
    if not L2NORM:
        # (k, v, beta) and (k c, v c, beta / c^2) are the same update: keys enter near unit length.
        beta = beta / (k_scale * k_scale)
    tl.store(row_scale_ptr + tile * (2 * CHUNK) + row, q_scale)
    tl.store(row_scale_ptr + tile * (2 * CHUNK) + CHUNK + row, k_scale)
    tl.store(beta_out_ptr + tile * CHUNK + row, beta)

    rate = gate_rate(A_log_ptr, head, HAS_A)
    r16 = tl.arange(0, BLOCK)[None, :, None]
    s16 = tl.arange(0, BLOCK)[None, None, :]
    inner_l = tl.zeros((4, BLOCK, BLOCK), dtype=tl.float32)
    inner_p = tl.zeros((4, BLOCK, BLOCK), dtype=tl.float32)
    outer_l = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    outer_p = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    diagonal = tl.zeros((CHUNK, 1), dtype=tl.float32)
    tile_row = tile * (CHUNK * KP) + row * KP
    up_to_token = load_mask(sum_masks_ptr, 0)
    after_token = load_mask(sum_masks_ptr, 1)
    to_middle_16 = load_mask(sum_masks_ptr, 2)
    to_middle_32 = load_mask(sum_masks_ptr, 3)
    first_slice = tl.arange(0, D)[None, :]
    next_q = tl.load(q_row_ptr + first_slice, mask=present & (first_slice < K), other=0.0)
    next_k = tl.load(k_row_ptr + first_slice, mask=present & (first_slice < K), other=0.0)
    next_raw = tl.load(g_row_ptr + first_slice, mask=present & (first_slice < K), other=0.0)
    if HAS_BIAS:
        next_bias = tl.load(dt_bias_ptr + head * K + first_slice, mask=first_slice < K, other=0.0)
    for d in tl.range(0, KP, D, num_stages=1):
        column = d + tl.arange(0, D)[None, :]
        inside = present & (column < K)
        q = (next_q.to(tl.float32) * q_scale).to(tl.float16)
        k = (next_k.to(tl.float32) * k_scale).to(tl.float16)
        raw = next_raw.to(tl.float32)
        ahead = column + D
        next_q = tl.load(q_row_ptr + ahead, mask=present & (ahead < K), other=0.0)
        next_k = tl.load(k_row_ptr + ahead, mask=present & (ahead < K), other=0.0)
        next_raw = tl.load(g_row_ptr + ahead, mask=present & (ahead < K), other=0.0)
        bias = 0.0
        if HAS_BIAS:
            bias = next_bias.to(tl.float32)
            next_bias = tl.load(dt_bias_ptr + head * K + ahead, mask=ahead < K, other=0.0)
        g = tl.where(inside, gate_log2(raw, rate, bias, lower_bound, GATE), 0.0)
        g_high, g_low = split_half(g)

        from_start = tl.exp2(sums(up_to_token, g_high, g_low)).to(tl.float16)
        to_end = tl.exp2(sums(after_token, g_high, g_low)).to(tl.float16)
        tl.store(q_decayed_ptr + tile_row + column, q * from_start)
        tl.store(k_decayed_ptr + tile_row + column, k * from_start)
        tl.store(k_remaining_ptr + tile_row + column, k * to_end)
        tl.store(decay_ptr + tile * KP + column, tl.exp2(tl.sum(g, axis=0, keep_dims=True)))

        # Halves of 16 and 32 tokens, across blocks: dense products of the whole chunk.
        for which in tl.static_range(2):
            factor = tl.exp2(sums(to_middle_16 if which == 0 else to_middle_32, g_high, g_low)).to(tl.float16)
            k_f = k * factor
            mask = half_mask(row, token[None, :], 4 + which)
            outer_l += tl.where(mask, tl.dot(k_f, tl.trans(k_f)), 0.0)
            outer_p += tl.where(mask, tl.dot(q * factor, tl.trans(k_f)), 0.0)

        # Halves of 8, 4, 2 and 1 tokens, inside a block.
        q_blocks = q.reshape(4, BLOCK, D)
        k_blocks = k.reshape(4, BLOCK, D)
        high_blocks = g_high.reshape(4, BLOCK, D)
        low_blocks = g_low.reshape(4, BLOCK, D)
        for level in tl.static_range(4):
            factor3 = tl.exp2(sum_over(between_mask(r16, s16, level), high_blocks, low_blocks)).to(tl.float16)
            k_f3 = k_blocks * factor3
            k_t3 = tl.permute(k_f3, (0, 2, 1))
            mask3 = half_mask(r16, s16, level)
            inner_l += tl.where(mask3, tl.dot(k_f3, k_t3), 0.0)
            inner_p += tl.where(mask3, tl.dot(q_blocks * factor3, k_t3), 0.0)
        diagonal += tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1, keep_dims=True)

    r64 = row
    s64 = token[None, :]
    diagonal = diagonal.reshape(4, BLOCK, 1)
    beta_row = beta.reshape(1, CHUNK)
    beta_blocks = beta.reshape(4, 1, BLOCK)
    inner_p += tl.where(r16 == s16, diagonal, 0.0)
    tile_64 = tile * (CHUNK * CHUNK) + r64 * CHUNK + s64
    tl.store(p_ptr + tile_64, (outer_p + on_diagonal(inner_p)).to(tl.float16))
    n = on_diagonal(inverse_in_block(inner_l, beta_blocks, r16, s16))
    n = inverse_of_chunk(n, outer_l, beta_row, r64, s64)
    tl.store(n_ptr + tile_64, n.to(tl.float16))
