"""The barrier: epochs grow on the device, a rank that never comes ends every wait, and nothing waits after
that.

Programs of a grid run one after another in the interpreter, so all ranks arrive in one launch and wait in
the next.
"""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("triton")

from kernels.exchange import transfer
from tests.kernels.exchange.loopback import DEVICE, addresses_of

PHASE = 7


class Ranks:
    """Control words, epochs and status of R ranks."""

    def __init__(self, num_ranks: int):
        self.control = torch.zeros(num_ranks, num_ranks + 1, dtype=torch.int64, device=DEVICE)
        self.epochs = torch.zeros(num_ranks, dtype=torch.int64, device=DEVICE)
        self.status = torch.zeros(num_ranks, 4, dtype=torch.int64, device=DEVICE)
        regions = [None] * 5 + [addresses_of(self.control)]
        self.addresses = transfer.region_addresses(regions)

    def run(self, ranks: range, *, arrive: bool, wait: bool, polls: int = 5) -> None:
        shards = transfer.Shards(self.addresses, 8, 1, first_rank=ranks.start, played=len(ranks))
        part = slice(ranks.start, ranks.stop)
        transfer.barrier(shards, self.epochs[part], self.status[part], PHASE, polls, arrive=arrive, wait=wait)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_all_pass_when_all_have_arrived(num_ranks):
    ranks = Ranks(num_ranks)
    for epoch in (1, 2, 3):
        ranks.run(range(num_ranks), arrive=True, wait=False)
        ranks.run(range(num_ranks), arrive=False, wait=True)
        assert ranks.epochs.tolist() == [epoch] * num_ranks
    assert not ranks.status.any() and not ranks.control[:, num_ranks].any()
    assert (ranks.control[:, :num_ranks] == 3).all()


def test_a_missing_rank_ends_every_wait():
    ranks = Ranks(4)
    present = (0, 1, 3)
    for rank in present:
        ranks.run(range(rank, rank + 1), arrive=True, wait=False)
    for rank in present:
        ranks.run(range(rank, rank + 1), arrive=False, wait=True)
    # The first to give up says how, the others were told; all name phase, missing rank or -1, and epoch.
    assert ranks.status[0].tolist() == [1, PHASE, 2, 1]
    for rank in (1, 3):
        assert ranks.status[rank].tolist() == [2, PHASE, -1, 1]
    assert (ranks.control[:, 4] == 1).all()
    before = ranks.status.clone()
    ranks.run(range(4), arrive=True, wait=True)  # returns at once
    assert torch.equal(ranks.status[:2], before[:2])
    assert ranks.status[2].tolist() == [2, PHASE, -1, 1], "the late rank is told too"


def test_a_rank_ahead_does_not_release_a_barrier_of_the_next_epoch():
    ranks = Ranks(2)
    ranks.run(range(2), arrive=True, wait=False)
    ranks.run(range(1), arrive=True, wait=False)  # rank 0 is in its second barrier
    ranks.run(range(1, 2), arrive=False, wait=True)  # rank 1 leaves its first
    assert not ranks.status.any()
    ranks.run(range(1), arrive=False, wait=True)  # rank 1 has not reached the second
    assert ranks.status[0].tolist() == [1, PHASE, 1, 2]


@pytest.mark.skipif(DEVICE == "cuda", reason="a stream runs one kernel after another")
def test_a_wait_ends_when_the_peer_arrives_later():
    ranks = Ranks(2)
    ranks.run(range(1), arrive=True, wait=False)

    def arrive_late() -> None:
        ranks.control[0, 1] = 1

    timer = threading.Timer(0.05, arrive_late)
    timer.start()
    ranks.run(range(1), arrive=False, wait=True, polls=100_000)
    timer.join()
    assert not ranks.status.any()
