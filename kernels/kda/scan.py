"""Second forward launch: the chunks of a sequence in order, one program a (sequence, head, slice of V).

The state is held transposed, S [BV, K] in fp32, so that every product takes its left operand from registers
and its right one from a loaded tile. Of a chunk the program makes

    Y = V - K~ S,   Z = Y + N (beta Y),   U = beta Z,   O = scale (Q~ S + P U),   S <- e^(G_C) S + K^^T U.

S, beta Y and U enter their products as fp16 under a power of two per row (a value channel): three more bits
than bfloat16, and no range of v can overflow.

Legend: C tokens of a chunk, BV value channels of the program, KP key channels padded to a power of two; a
trailing _t marks a transposed tile [BV, C].
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.kda.tiles import CHUNK, add_product, locate_sequence, row_exponent, to_half


@triton.jit
def state_offsets(
    sequence, head, v, k, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr
):
    """Offsets of a [BV, KP] tile of a state [N, HV, K, V], or [N, HV, V, K] when V_FIRST."""
    base = tl.cast(sequence * HV + head, tl.int64) * (K * V)
    if V_FIRST:
        return base + v[:, None] * K + k[None, :]
    return base + k[None, :] * V + v[:, None]


@triton.jit(do_not_specialize=["T"])
def kda_scan_kernel(
    q_decayed_tiles,
    k_decayed_tiles,
    k_remaining_tiles,
    n_tiles,
    p_tiles,
    decay_ptr,
    beta_ptr,
    row_scale_ptr,
    v_ptr,
    o_ptr,
    z_ptr,
    h_ptr,
    initial_state_ptr,
    final_state_ptr,
    cu_seqlens_ptr,
    scale,
    T,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    SAVE: tl.constexpr,
    OUTPUT: tl.constexpr,
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
    if HAS_INITIAL:
        state = tl.load(initial_state_ptr + state_offset, mask=state_mask, other=0.0).to(tl.float32)
    else:
        state = tl.zeros((BV, KP), dtype=tl.float32)
    v_ptr += row_of_batch * v_stride_b + head * v_stride_h
    o_ptr += (row_of_batch * T * HV + head) * V

    for chunk in tl.range(0, (length + CHUNK - 1) // CHUNK, num_stages=STAGES):
        tile = tl.cast(slot + chunk, tl.int64) * HV + head
        row = ((slot + chunk) * HV + head) * CHUNK
        local = token + chunk * CHUNK
        inside = (local < length)[:, None] & (v < V)[None, :]
        position = (local + start).to(tl.int64)[:, None]
        k_decayed = k_decayed_tiles.load([row, 0])
        n = n_tiles.load([row, 0])
        q_decayed = q_decayed_tiles.load([row, 0])
        p = p_tiles.load([row, 0])
        k_remaining = k_remaining_tiles.load([row, 0])
        decay = tl.load(decay_ptr + tile * KP + k)
        beta = tl.load(beta_ptr + tile * CHUNK + token)
        value_t = tl.trans(tl.load(v_ptr + position * v_stride_t + v[None, :], mask=inside, other=0.0))
        value_t = value_t.to(tl.float32)
        if SCALED:
            value_t *= tl.load(row_scale_ptr + tile * (2 * CHUNK) + CHUNK + token)[None, :]
        if SAVE:
            h_tile = tile * (V * KP) + v[:, None] * KP + k[None, :]
            tl.store(h_ptr + h_tile, state.to(tl.bfloat16), mask=(v < V)[:, None])

        exponent = row_exponent(state)
        state_half, state_unit = to_half(state, exponent)
        y_t = value_t - tl.dot(state_half, tl.trans(k_decayed)) * state_unit[:, None]
        by_t = y_t * beta[None, :]
        by_half, by_unit = to_half(by_t, row_exponent(by_t))
        z_t = y_t + tl.dot(by_half, tl.trans(n)) * by_unit[:, None]
        u_t = z_t * beta[None, :]
        u_exponent = tl.maximum(row_exponent(u_t), exponent - 20)
        u_half, u_unit = to_half(u_t, u_exponent)
        if OUTPUT:
            o_t = tl.dot(state_half, tl.trans(q_decayed)) * state_unit[:, None]
            o_t += tl.dot(u_half, tl.trans(p)) * u_unit[:, None]
            o_t *= scale
            if SCALED:
                o_t /= tl.load(row_scale_ptr + tile * (2 * CHUNK) + token)[None, :]
            o_tile = position * (HV * V) + v[None, :]
            tl.store(o_ptr + o_tile, tl.trans(o_t.to(o_ptr.dtype.element_ty)), mask=inside)
        state = add_product(state, decay, u_half, u_unit, u_exponent, k_remaining)
        if SAVE:
            z_tile = tile * (CHUNK * V) + token[:, None] * V + v[None, :]
            tl.store(z_ptr + z_tile, tl.trans(z_t.to(tl.bfloat16)), mask=(v < V)[None, :])

    if HAS_FINAL:
        tl.store(final_state_ptr + state_offset, state, mask=state_mask)
