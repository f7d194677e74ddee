"""Second backward launch: gradients of the products within a chunk and of what is summed over V alone.

With U = beta Z and W = beta X, for s <= r (dL: s < r),

    dP = scale dO U^T,   dL = -W U^T,   dbeta = X.Z,   dv = W,

and the row sums that the gradient of the L2 norm needs: q.dq = o.dO and k.dk = 2 beta dbeta - v.dv. dP, its
transpose and dL + dL^T are left in fp16 under one power of two a chunk: the third launch reads them as
matrix operands.

Legend: C = 64 tokens of a chunk, VP value channels padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.tiles import CHUNK, locate_chunk


@triton.jit
def power_of_two_unit(x):
    """(2^-e, 2^e) that bring the largest magnitude of a tile to 2^14..2^15, for fp16."""
    bits = tl.max(tl.max(tl.abs(x), axis=1), axis=0).to(tl.int32, bitcast=True)
    exponent = tl.maximum(bits >> 23, 15)
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 14) << 23).to(
        tl.float32, bitcast=True
    )


@triton.jit(do_not_specialize=["T", "num_sequences"])
def kda_pairs_kernel(
    v_ptr,
    o_ptr,
    do_ptr,
    x_ptr,
    z_ptr,
    beta_ptr,
    row_scale_ptr,
    cu_seqlens_ptr,
    dp_ptr,
    dp_t_ptr,
    dl_ptr,
    rows_ptr,
    unit_ptr,
    dv_ptr,
    dbeta_ptr,
    scale,
    T,
    num_sequences,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    HV: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
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
        return
    batch = tl.cast(0 if VARLEN else sequence, tl.int64)
    token = tl.arange(0, CHUNK)
    value = tl.arange(0, VP)
    position = (first + token).to(tl.int64)
    present = token < rows
    inside = present[:, None] & (value < V)[None, :]
    out_row = (batch * T + position) * HV + head
    value_tile = tile * (CHUNK * V) + token[:, None] * V + value[None, :]
    do_row = do_ptr + batch * do_stride_b + head * do_stride_h + position * do_stride_t
    do = tl.load(do_row[:, None] + value[None, :], mask=inside, other=0.0).to(tl.bfloat16)
    x = tl.load(x_ptr + value_tile, mask=(value < V)[None, :], other=0.0)
    z = tl.load(z_ptr + value_tile, mask=(value < V)[None, :], other=0.0)
    beta = tl.load(beta_ptr + tile * CHUNK + token)
    row_tile = tile * (2 * CHUNK) + token
    do_scale = tl.full((CHUNK,), 1.0, tl.float32) * scale
    if not L2NORM:
        do_scale /= tl.load(row_scale_ptr + row_tile)
        k_scale = tl.load(row_scale_ptr + row_tile + CHUNK)

    r = token[:, None]
    s = token[None, :]
    dp = tl.dot(do, tl.trans(z)) * (do_scale[:, None] * beta[None, :])
    dl = tl.dot(x, tl.trans(z)) * (-beta[:, None] * beta[None, :])
    dp = tl.where(r >= s, dp, 0.0)
    dl = tl.where(r > s, dl, 0.0)
    to_unit, unit = power_of_two_unit(tl.maximum(tl.abs(dp), tl.abs(dl)))
    square = tile * (CHUNK * CHUNK) + r * CHUNK + s
    dp_half = (dp * to_unit).to(tl.float16)
    dl_half = (dl * to_unit).to(tl.float16)
    tl.store(dp_ptr + square, dp_half)
    tl.store(dp_t_ptr + square, tl.trans(dp_half))
    tl.store(dl_ptr + square, dl_half + tl.trans(dl_half))
    tl.store(unit_ptr + tile, unit)
    rows_tile = rows_ptr + tile * (3 * CHUNK) + token
    tl.store(rows_tile, tl.sum(tl.where(r == s, dp, 0.0), axis=1))

    x = x.to(tl.float32)
    d_beta = tl.sum(x * z.to(tl.float32), axis=1)
    if L2NORM:
        outputs = tl.load(o_ptr + (out_row * V)[:, None] + value[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        tl.store(rows_tile + CHUNK, tl.sum(outputs * do.to(tl.float32), axis=1))
        v_row = v_ptr + batch * v_stride_b + head * v_stride_h + position * v_stride_t
        values = tl.load(v_row[:, None] + value[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(rows_tile + 2 * CHUNK, beta * (2.0 * d_beta - tl.sum(values * x, axis=1)))
    strength = beta
    v_scale = beta
    if not L2NORM:
        strength *= k_scale * k_scale
        v_scale *= k_scale
        d_beta /= k_scale * k_scale
    d_value = (x * v_scale[:, None]).to(dv_ptr.dtype.element_ty)
    tl.store(dv_ptr + (out_row * V)[:, None] + value[None, :], d_value, mask=inside)
    if BETA == 1:
        d_beta *= strength * (1.0 - strength)
    elif BETA == 2:
        d_beta *= strength * (1.0 - 0.5 * strength)
    tl.store(dbeta_ptr + out_row, d_beta.to(dbeta_ptr.dtype.element_ty), mask=present)
