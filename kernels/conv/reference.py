"""Causal depthwise convolution over time with an optional SiLU, a cache, and packed sequences.

Legend: B batch, T tokens, D channels, W taps, N sequences.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.precision import accumulation_dtype

ACTIVATIONS = ("silu", None)


def naive_short_convolution(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    *,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`y_t = act(sum_w weight[:, w] x_(t - W + 1 + w))`, sequence by sequence. See `short_convolution`."""
    dtype = accumulation_dtype(x_BTD)
    batch, _, channels = x_BTD.shape
    taps = weight_DW.shape[1]
    x_NT = x_BTD.to(dtype)
    if cu_seqlens is None:
        pieces = [x_NT]
    else:
        bounds = [int(c) for c in cu_seqlens]
        pieces = [x_NT[:, a:b] for a, b in itertools.pairwise(bounds)]
    sequences = batch if cu_seqlens is None else len(pieces)
    if initial_state is None:
        history = x_NT.new_zeros(sequences, channels, taps - 1)
    else:
        history = initial_state.to(dtype)
    outs, states = [x_NT[:, :0]], [history[:0]]
    for i, piece in enumerate(pieces):
        past = history if cu_seqlens is None else history[i : i + 1]
        padded = torch.cat([past, piece.transpose(1, 2)], -1)
        y = torch.zeros_like(piece.transpose(1, 2))
        for w in range(taps):
            y = y + padded[..., w : w + piece.shape[1]] * weight_DW[:, w, None].to(dtype)
        outs.append(y.transpose(1, 2))
        states.append(padded[..., padded.shape[-1] - (taps - 1) :])
    y = torch.cat(outs, 1)
    y = F.silu(y) if activation == "silu" else y
    state = torch.cat(states).to(x_BTD.dtype) if output_final_state else None
    return y.to(x_BTD.dtype), state


