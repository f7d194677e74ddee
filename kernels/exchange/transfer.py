"""The exchange on the device: rows, route weights, expert weights and gradients between ranks, without a
host read.

Order of a layer, each step for the ranks this process plays, `barrier` between steps where peers are other
processes (in loopback the stream's order suffices):

    push (rows, weights, records) | replicate | experts on [NvS, H] | presum | final_sum push_copies (beside
    push)     | ...                             | return_gradients (after the backward pass)

Shapes: R ranks, n ranks played (a leading axis of every per-rank tensor), s tokens of a rank, K top-k, NvS
rows of a shard, H width, E experts, epn = E/R, G groups of a rank. Triton is imported at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

REGIONS = 6  # rows, weights, origins, lists, partials, control: see kernels/exchange/memory.py
ABSENT = -(1 << 62)  # destination of an entry that does not exist (a rank with fewer tokens than the others)
MAX_BLOCK_WORDS = 4096  # a row up to 16 KB is read by one program in one go: 128 threads, 8 x 16 bytes each
TILE_WORDS = 4096
COPY_PROGRAMS = 1056  # of a rank's copies and gradients: 8 for each multiprocessor of an H200


@dataclass(frozen=True)
class Shards:
    """The regions of all ranks and the ranks played here.

    addresses: int64 `[6, R]` on the device (`region_addresses`); base addresses divisible by 16.
    controlled: whether kernels look at the abort word and do nothing once it is set.
    """

    addresses: torch.Tensor
    shard_rows: int
    top_k: int
    first_rank: int = 0
    played: int = 1
    controlled: bool = False

    @property
    def num_ranks(self) -> int:
        return self.addresses.shape[1]

    @property
    def partials_of_token(self) -> int:
        """J: places for partial sums a token has, min(R - 1, K), at least 1."""
        return max(1, min(self.num_ranks - 1, self.top_k))

    @property
    def wide(self) -> bool:
        """Whether destinations need 64 bits."""
        return self.num_ranks * self.shard_rows >= 2**31


def region_addresses(regions: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`[6, R]` from int64 `[R]` address tensors in the order of REGIONS; None for a region no kernel will
    touch.
    """
    given = [r for r in regions if r is not None]
    if len(regions) != REGIONS or not given:
        raise ValueError(f"regions: expected {REGIONS} entries, at least one a tensor, got {len(regions)}")
    return torch.stack([torch.zeros_like(given[0]) if r is None else r for r in regions])


