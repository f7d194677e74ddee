"""The parts of a chunk that need no state: decays, the products A and P, and the inverse T = (I + A)^-1.

Legend: cell one (chunk, head), C tokens of a chunk, K key dim. G is the running sum of the log decay in the
chunk; `rows` are [beta k; scale q], 2C rows a cell; AP is their [2C, C] products with the keys, A above P.

    A_rs = sum_d (beta k)_rd k_sd e^(G_rd - G_sd)   (s < r)
    P_rs = sum_d (scale q)_rd k_sd e^(G_rd - G_sd)  (s <= r)

Where G spans little enough, e^(G_r - G_s) factors into (row e^G)(key e^-G) and one matmul does both. Where it
spans more than floats can hold, every exponent is formed pair by pair: exact for any gate, C times the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# e^-80 = 2e-35 and its reciprocal are normal fp32 numbers with room for a dot product. 16 tokens at K3's
# bound of -5 span exactly 80; the rest is for rounding.
SPAN = 80.5
# Numbers of one [cells, C, C, K] block of pairwise exponents: 16 MB in fp32.
PAIRS_AT_ONCE = 1 << 22
# Rows of the blocks inverted by substitution; larger ones are merged from these by matmuls.
SUBSTITUTION = 16


@dataclass
class Decay:
    """Decays of each cell.

    Attributes:
        forward: e^G [cells, C, K].
        backward: e^-G, or None where it may overflow.
        tail: e^(G_C - G), or None where `backward` serves.
        total: e^(G_C) [cells, K].
        log: G in fp64 where `backward` is None.
    """

    forward: torch.Tensor
    backward: torch.Tensor | None
    tail: torch.Tensor | None
    total: torch.Tensor
    log: torch.Tensor | None = None


def factored_decay(g: torch.Tensor) -> Decay | None:
    """Decays by one exponential an element, or None where a chunk exceeds `SPAN` or g > 0."""
    forward = g.exp()
    rows = forward.unbind(1)
    for i in range(1, len(rows)):
        rows[i].mul_(rows[i - 1])
    total = forward[:, -1]
    if total.numel() and not (total.amin() >= math.exp(-SPAN) and g.amax() <= 0):
        return None
    return Decay(forward, forward.reciprocal(), None, total)


def pairwise_decay(g: torch.Tensor) -> Decay:
    """Decays for any gate, summed in fp64: one -1000 would cost an fp32 sum the digits of all that follow."""
    log = g.to(torch.float64).clamp(min=-1e4).cumsum(1)  # -inf has no differences; e^-10000 is 0
    last = log[:, -1:]
    forward, tail = log.exp().to(g.dtype), (last - log).exp().to(g.dtype)
    return Decay(forward, None, tail, forward[:, -1], log)


def products(rows: torch.Tensor, k: torch.Tensor, decay: Decay) -> torch.Tensor:
    """AP [cells, 2C, C] from the undecayed `rows` [cells, 2C, K] and `k` [cells, C, K] (pairwise form)."""
    out = rows.new_empty(rows.shape[0], rows.shape[1], k.shape[1])
    for cells, pairs in _pairs(decay, k):
        row = rows[cells].unflatten(1, (2, -1))
        out[cells] = torch.einsum("nhrd,nsd,nrsd->nhrs", row, k[cells], pairs).flatten(1, 2)
    return out


def products_backward(
    d_AP: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, decay: Decay
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d_rows, d_k) of `products`, with G held fixed."""
    d_rows, d_k = torch.empty_like(rows), torch.empty_like(k)
    for cells, pairs in _pairs(decay, k):
        d, row = d_AP[cells].unflatten(1, (2, -1)), rows[cells].unflatten(1, (2, -1))
        d_rows[cells] = torch.einsum("nhrs,nsd,nrsd->nhrd", d, k[cells], pairs).flatten(1, 2)
        d_k[cells] = torch.einsum("nhrs,nhrd,nrsd->nsd", d, row, pairs)
    return d_rows, d_k


def _pairs(decay: Decay, k: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(slice of cells, e^(G_r - G_s) [cells, C, C, K], zero for s > r), a bounded number at a time."""
    assert decay.log is not None
    chunk = k.shape[1]
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=k.device).triu(1).unsqueeze(-1)
    step = max(1, PAIRS_AT_ONCE // (chunk * chunk * k.shape[2]))
    for start in range(0, k.shape[0], step):
        log = decay.log[start : start + step]
        exponent = (log.unsqueeze(2) - log.unsqueeze(1)).to(k.dtype)
        yield slice(start, start + step), exponent.masked_fill_(future, -torch.inf).exp_()


def mask_products_(AP: torch.Tensor) -> torch.Tensor:
    """Keep s < r of the upper half and s <= r of the lower half, in place."""
    chunk = AP.shape[2]
    AP[:, :chunk].tril_(-1)
    AP[:, chunk:].tril_()
    return AP


def unit_inverse(A: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of strictly lower-triangular A [cells, C, C], by substitution; never a power series.

    Blocks of 16 rows are substituted with all cells in the last dimension, where a row is a few long vector
    operations; pairs of blocks are merged by [[T1, 0], [-T2 A21 T1, T2]].
    """
    chunk = A.shape[1]
    block = min(SUBSTITUTION, chunk)
    T = torch.zeros(A.shape, dtype=A.dtype, device=A.device)
    low = _diagonal_blocks(A, block).permute(1, 2, 3, 0).contiguous()
    inverse = torch.zeros_like(low)
    inverse.diagonal().fill_(1)
    for i in range(1, block):
        torch.sum(low[i, :i].unsqueeze(1) * inverse[:i, :i], 0, out=inverse[i, :i]).neg_()
    _diagonal_blocks(T, block).copy_(inverse.permute(3, 0, 1, 2))
    while block < chunk:
        for start in range(0, chunk, 2 * block):
            a, b = slice(start, start + block), slice(start + block, start + 2 * block)
            T[:, b, a] = (T[:, b, b] @ A[:, b, a] @ T[:, a, a]).neg_()
        block *= 2
    return T


def _diagonal_blocks(A: torch.Tensor, block: int) -> torch.Tensor:
    """View [cells, block, block, C / block] of the blocks on the diagonal of A [cells, C, C]."""
    return A.unflatten(2, (-1, block)).unflatten(1, (-1, block)).diagonal(dim1=1, dim2=3)
