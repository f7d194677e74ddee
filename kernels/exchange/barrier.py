"""A barrier between ranks in one small program, which ends even if a peer never comes.

Control words of a rank (region CONTROL of memory.py): [R] counters, where peer p writes how many barriers it
has reached, then the abort word. Counters only grow, so nothing is reset. Data must be stored by an earlier
kernel of the same stream; a later one may read what the peers stored before they arrived.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.exchange.memory import CONTROL, region


@triton.jit
def arrive(addresses, R, rank, epoch, R_PAD: tl.constexpr):
    peer = tl.arange(0, R_PAD)
    # The release is one thread's: all others' stores must come before it.
    tl.debug_barrier()
    words = tl.load(addresses + CONTROL * R + peer, peer < R, other=0).to(tl.pointer_type(tl.int64))
    epochs = tl.zeros([R_PAD], tl.int64) + epoch
    tl.atomic_xchg(words + rank, epochs, peer < R, sem="release", scope="sys")


@triton.jit
def abort_all(addresses, R, R_PAD: tl.constexpr):
    peer = tl.arange(0, R_PAD)
    words = tl.load(addresses + CONTROL * R + peer, peer < R, other=0).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(words + R, tl.full([R_PAD], 1, tl.int64), peer < R, sem="release", scope="sys")


@triton.jit(do_not_specialize=["R", "first_rank", "phase", "max_polls"])
def barrier_kernel(
    addresses,
    epochs_ptr,
    status_ptr,
    R,
    first_rank,
    phase,
    max_polls,
    R_PAD: tl.constexpr,
    ARRIVE: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Program i plays rank first_rank + i: tells all ranks that it arrived, then waits for all of them.

    epochs [n] int64: barriers reached, on the device so that a graph replay counts. status [n, 4] int64,
    readable by the host: written once, when a wait ends in vain: (1 too many polls or 2 told by a peer,
    phase, first rank missing, epoch). A wait that ends in vain sets every rank's abort word; barriers then
    return at once.
    """
    played = tl.program_id(0)
    rank = first_rank + played
    own = region(addresses, CONTROL, R, rank, tl.int64)
    peer = tl.arange(0, R_PAD)
    epoch = tl.load(epochs_ptr + played)
    if ARRIVE:
        epoch += 1
        tl.store(epochs_ptr + played, epoch)
        if tl.atomic_add(own + R, 0, sem="acquire", scope="sys") == 0:
            arrive(addresses, R, rank, epoch, R_PAD)
    if WAIT:
        polls = tl.zeros([], tl.int64)
        aborted = tl.atomic_add(own + R, 0, sem="acquire", scope="sys")
        missing = R_PAD
        waiting = aborted == 0
        while waiting:
            seen = tl.atomic_add(own + peer, 0, peer < R, sem="acquire", scope="sys")
            missing = tl.min(tl.where((seen < epoch) & (peer < R), peer, R_PAD), 0)
            aborted = tl.atomic_add(own + R, 0, sem="acquire", scope="sys")
            polls += 1
            waiting = (missing < R_PAD) & (aborted == 0) & (polls < max_polls)
        if (missing < R_PAD) | (aborted != 0):
            status = status_ptr + played * 4
            if tl.load(status) == 0:
                tl.store(status + 1, phase.to(tl.int64))
                tl.store(status + 2, tl.where(missing < R_PAD, missing, -1).to(tl.int64))
                tl.store(status + 3, epoch)
                tl.debug_barrier()
                reason = tl.where(aborted == 0, 1, 2).to(tl.int64)
                tl.atomic_xchg(status, reason, sem="release", scope="sys")
            if aborted == 0:
                abort_all(addresses, R, R_PAD)
