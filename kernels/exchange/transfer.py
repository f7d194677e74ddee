"""The exchange on the device, without a host read: rows and route weights; copies of experts: experts.py.

Order of a layer, each step for the ranks this process plays, `barrier` between the lines where peers are
other processes (in loopback the stream's order suffices):

    push (rows, weights, records), push_copies
    replicate, experts on [NvS, H]
    presum, find_sources
    final_sum; return_gradients after a backward pass

Shapes: R ranks, n ranks played (a leading axis of every per-rank tensor), s tokens of a rank, K top-k, NvS
rows of a shard, H width, E experts, epn = E/R, G groups of a rank. Triton is imported at the first call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.exchange.experts import Holders, find_holders, push_copies, return_gradients
from kernels.exchange.shards import (
    REGIONS,
    Shards,
    barrier,
    power_of_two,
    region_addresses,
    region_shapes,
    sum_dtype,
    triton_dtype,
)

__all__ = [
    "ABSENT",
    "REGIONS",
    "Holders",
    "Shards",
    "Sources",
    "barrier",
    "final_sum",
    "find_holders",
    "find_sources",
    "gather_weights",
    "presum",
    "push",
    "push_copies",
    "region_addresses",
    "region_shapes",
    "replicate",
    "return_gradients",
    "scatter_weights",
]

ABSENT = -(1 << 62)  # destination of an entry that does not exist (a rank with fewer tokens than the others)
MAX_BLOCK_WORDS = 4096  # a row up to 16 KB is read by one program in one go: 128 threads, 8 x 16 bytes each


def _words(x: torch.Tensor) -> int:
    """32-bit words of a row; rows must be whole 16-byte vectors."""
    row_bytes = x.shape[-1] * x.element_size()
    if row_bytes % 16 or x.data_ptr() % 16 or not x.is_contiguous():
        raise ValueError(
            f"rows of {row_bytes} bytes at address {x.data_ptr() % 16} modulo 16: rows must be contiguous, "
            "16-byte aligned and a multiple of 16 bytes long; pad the width"
        )
    return row_bytes // 4


def _row_launch(words: int) -> tuple[int, int]:
    """(words a program takes at once, its warps): 16 bytes a thread, up to 8 of them in flight."""
    block = min(power_of_two(words), MAX_BLOCK_WORDS)
    return block, max(1, min(4, block // 1024))


def _sum_launch(width: int, element_size: int) -> tuple[int, int]:
    """(elements, warps) of the summing kernels: one 16-byte load a thread for each row of a token."""
    vector = 16 // element_size
    threads = max(32, min(128, power_of_two(-(-width // vector))))
    return threads * vector, threads // 32


def push(
    shards: Shards,
    x: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None,
    offsets: torch.Tensor,
    group_rows: torch.Tensor,
    *,
    token_padding: int,
    records: bool = True,
) -> None:
    """Dispatches rows `x [n, s, H]` to `targets [n, s, K]` (`destinations` of the plan), and zeroes padding.

    A row is stored at every place on its own rank and at its first place on every other rank; `replicate`
    fills the rest. `weights [n, s, K]` fp32 go to every place. Rows past a rank's last group are not
    touched.

    Args:
        offsets, group_rows: `[R, G]` of the plan.
        token_padding: rows groups are padded to.
        records: also send what `replicate` and `presum` need; False if the shard still holds this plan's.

    Raises:
        ValueError: rows that are not whole aligned 16-byte vectors.
    """
    from kernels.exchange.dispatch import push_kernel

    words = _words(x)
    block, warps = _row_launch(words)
    groups, lanes = offsets.shape[1], -(-token_padding // 8)
    s = x.shape[1]
    push_kernel[(s + groups * lanes, shards.played)](
        shards.addresses,
        x.view(torch.int32),
        targets,
        weights,
        offsets,
        group_rows,
        s,
        shards.shard_rows,
        shards.num_ranks,
        shards.first_rank,
        groups,
        shards.partials_of_token,
        K=shards.top_k,
        K_PAD=power_of_two(shards.top_k),
        WORDS=words,
        BLOCK=block,
        LANES=lanes,
        WEIGHTED=weights is not None,
        RECORDS=records,
        WIDE=shards.wide,
        CONTROLLED=shards.controlled,
        num_warps=warps,
    )


def replicate(shards: Shards, offsets: torch.Tensor, row_bytes: int) -> None:
    """Copies rows that arrived from other ranks to the other places of their token on the same rank."""
    from kernels.exchange.dispatch import replicate_kernel

    block, warps = _row_launch(row_bytes // 4)
    replicate_kernel[(shards.shard_rows, shards.played)](
        shards.addresses,
        offsets,
        shards.num_ranks,
        shards.first_rank,
        offsets.shape[1],
        K=shards.top_k,
        WORDS=row_bytes // 4,
        BLOCK=block,
        CONTROLLED=shards.controlled,
        num_warps=warps,
    )


def presum(
    shards: Shards,
    offsets: torch.Tensor,
    width: int,
    dtype: torch.dtype,
    *,
    weighted: bool,
    partial_dtype: torch.dtype,
) -> None:
    """Sums, on the rank that computed them, the rows of each token of another rank, and sends the sum.

    The outputs stand in the region ROWS, `[NvS, width]` of `dtype`. A token's only row on a rank is left to
    `final_sum`, which reads it from its place.

    Args:
        weighted: multiply each row by its route weight (region WEIGHTS).
        partial_dtype: of the region PARTIALS.
    """
    from kernels.exchange.combine import presum_kernel

    block, warps = _sum_launch(width, dtype.itemsize)
    presum_kernel[(shards.shard_rows, shards.played)](
        shards.addresses,
        offsets,
        shards.num_ranks,
        shards.first_rank,
        offsets.shape[1],
        K=shards.top_k,
        H=width,
        BLOCK=block,
        UNROLL=min(4, power_of_two(shards.top_k)),
        WEIGHTED=weighted,
        ROW=triton_dtype(dtype),
        SUM=sum_dtype(dtype),
        PARTIAL=triton_dtype(partial_dtype),
        CONTROLLED=shards.controlled,
        num_warps=warps,
    )


@dataclass(frozen=True)
class Sources:
    """What the final sum of each token reads: addresses `[n, s, K]` int64, entries `[n, s, K]` int32 (k of
    a row,
    -1 of a partial sum), counts `[n, s]` int32.
    """

    addresses: torch.Tensor
    entries: torch.Tensor
    counts: torch.Tensor


def find_sources(
    shards: Shards, targets: torch.Tensor, width: int, dtype: torch.dtype, partial_dtype: torch.dtype
) -> Sources:
    """The sources of each token for one plan and one set of regions; may be kept and used again."""
    from kernels.exchange.combine import sources_kernel

    n, s, K = targets.shape
    found = Sources(
        torch.empty(n, s, K, dtype=torch.int64, device=targets.device),
        torch.empty(n, s, K, dtype=torch.int32, device=targets.device),
        torch.empty(n, s, dtype=torch.int32, device=targets.device),
    )
    if s:
        sources_kernel[(s, n)](
            shards.addresses,
            targets,
            found.addresses,
            found.entries,
            found.counts,
            s,
            shards.shard_rows,
            shards.num_ranks,
            shards.first_rank,
            shards.partials_of_token,
            K=K,
            K_PAD=power_of_two(K),
            ROW_BYTES=width * dtype.itemsize,
            PARTIAL_BYTES=width * partial_dtype.itemsize,
            WIDE=shards.wide,
            CONTROLLED=shards.controlled,
            num_warps=1,
        )
    return found


def final_sum(
    shards: Shards,
    sources: Sources,
    weights: torch.Tensor | None,
    width: int,
    dtype: torch.dtype,
    *,
    partial_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[n, s, H]`: each token's rows on its own rank, its only rows on others, and the partial sums of the
    rest, in the order of k.

    Args:
        weights: route weights `[n, s, K]` of the rows read in place; None if `presum` ran unweighted.
    """
    from kernels.exchange.combine import final_sum_kernel

    n, s, K = sources.addresses.shape
    if out is None:
        out = torch.empty(n, s, width, dtype=dtype, device=sources.addresses.device)
    if s == 0:
        return out
    block, warps = _sum_launch(width, dtype.itemsize)
    final_sum_kernel[(s, n)](
        shards.addresses,
        sources.addresses,
        sources.entries,
        sources.counts,
        weights,
        out,
        s,
        shards.num_ranks,
        shards.first_rank,
        K=K,
        H=width,
        BLOCK=block,
        UNROLL=min(8, power_of_two(K)),
        WEIGHTED=weights is not None,
        ROW=triton_dtype(dtype),
        SUM=sum_dtype(dtype),
        PARTIAL=triton_dtype(partial_dtype),
        CONTROLLED=shards.controlled,
        num_warps=warps,
    )
    return out


