"""Causal depthwise convolution over time with an optional SiLU, a cache, and packed sequences.

Legend: B batch, T tokens, D channels, W taps, N sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
        pieces = [x_NT[:, a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    sequences = batch if cu_seqlens is None else len(pieces)
    if initial_state is None:
        history = x_NT.new_zeros(sequences, channels, taps - 1)
    else:
        history = initial_state.to(dtype)
    outs, states = [x_NT[:, :0]], [history[:0]]
    for i, piece in enumerate(pieces):
        past = history if cu_seqlens is None else history[i : i + 1]
        padded = torch.cat([past, piece.transpose(1, 2)], -1)
        y = sum(padded[..., w : w + piece.shape[1]] * weight_DW[:, w, None].to(dtype) for w in range(taps))
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
        raise ValueError(f"x must be [B, T, D] and weight [D, W]; got {list(x_BTD.shape)} and {list(weight_DW.shape)}")
    if cu_seqlens is not None and x_BTD.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs sequences packed into B=1; got B={x_BTD.shape[0]}")
    sequences = x_BTD.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = (sequences, x_BTD.shape[2], weight_DW.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != wanted:
        raise ValueError(f"initial_state must be {list(wanted)}; got {list(initial_state.shape)}")
    return naive_short_convolution(
        x_BTD,
        weight_DW,
        activation=activation,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        output_final_state=output_final_state,
    )
