"""The router's choice and the histogram of Quantile Balancing (K3 report section 2.3.3 and appendix D).

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch


def router_topk(
    scores_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of largest `scores + bias`, in that order, and the value the next one had.

    A tie goes to the lower expert id, on every device. No gradient flows through either result.

    Args:
        scores_TE: [T, E] sigmoid scores.  bias_E: [E].  top_k: 1 <= top_k < E.

    Returns:
        ids [T, K] int32, and the cutoff [T]: the (k+1)-th largest of `scores + bias`.

    Raises:
        ValueError: top_k outside 1 .. E - 1 (the cutoff would not exist).
    """
    num_experts = scores_TE.shape[-1]
    if not 1 <= top_k < num_experts:
        allowed = f"allowed: 1 to {num_experts - 1}"
        raise ValueError(f"top_k={top_k} is out of range for {num_experts} experts; {allowed}")
    with torch.no_grad():
        biased = scores_TE + bias_E
        if biased.dtype == torch.float32:
            order = _sort_keys(biased).topk(top_k + 1, dim=-1).indices
        else:
            order = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, : top_k + 1]
        return order[:, :top_k].to(torch.int32), biased.gather(1, order[:, top_k:]).squeeze(1)


def _sort_keys(x_TE: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys in the order of (x, lower id first), so that an unstable top-k has no ties to
    break.

    The bits of an fp32 number, its magnitude flipped where it is negative, order as integers do; `+ 0.0`
    makes -0.0 equal 0.0. The reversed id fills the low 32 bits.
    """
    bits = (x_TE + 0.0).view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << 32
    return key | torch.arange(x_TE.shape[1] - 1, -1, -1, device=x_TE.device)


@torch.no_grad()
def quantile_histogram(
    scores_TE: torch.Tensor,
    cutoff_T: torch.Tensor,
    low: float | torch.Tensor,
    width: float | torch.Tensor,
    bins: int,
    mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Counts of the required biases `cutoff_t - scores_te` of every token and expert, in `bins` equal bins.

    Args:
        scores_TE: [T, E] raw sigmoid scores, without bias.  cutoff_T: [T] from `router_topk`.
        low: left edge of bin 0 (K3: min(bias) - 1).  width: of one bin.  Numbers or 0-dim tensors.
        bins: number of bins; values outside fall into the first or the last, NaN into the first.
        mask_T: [T] bool; False leaves a token (padding) out.

    Returns:
        [E, bins] int32; each row sums to the number of tokens counted.
    """
    num_experts = scores_TE.shape[1]
    if mask_T is not None:
        scores_TE, cutoff_T = scores_TE[mask_T], cutoff_T[mask_T]
    required = cutoff_T.unsqueeze(1) - scores_TE
    # NaN would become a negative bin and end the forward pass; the trainer reports divergence by its loss.
    bin_TE = torch.floor((required - low) / width).nan_to_num_(nan=0.0).clamp_(0, bins - 1).to(torch.int64)
    bin_TE += torch.arange(0, num_experts * bins, bins, device=scores_TE.device)
    counts = torch.bincount(bin_TE.flatten(), minlength=num_experts * bins)
    return counts.view(num_experts, bins).to(torch.int32)
