"""First backward launch: the chunks of a sequence from last to first, one program a (sequence, head, slice
of V).

With dS the gradient of the state after a chunk, held transposed as in the forward scan,

    dU = scale P^T dO + K^ dS,   X = dU + N^T (beta dU),   W = beta X,
    dS <- e^(G_C) dS + scale Q~^T dO - K~^T W.

It writes X, from which dv = W, dbeta = X.Z and the gradient of every key and gate follow, and dS after each
chunk. Operands enter as fp16 under a power of two per row, as in the forward scan.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.scan import state_offsets
from kernels.kda.tiles import CHUNK, add_product, locate_sequence, row_exponent, to_half


@triton.jit(do_not_specialize=["T"])
def kda_reverse_scan_kernel(
    q_decayed_tiles,
    k_decayed_tiles,
    k_remaining_tiles,
    n_tiles,
    p_tiles,
    decay_ptr,
    beta_ptr,
    row_scale_ptr,
    do_ptr,
    x_ptr,
    dh_ptr,
    d_final_state_ptr,
    d_initial_state_ptr,
    cu_seqlens_ptr,
    scale,
    T,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    SCALED: tl.constexpr,
    VARLEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    value_block = tl.program_id(0)
    sequence = tl.program_id(1) // HV
    head = tl.program_id(1) % HV
    slot, start, length = locate_sequence(sequence, cu_seqlens_ptr, T, VARLEN)
    row_of_batch = tl.cast(0 if VARLEN else sequence, tl.int64)
    v = value_block * BV + tl.arange(0, BV)
    k = tl.arange(0, KP)
    token = tl.arange(0, CHUNK)
    state_mask = (v < V)[:, None] & (k < K)[None, :]
    state_offset = state_offsets(sequence, head, v, k, HV, K, V, V_FIRST)
    if HAS_FINAL:
        d_state = tl.load(d_final_state_ptr + state_offset, mask=state_mask, other=0.0).to(tl.float32)
    else:
        d_state = tl.zeros((BV, KP), dtype=tl.float32)
    do_ptr += row_of_batch * do_stride_b + head * do_stride_h

    chunks = (length + CHUNK - 1) // CHUNK
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step
        tile = tl.cast(slot + chunk, tl.int64) * HV + head
        row = ((slot + chunk) * HV + head) * CHUNK
        local = token + chunk * CHUNK
        inside = (local < length)[:, None] & (v < V)[None, :]
        position = (local + start).to(tl.int64)[:, None]
        k_remaining = k_remaining_tiles.load([row, 0])
        p = p_tiles.load([row, 0])
        n = n_tiles.load([row, 0])
        q_decayed = q_decayed_tiles.load([row, 0])
        k_decayed = k_decayed_tiles.load([row, 0])
        decay = tl.load(decay_ptr + tile * KP + k)
        beta = tl.load(beta_ptr + tile * CHUNK + token)
        do_t = tl.trans(tl.load(do_ptr + position * do_stride_t + v[None, :], mask=inside, other=0.0))
        do_t = do_t.to(tl.float32) * scale
        if SCALED:
            do_t /= tl.load(row_scale_ptr + tile * (2 * CHUNK) + token)[None, :]
        dh_tile = tile * (V * KP) + v[:, None] * KP + k[None, :]
        tl.store(dh_ptr + dh_tile, d_state.to(tl.bfloat16), mask=(v < V)[:, None])

        exponent = row_exponent(d_state)
        do_exponent = tl.maximum(row_exponent(do_t), exponent - 20)
        do_half, do_unit = to_half(do_t, do_exponent)
        ds_half, ds_unit = to_half(d_state, exponent)
        du_t = tl.dot(do_half, p) * do_unit[:, None]
        du_t += tl.dot(ds_half, tl.trans(k_remaining)) * ds_unit[:, None]
        bdu_t = du_t * beta[None, :]
        bdu_half, bdu_unit = to_half(bdu_t, row_exponent(bdu_t))
        x_t = du_t + tl.dot(bdu_half, n) * bdu_unit[:, None]
        w_t = x_t * beta[None, :]
        w_exponent = tl.maximum(row_exponent(w_t), tl.maximum(do_exponent, exponent) - 20)
        w_half, w_unit = to_half(-w_t, w_exponent)
        d_state = add_product(d_state, decay, do_half, do_unit, do_exponent, q_decayed)
        d_state = add_product(d_state, 0.0 * decay + 1.0, w_half, w_unit, w_exponent, k_decayed)

        x_tile = tile * (CHUNK * V) + token[:, None] * V + v[None, :]
        tl.store(x_ptr + x_tile, tl.trans(x_t.to(tl.bfloat16)), mask=(v < V)[None, :])

    if HAS_INITIAL:
        tl.store(d_initial_state_ptr + state_offset, d_state, mask=state_mask)
