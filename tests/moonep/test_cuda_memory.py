"""What of the CUDA memory needs no GPU: the words that travel between ranks when one of them ends it."""

from __future__ import annotations

import pytest
import torch

from moonep.errors import PeerFailure, PeerTimeout
from moonep.symmetric.cuda import CudaMemory, CudaRegion, failure_from


def test_words_of_a_late_rank_name_it_and_the_phase():
    error = failure_from("late 3 rank 1 waited in dispatch", 60.0)
    assert isinstance(error, PeerTimeout) and error.phases == {3: "?"}
    assert "rank 1 waited in dispatch" in str(error) and "60 s" in str(error)


def test_words_of_a_failed_rank_name_it_and_its_reason():
    error = failure_from("failed 2 RuntimeError: out of memory", 60.0)
    assert (
        isinstance(error, PeerFailure) and error.rank == 2 and error.reason == "RuntimeError: out of memory"
    )


def test_pointers_are_those_of_the_parts_in_rank_order():
    parts = {1: torch.zeros(4), 0: torch.zeros(4)}
    region = CudaRegion(parts, torch.device("cpu"))
    assert region.pointers().tolist() == [parts[0].data_ptr(), parts[1].data_ptr()]


class Store(dict):
    """The calls of a key-value store that an ending makes."""

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self.setdefault(key, value.encode())

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    get = dict.__getitem__


def memory_that_waited(store: Store, rank: int, status: list[int]) -> CudaMemory:
    memory = CudaMemory.__new__(CudaMemory)
    memory.rank, memory.timeout_s, memory.failure = rank, 5.0, None
    memory._store, memory._phases = store, ["plan", "combine"]  # type: ignore[assignment]
    memory._status = torch.tensor([status])
    return memory


def test_every_rank_raises_and_names_the_missing_one():
    """Rank 0 saw that rank 2 is missing and says so; rank 1 was told by its abort word and reads it."""
    store = Store()
    for rank, status in ((0, [1, 1, 2, 9]), (1, [2, 1, -1, 9])):
        memory = memory_that_waited(store, rank, status)
        with pytest.raises(PeerTimeout, match=r"rank 2 .*rank 0 waited in combine"):
            memory.check_alive()
        with pytest.raises(PeerTimeout):
            memory.check_alive()


def test_good_times_raise_nothing():
    memory_that_waited(Store(), 0, [0, 0, 0, 0]).check_alive()
