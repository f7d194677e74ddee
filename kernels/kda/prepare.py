"""First forward launch: everything of a chunk that does not need the state, in parallel over chunks and heads.

With G the running sum of the log decay inside a chunk, L_rs = sum_d k_rd k_sd e^(G_rd - G_sd) for s < r, and
P_rs = sum_d q_rd k_sd e^(G_rd - G_sd) for s <= r, the program writes

    q~ = q e^G,   k~ = k e^G,   k^ = k e^(G_C - G),   e^(G_C),   beta,   P,   N = -(I + L diag(beta))^-1 L

so that the scan needs products alone: Z = Y + N (beta Y) with Y = V - K~ S, U = beta Z.

Exponents are split at halfway points: in a block of 2h tokens, a row of the second half and a key of the first are
both decayed to the middle, so each factor is at most 1 whatever the gate, fits fp16, and knows no later token. Halves
of 32, 16, 8, 4, 2, 1 tokens cover every pair s < r once.

Legend: C = 64 tokens of a chunk, four blocks (axis 0) of B = 16 tokens (axis 1), D channels of a slice (axis 2).
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
    """Pairs (row, key) of one block of 2h tokens, h = 2^level, with the row in its second and the key in its first half."""
    return ((r >> level + 1) == (s >> level + 1)) & ((r >> level) > (s >> level))


@triton.jit
def between_mask(r, s, level):
    """Tokens s whose decay lies between token r and the middle of its block of 2h tokens, h = 2^level."""
    middle = (((r >> level + 1) << 1) + 1) << level
    return ((s >= middle) & (s <= r)) | ((s > r) & (s < middle))


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
    """N of each block from its strictly lower L: [4, B, B]. Doubles the halves: N21 = -(I + N22 b) L21 (I + b N11)."""
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
    block = tl.arange(0, 4)[:, None, None]
    token = tl.arange(0, BLOCK)[None, :, None]
    row = block * BLOCK + token
    present = row < rows
    position = (first + row).to(tl.int64)
    key_head = head // GROUP
    batch64 = tl.cast(batch, tl.int64)
    q_row_ptr = q_ptr + batch64 * q_stride_b + key_head * q_stride_h + position * q_stride_t
    k_row_ptr = k_ptr + batch64 * k_stride_b + key_head * k_stride_h + position * k_stride_t
    g_row_ptr = g_ptr + batch64 * g_stride_b + head * g_stride_h + position * g_stride_t

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
    r64 = tl.arange(0, CHUNK)[:, None]
    s64 = tl.arange(0, CHUNK)[None, :]
    inner_l = tl.zeros((4, BLOCK, BLOCK), dtype=tl.float32)
    inner_p = tl.zeros((4, BLOCK, BLOCK), dtype=tl.float32)
    outer_l = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    outer_p = tl.zeros((CHUNK, CHUNK), dtype=tl.float32)
    diagonal = tl.zeros((4, BLOCK, 1), dtype=tl.float32)
    tile_row = tile * (CHUNK * KP) + row * KP
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
        through = tl.cumsum(total, axis=0)
        chunk_total = tl.sum(total, axis=0, keep_dims=True)
        k_to_end = k * tl.exp2(after_token + (chunk_total - through))
        from_start = tl.exp2(before_token + (through - total))
        tl.store(q_decayed_ptr + tile_row + column, (q * from_start).to(tl.float16))
        tl.store(k_decayed_ptr + tile_row + column, (k * from_start).to(tl.float16))
        tl.store(k_remaining_ptr + tile_row + column, k_to_end.to(tl.float16))
        tl.store(decay_ptr + tile * KP + column, tl.exp2(chunk_total))

        # Halves of 16 and 32 tokens, across blocks: dense products of the whole chunk.
        to_edge = tl.where(block % 2 == 1, before_token, after_token)
        factor = tl.exp2(to_edge)
        kf = (k * factor).to(tl.float16).reshape(CHUNK, D)
        qf = (q * factor).to(tl.float16).reshape(CHUNK, D)
        mask = half_mask(r64, s64, 4)
        outer_l += tl.where(mask, tl.dot(kf, tl.trans(kf)), 0.0)
        outer_p += tl.where(mask, tl.dot(qf, tl.trans(kf)), 0.0)
        total_1 = tl.sum(tl.where(block == 1, total, 0.0), axis=0, keep_dims=True)
        total_2 = tl.sum(tl.where(block == 2, total, 0.0), axis=0, keep_dims=True)
        neighbour = tl.where(block == 0, total_1, tl.where(block == 3, total_2, 0.0))
        factor = tl.exp2(tl.where(block >= 2, before_token, after_token) + neighbour)
        kf = (k * factor).to(tl.float16).reshape(CHUNK, D)
        qf = (q * factor).to(tl.float16).reshape(CHUNK, D)
        mask = half_mask(r64, s64, 5)
        outer_l += tl.where(mask, tl.dot(kf, tl.trans(kf)), 0.0)
        outer_p += tl.where(mask, tl.dot(qf, tl.trans(kf)), 0.0)

        # Halves of 8, 4, 2 and 1 tokens, inside a block.
        for level in tl.static_range(4):
            factor3 = tl.exp2(sum_over(between_mask(r16, s16, level), g_high, g_low))
            kf3 = (k * factor3).to(tl.float16)
            qf3 = (q * factor3).to(tl.float16)
            kt3 = tl.permute(kf3, (0, 2, 1))
            mask3 = half_mask(r16, s16, level)
            inner_l += tl.where(mask3, tl.dot(kf3, kt3), 0.0)
            inner_p += tl.where(mask3, tl.dot(qf3, kt3), 0.0)
        diagonal += tl.sum(q * k, axis=2, keep_dims=True)

    inner_p += tl.where(r16 == s16, diagonal, 0.0)
    tile_64 = tile * (CHUNK * CHUNK) + r64 * CHUNK + s64
    tl.store(p_ptr + tile_64, (outer_p + on_diagonal(inner_p)).to(tl.float16))
    n = on_diagonal(inverse_in_block(inner_l, tl.permute(beta, (0, 2, 1)), r16, s16))
    n = inverse_of_chunk(n, outer_l, beta.reshape(1, CHUNK), r64, s64)
    tl.store(n_ptr + tile_64, n.to(tl.float16))