def short_convolution(
    x_BTD: torch.Tensor,
    weight_DW: torch.Tensor,
    *,
    activation: str | None = "silu",
    cu_seqlens: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal depthwise convolution (K3: W = 4 on q, k and v), then SiLU.

    Args:
        x_BTD: [B, T, D].
        weight_DW: [D, W]; the last tap meets the current token. No bias.
        activation: "silu" or None.
        cu_seqlens: [N + 1] boundaries of sequences packed into B = 1; a sequence never sees another.
        initial_state: [N, D, W - 1], the inputs before the first token; zeros when None.
        output_final_state: return the last W - 1 inputs of each sequence.

    Returns:
        y [B, T, D] in x's dtype, and the state [N, D, W - 1] or None.

    Raises:
        ValueError: an activation or a shape outside this contract.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; allowed: 'silu', None")
    if weight_DW.dim() != 2 or x_BTD.dim() != 3 or weight_DW.shape[0] != x_BTD.shape[2]:
        raise ValueError(f"x must be [B, T, D], weight [D, W]; got {x_BTD.shape}, {weight_DW.shape}")
    if cu_seqlens is not None and x_BTD.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs sequences packed into B=1; got B={x_BTD.shape[0]}")
    sequences = x_BTD.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = (sequences, x_BTD.shape[2], weight_DW.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != wanted:
        raise ValueError(f"initial_state must be {list(wanted)}; got {list(initial_state.shape)}")
    # Decoding: for a few tokens the plain form has fewer operations.
    if cu_seqlens is None and x_BTD.shape[1] < weight_DW.shape[1]:
        return naive_short_convolution(
            x_BTD,
            weight_DW,
            activation=activation,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
    bounds = _bounds(x_BTD, cu_seqlens)
    packed = cu_seqlens is not None
    y_BTD = _ShortConvolution.apply(x_BTD, weight_DW, activation, bounds, packed, initial_state)
    if not output_final_state:
        return y_BTD, None
    return y_BTD, _final_state(x_BTD, weight_DW.shape[1] - 1, bounds, initial_state)


def _bounds(x_BTD: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[int, ...]:
    """Boundaries of the sequences among the B * T tokens."""
    batch, tokens = x_BTD.shape[:2]
    if cu_seqlens is None:
        return tuple(i * tokens for i in range(batch + 1))
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in itertools.pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T={tokens}; got {list(bounds)}")
    return bounds


@lru_cache(maxsize=32)
def _head_tokens(
    bounds: tuple[int, ...], reach: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens whose taps reach before their sequence: flat numbers [N, W - 1] (0 where a sequence is
    shorter), and which of them exist.
    """
    with torch.inference_mode(False):  # else a later backward pass would be refused these cached arrays
        starts = torch.tensor(bounds, dtype=torch.int64)
        place = torch.arange(reach)
        exists = place < starts.diff().unsqueeze(1)
        return torch.where(exists, starts[:-1].unsqueeze(1) + place, 0).to(device), exists.to(device)


def _final_state(
    x_BTD: torch.Tensor, reach: int, bounds: tuple[int, ...], initial_state: torch.Tensor | None
) -> torch.Tensor:
    """[N, D, W - 1]: the last W - 1 inputs of each sequence, its history where it is shorter."""
    starts = torch.tensor(bounds, device=x_BTD.device)
    place = starts.diff().unsqueeze(1) - reach + torch.arange(reach, device=x_BTD.device)
    flat = x_BTD.reshape(-1, x_BTD.shape[2])
    if initial_state is None:
        history = x_BTD.new_zeros(len(place), reach, x_BTD.shape[2])
    else:
        history = initial_state.to(x_BTD.dtype).mT
    older = history.gather(1, (place + reach).clamp(0, max(0, reach - 1)).unsqueeze(2).expand_as(history))
    if not len(flat):
        return older.mT.contiguous()
    recent = flat[(starts[:-1].unsqueeze(1) + place).clamp(0, len(flat) - 1)]
    return torch.where((place >= 0).unsqueeze(2), recent, older).mT.contiguous()


def _shifted(x_NTD: torch.Tensor, taps_WD: torch.Tensor) -> torch.Tensor:
    """`sum_s taps[W - 1 - s] x[t - s]`, zeros before the first token."""
    last = len(taps_WD) - 1
    out = x_NTD * taps_WD[last]
    for shift in range(1, min(last + 1, x_NTD.shape[1])):
        out[:, shift:].addcmul_(x_NTD[:, :-shift], taps_WD[last - shift])
    return out


def _shifted_backward(
    d_NTD: torch.Tensor, x_NTD: torch.Tensor, taps_WD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_x, d_taps) of `_shifted`."""
    last = len(taps_WD) - 1
    d_x, d_taps = d_NTD * taps_WD[last], torch.zeros_like(taps_WD)
    d_taps[last] = (d_NTD * x_NTD).sum((0, 1))
    for shift in range(1, min(last + 1, x_NTD.shape[1])):
        d_x[:, :-shift].addcmul_(d_NTD[:, shift:], taps_WD[last - shift])
        d_taps[last - shift] = (d_NTD[:, shift:] * x_NTD[:, :-shift]).sum((0, 1))
    return d_x, d_taps


def _window(x_BTD: torch.Tensor, token, exists, initial_state: torch.Tensor | None) -> torch.Tensor:
    """[N, 2 (W - 1), D]: each sequence's history, then its first W - 1 tokens, zero where there are fewer."""
    channels = x_BTD.shape[2]
    first = x_BTD.new_zeros(*token.shape, channels)
    first[exists] = x_BTD.reshape(-1, channels)[token[exists]]
    history = torch.zeros_like(first) if initial_state is None else initial_state.to(x_BTD.dtype).mT
    return torch.cat([history, first], 1)


class _ShortConvolution(torch.autograd.Function):
    """Shifted multiply-adds as if each row were one sequence. The few tokens whose taps reach before
    their sequence come out wrong so, and are replaced by the same sum over a small window [history,
    first W - 1 tokens].
    """

    @staticmethod
    def forward(ctx: Any, x, weight, activation, bounds, packed, initial_state):
        wide, reach = x.to(accumulation_dtype(x)), weight.shape[1] - 1
        taps = weight.to(wide.dtype).T.contiguous()
        z = _shifted(wide, taps)
        ctx.heads = None
        if reach and (packed or initial_state is not None):
            ctx.heads = token, exists = _head_tokens(bounds, reach, x.device)
            window = _window(wide, token, exists, initial_state)
            z.view(-1, x.shape[2])[token[exists]] = _shifted(window, taps)[:, reach:][exists]
        ctx.save_for_backward(x, weight, z if activation == "silu" else None, initial_state)
        return (F.silu(z) if activation == "silu" else z).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y):
        x, weight, z, initial_state = ctx.saved_tensors
        wide, reach, channels = x.to(accumulation_dtype(x)), weight.shape[1] - 1, x.shape[2]
        taps = weight.to(wide.dtype).T.contiguous()
        d_z = d_y.to(wide.dtype)
        d_z = d_z.clone() if z is None else torch.ops.aten.silu_backward(d_z, z)
        d_history = None
        if ctx.heads is None:
            d_x, d_taps = _shifted_backward(d_z, wide, taps)
        else:
            token, exists = ctx.heads
            rows = token[exists]
            flat = d_z.view(-1, channels)
            d_window = wide.new_zeros(len(token), 2 * reach, channels)
            d_window[:, reach:][exists] = flat[rows]
            flat[rows] = 0
            d_x, d_taps = _shifted_backward(d_z, wide, taps)
            d_window, d_taps_window = _shifted_backward(
                d_window, _window(wide, token, exists, initial_state), taps
            )
            d_x.view(-1, channels)[rows] += d_window[:, reach:][exists]
            d_taps += d_taps_window
            if initial_state is not None:
                d_history = d_window[:, :reach].mT.to(initial_state.dtype)
        return d_x.to(x.dtype), d_taps.T.to(weight.dtype), None, None, None, d_history