def region_shapes(
    shard_rows: int, top_k: int, num_ranks: int, capacity: int, width: int
) -> dict[str, tuple[int, ...]]:
    """Shape of each region on a rank; dtypes: rows and partials the caller's, weights fp32, origins and
    control int64, lists int32.
    """
    partials = capacity * max(1, min(num_ranks - 1, top_k))
    return {
        "rows": (shard_rows, width),
        "weights": (shard_rows,),
        "origins": (shard_rows,),
        "lists": (shard_rows, top_k),
        "partials": (partials, width),
        "control": (num_ranks + 1,),
    }


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


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
    block = min(_power_of_two(words), MAX_BLOCK_WORDS)
    return block, max(1, min(4, block // 1024))


def _sum_launch(width: int, element_size: int) -> tuple[int, int]:
    """(elements, warps) of the summing kernels: one 16-byte load a thread for each row of a token."""
    vector = 16 // element_size
    threads = max(32, min(128, _power_of_two(-(-width // vector))))
    return threads * vector, threads // 32


def _triton_dtype(dtype: torch.dtype):
    import triton.language as tl

    return {
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.float32: tl.float32,
        torch.float64: tl.float64,
    }[dtype]


def _sum_dtype(dtype: torch.dtype):
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


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
        K_PAD=_power_of_two(shards.top_k),
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
        UNROLL=min(4, _power_of_two(shards.top_k)),
        WEIGHTED=weighted,
        ROW=_triton_dtype(dtype),
        SUM=_sum_dtype(dtype),
        PARTIAL=_triton_dtype(partial_dtype),
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
            K_PAD=_power_of_two(K),
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
        UNROLL=min(8, _power_of_two(K)),
        WEIGHTED=weights is not None,
        ROW=_triton_dtype(dtype),
        SUM=_sum_dtype(dtype),
        PARTIAL=_triton_dtype(partial_dtype),
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
        SCALAR=_triton_dtype(weights.dtype),
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
            SCALAR=_triton_dtype(dtype),
            WIDE=shards.wide,
            CONTROLLED=shards.controlled,
        )
    return out


@dataclass(frozen=True)
class Holders:
    """Which ranks hold copies of which experts, int32: holders `[E, R]` (rank * slots + slot, ranks
    ascending), counts `[E]`, copied `[R, epn]` (local numbers of the experts with copies), num_copied
    `[R]`.
    """

    holders: torch.Tensor
    counts: torch.Tensor
    copied: torch.Tensor
    num_copied: torch.Tensor
    slots: int


def find_holders(first_row: torch.Tensor, slots: int) -> Holders:
    """From `first_row [R, E]` of a plan: a rank computes an expert where it is not -1, and what is not its
    own lies in its slots in expert order.
    """
    from kernels.exchange.copies import holders_kernel

    R, E = first_row.shape

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=first_row.device)

    found = Holders(ints(E, R), ints(E), ints(R, E // R), ints(R), slots)
    holders_kernel[(R,)](
        first_row,
        found.holders,
        found.counts,
        found.copied,
        found.num_copied,
        R,
        E // R,
        slots,
        E_PAD=_power_of_two(E),
    )
    return found


def _is_table(home: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether `home` holds addresses, rather than being the one part of the one rank played."""
    table = home.dtype == torch.int64 and home.dim() == 2
    if not table and (pool.shape[1] != 1 or not home.is_contiguous() or home.data_ptr() % 16):
        raise ValueError(
            f"home {list(home.shape)} {home.dtype}: give int64 addresses [n, P], or one contiguous tensor, "
            "16-byte aligned, for one rank and one part"
        )
    return table


def push_copies(
    shards: Shards, holders: Holders, home: torch.Tensor, pool: torch.Tensor, part_bytes: int
) -> None:
    """Sends every copied expert of the played ranks to its slots, each read once for all its copies.

    Args:
        home: int64 `[n, P]` addresses of the played ranks' weights, P parts `[epn, part_bytes]`; or, for one
            rank and one part, the weights themselves.
        pool: int64 `[R, P]` addresses of all ranks' slots, `[slots, part_bytes]`.
        part_bytes: of one expert's part; a multiple of 16.
    """
    from kernels.exchange.copies import push_copies_kernel

    if part_bytes % 16:
        raise ValueError(f"an expert's part has {part_bytes} bytes; it must be a multiple of 16")
    push_copies_kernel[(COPY_PROGRAMS, shards.played)](
        shards.addresses,
        home,
        pool,
        holders.holders,
        holders.counts,
        holders.copied,
        holders.num_copied,
        shards.num_ranks,
        holders.copied.shape[1],
        holders.slots,
        shards.first_rank,
        part_bytes // 16,
        COPY_PROGRAMS,
        PARTS=pool.shape[1],
        TABLE=_is_table(home, pool),
        BLOCK=TILE_WORDS,
        CONTROLLED=shards.controlled,
    )


def return_gradients(
    shards: Shards,
    holders: Holders,
    home: torch.Tensor,
    pool: torch.Tensor,
    part_elements: int,
    *,
    home_dtype: torch.dtype = torch.float32,
    slot_dtype: torch.dtype = torch.float32,
) -> None:
    """Adds the gradients in the slots of all ranks to those of the played ranks' experts, in fp32, ranks
    ascending.

    `home [n, P]` and `pool [R, P]` as for `push_copies`; `part_elements` of one expert's part: a multiple
    of 8.
    """
    from kernels.exchange.copies import return_gradients_kernel

    if part_elements % 8:
        raise ValueError(f"an expert's part has {part_elements} elements; it must be a multiple of 8")
    return_gradients_kernel[(COPY_PROGRAMS, shards.played)](
        shards.addresses,
        home,
        pool,
        holders.holders,
        holders.counts,
        holders.copied,
        holders.num_copied,
        shards.num_ranks,
        holders.copied.shape[1],
        holders.slots,
        shards.first_rank,
        part_elements // 8,
        COPY_PROGRAMS,
        PARTS=pool.shape[1],
        TABLE=_is_table(home, pool),
        BLOCK=TILE_WORDS,
        HOME=_triton_dtype(home_dtype),
        SLOT=_triton_dtype(slot_dtype),
        SUM=_sum_dtype(home_dtype),
        CONTROLLED=shards.controlled,
    )


def barrier(
    shards: Shards,
    epochs: torch.Tensor,
    status: torch.Tensor,
    phase: int,
    max_polls: int,
    *,
    arrive: bool = True,
    wait: bool = True,
) -> None:
    """Tells all ranks that the played ones arrived and waits for all, at most `max_polls` looks.

    `epochs [n]` int64 on the device, zero at first. `status [n, 4]` int64 that the host reads (pinned),
    zero at first; written when a wait ends in vain: (1: too many looks, 2: another rank gave up; phase;
    first rank missing or -1; epoch).
    """
    from kernels.exchange.barrier import barrier_kernel

    barrier_kernel[(shards.played,)](
        shards.addresses,
        epochs,
        status,
        shards.num_ranks,
        shards.first_rank,
        phase,
        max_polls,
        R_PAD=_power_of_two(shards.num_ranks),
        ARRIVE=arrive,
        WAIT=wait,
        num_warps=1,
    )
