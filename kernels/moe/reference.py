"""Plain references of the mixture-of-experts operators: what the fast forms and the Triton kernels are
checked against.

Legend: T tokens, E experts, K top-k, N rows grouped by expert, G groups, H dispatched width, Hi expert
FFN width.
"""

from __future__ import annotations

import torch

from kernels.precision import accumulation_dtype

ExpertWeights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def naive_situ_glu(
    gate: torch.Tensor, up: torch.Tensor, beta_gate: float = 4.0, beta_up: float = 25.0
) -> torch.Tensor:
    """`beta_gate tanh(gate / beta_gate) sigmoid(gate) * beta_up tanh(up / beta_up)` (K3 report eq. 12)."""
    dtype = accumulation_dtype(gate)
    g, u = gate.to(dtype), up.to(dtype)
    h = beta_gate * torch.tanh(g / beta_gate) * torch.sigmoid(g) * (beta_up * torch.tanh(u / beta_up))
    return h.to(gate.dtype)


def naive_router_topk(
    scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort `scores + bias` (stable: the lower expert id wins a tie), take k ids and the (k+1)-th value."""
    biased, order = torch.sort(scores_TE + bias_E, dim=-1, descending=True, stable=True)
    return order[:, :top_k].to(torch.int32), biased[:, top_k]


def naive_quantile_histogram(
    scores_TE: torch.Tensor,
    cutoff_T: torch.Tensor,
    low: float | torch.Tensor,
    width: float | torch.Tensor,
    bins: int,
    mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """`counts[e, clamp(floor((cutoff_t - scores_te - low) / width), 0, bins - 1)] += 1` over the tokens
    of the mask.
    """
    counts = torch.zeros(scores_TE.shape[1], bins, dtype=torch.int32)
    bin_TE = torch.floor((cutoff_T[:, None] - scores_TE - low) / width).clamp(0, bins - 1).long().tolist()
    for token, row in enumerate(bin_TE):
        if mask_T is None or bool(mask_T[token]):
            for expert, index in enumerate(row):
                counts[expert, index] += 1
    return counts


def naive_grouped_ffn(
    rows_NH: torch.Tensor,
    offsets_G: torch.Tensor,
    home: ExpertWeights,
    copies: ExpertWeights | None = None,
    *,
    beta_gate: float = 4.0,
    beta_up: float = 25.0,
) -> torch.Tensor:
    """One expert after another: `down(situ(gate x) * cap(up x))` on the rows of its group; zeros after
    the last.
    """
    outs, start = [rows_NH[:0]], 0
    for group, end in enumerate(offsets_G.tolist()):
        weights, index = (home, group) if group < home[0].shape[0] else (copies, group - home[0].shape[0])
        assert weights is not None
        gate, up, down = (w[index] for w in weights)
        x = rows_NH[start:end]
        outs.append(naive_situ_glu(x @ gate.T, x @ up.T, beta_gate, beta_up) @ down.T)
        start = end
    outs.append(torch.zeros_like(rows_NH[start:]))
    return torch.cat(outs)