def scatter_weights(
    shards: Shards,
    weights: torch.Tensor,
    targets: torch.Tensor,
    offsets: torch.Tensor,
    group_rows: torch.Tensor,
    *,
    token_padding: int,
) -> None:
    """`weights [n, s, K]` to the places of the entries (region WEIGHTS, of their dtype), 0 to padding; what
    `push` does with fp32 ones, alone.
    """
    from kernels.exchange.dispatch import scatter_weights_kernel

    n, s, K = targets.shape
    groups = offsets.shape[1]
    blocks, pads = -(-s * K // 256), -(-groups * token_padding // 256)
    scatter_weights_kernel[(blocks + pads, n)](
        shards.addresses,
        weights,
        targets,
        offsets,
        group_rows,
        s * K,
        shards.shard_rows,
        shards.num_ranks,
        shards.first_rank,
        groups,
        blocks,
        PADDING=token_padding,
        BLOCK=256,
        SCALAR=triton_dtype(weights.dtype),
        WIDE=shards.wide,
        CONTROLLED=shards.controlled,
    )


def gather_weights(shards: Shards, targets: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[n, s, K]`: the weights (region WEIGHTS, of `dtype`) at the places of the entries; 0 for absent
    ones.
    """
    from kernels.exchange.combine import gather_weights_kernel

    n, s, K = targets.shape
    out = torch.empty(n, s, K, dtype=dtype, device=targets.device)
    if s:
        gather_weights_kernel[(-(-s * K // 256), n)](
            shards.addresses,
            targets,
            out,
            s * K,
            shards.shard_rows,
            shards.num_ranks,
            shards.first_rank,
            BLOCK=256,
            SCALAR=triton_dtype(dtype),
            WIDE=shards.wide,
            CONTROLLED=shards.controlled,
        )
    return out
