"""The FFN over expert-grouped rows, with two sets of weights: home experts and the copied ones in their slots.

Legend: N rows, G groups, H dispatched width, Hi expert FFN width. Groups 0 .. epn-1 are home experts; the slots of
copied experts follow.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from kernels.moe.reference import ExpertWeights
from kernels.moe.situ import situ_backward, situ_forward

ACTIVATIONS = ("situ",)
Saved = tuple[torch.Tensor, torch.Tensor]


def grouped_ffn(
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> torch.Tensor:
    """`down(situ(gate x) * cap(up x))` of each row with its group's expert; differentiable once.

    Args:
        rows_NH: [N, H], grouped: group i is rows `offsets[i-1]` to `offsets[i]`. Rows after the last offset are not
            read; their results and gradients are zero.
        offsets_G: [G] int32 end offsets; empty groups are fine.
        home: (gate [epn, Hi, H], up [epn, Hi, H], down [epn, H, Hi]).
        copies: the same for `G - epn` slots; None when there are none.
        activation: "situ".

    Returns:
        [N, H] in rows' dtype.

    Raises:
        ValueError: unknown activation, or more groups than weights.
    """
    _check(rows_NH, offsets_G, home, copies, activation)
    none = (None, None, None)
    return _GroupedFFN.apply(rows_NH, offsets_G, beta_gate, beta_up, *home, *(copies or none))


@torch.no_grad()
def grouped_ffn_forward(
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> tuple[torch.Tensor, Saved]:
    """`grouped_ffn` without autograd: (out [N, H], what `grouped_ffn_backward` takes as `saved`)."""
    _check(rows_NH, offsets_G, home, copies, activation)
    out = torch.zeros_like(rows_NH)
    gate = rows_NH.new_empty(rows_NH.shape[0], home[0].shape[1])
    up = torch.empty_like(gate)
    for piece, (gate_w, up_w, down_w) in _groups(offsets_G, home, copies):
        torch.mm(rows_NH[piece], gate_w.T, out=gate[piece])
        torch.mm(rows_NH[piece], up_w.T, out=up[piece])
        torch.mm(situ_forward(gate[piece], up[piece], beta_gate, beta_up), down_w.T, out=out[piece])
    return out, (gate, up)


@torch.no_grad()
def grouped_ffn_backward(
    d_out_NH: torch.Tensor,
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    saved: Saved | None = None,
    activation: str = "situ",
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
    grad_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ExpertWeights, ExpertWeights | None]:
    """Gradients of `grouped_ffn`: (d_rows [N, H], (d_gate, d_up, d_down) of home, the same of copies or None).

    Args:
        saved: what `grouped_ffn_forward` returned; None computes the pre-activations again.
        grad_dtype: of the weight gradients; None takes the weights' dtype.
    """
    if saved is None:
        _, saved = grouped_ffn_forward(
            rows_NH, offsets_G, home, copies, activation=activation, beta_gate=beta_gate, beta_up=beta_up
        )
    gate, up = saved
    d_rows = torch.zeros_like(rows_NH)
    d_home = tuple(torch.zeros_like(w, dtype=grad_dtype) for w in home)
    d_copies = None if copies is None else tuple(torch.zeros_like(w, dtype=grad_dtype) for w in copies)
    gradients = _groups(offsets_G, d_home, d_copies)
    for (piece, (gate_w, up_w, down_w)), (_, (d_gate_w, d_up_w, d_down_w)) in zip(
        _groups(offsets_G, home, copies), gradients, strict=True
    ):
        d_h = d_out_NH[piece] @ down_w
        d_gate, d_up, h = situ_backward(d_h, gate[piece], up[piece], beta_gate, beta_up)
        d_rows[piece] = d_gate @ gate_w + d_up @ up_w
        d_gate_w.copy_(d_gate.T @ rows_NH[piece])
        d_up_w.copy_(d_up.T @ rows_NH[piece])
        d_down_w.copy_(d_out_NH[piece].T @ h)
    return d_rows, d_home, d_copies  # type: ignore[return-value]


def _groups(offsets_G, home, copies):
    """(slice of rows, weights of its expert) for each group that has rows."""
    start, result = 0, []
    for group, end in enumerate(offsets_G.tolist()):
        weights, index = (home, group) if group < home[0].shape[0] else (copies, group - home[0].shape[0])
        if end > start:
            result.append((slice(start, end), tuple(w[index] for w in weights)))
        start = end
    return result


def _check(rows_NH, offsets_G, home, copies, activation) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown; allowed: {', '.join(ACTIVATIONS)}")
    experts = home[0].shape[0] + (0 if copies is None else copies[0].shape[0])
    if offsets_G.shape[0] > experts:
        raise ValueError(f"offsets names {offsets_G.shape[0]} groups; home and copies hold {experts} experts")
    for name, weights in (("home", home), ("copies", copies)):
        if weights is None:
            continue
        gate, up, down = weights
        width = rows_NH.shape[1]
        if gate.shape != up.shape or gate.shape[2] != width or down.shape != (gate.shape[0], width, gate.shape[1]):
            raise ValueError(
                f"{name} must be gate, up [n, Hi, H={width}] and down [n, H, Hi]; "
                f"got {list(gate.shape)}, {list(up.shape)}, {list(down.shape)}"
            )


class _GroupedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_NH, offsets_G, beta_gate, beta_up, *weights):
        home = weights[:3]
        copies = None if weights[3] is None else weights[3:]
        ctx.betas = dict(beta_gate=beta_gate, beta_up=beta_up)
        out, saved = grouped_ffn_forward(rows_NH, offsets_G, home, copies, **ctx.betas)
        ctx.save_for_backward(rows_NH, offsets_G, *saved, *weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        rows, offsets, gate, up, *weights = ctx.saved_tensors
        copies = None if weights[3] is None else tuple(weights[3:])
        d_rows, d_home, d_copies = grouped_ffn_backward(
            d_out, rows, offsets, tuple(weights[:3]), copies, saved=(gate, up), **ctx.betas
        )
        return d_rows, None, None, None, *d_home, *(d_copies or (None, None, None))
