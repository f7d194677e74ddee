"""Symmetric memory: regions, the choice of a memory and its reasons, and what a full /dev/shm says."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
from harness import run_ranks

from moonep import CapabilityError, ContractError, LoopbackGroup, PeerFailure
from moonep.symmetric import LoopbackMemory, SharedMemory, choose, group_size, open_memory
from moonep.symmetric.shm import _create


def test_loopback_regions_are_one_zeroed_tensor():
    memory = LoopbackMemory(3)
    region = memory.allocate((2, 5), torch.float32)
    assert region.stacked.shape == (3, 2, 5) and not region.stacked.any()
    region.view(1).fill_(7)
    assert torch.equal(region.stacked.sum((1, 2)), torch.tensor([0.0, 70.0, 0.0]))
    assert region.pointers().tolist() == [region.stacked[r].data_ptr() for r in range(3)]
    rows = [torch.tensor([r, r * r]) for r in range(3)]
    assert memory.gather(rows, "x").tolist() == [[0, 0], [1, 1], [2, 4]]
    memory.abort("because")
    with pytest.raises(PeerFailure, match="because"):
        memory.barrier("x")


def test_choice_in_one_process():
    assert choose("auto", LoopbackGroup(4))[0] == "loopback"
    assert choose("shm", None)[0] == "loopback"
    assert group_size(LoopbackGroup(4)) == 4 and group_size(None) == 1
    with pytest.raises(ContractError, match="memory='disk'"):
        choose("disk", None)
    with pytest.raises(ContractError, match="num_ranks=0"):
        LoopbackGroup(0)


def test_memory_that_does_not_fit_says_how_to_make_room(tmp_path):
    path, descriptor, refused = _create("/dev/shm", 1 << 50)
    assert (path, descriptor) == ("", -1)
    assert "shared memory is too small" in refused and "--shm-size" in refused
    assert "memory=collective" in refused
    before = set(os.listdir("/dev/shm"))
    _create("/dev/shm", 1 << 50)
    assert set(os.listdir("/dev/shm")) <= before, "nothing is left behind"
    assert "cannot be used" in _create(str(tmp_path / "absent"), 8)[2]
    with pytest.raises(CapabilityError, match="no room for"):
        LoopbackMemory(2).allocate((1 << 50,), torch.float64)


def shared_memory_of(rank: int, directory: str) -> dict:
    """What one of two ranks saw; in the end they pretend to be on two hosts."""
    found = {"auto": choose("auto", None)}
    assert open_memory("auto", None) is open_memory("auto", None)
    memory = SharedMemory(directory=directory)
    region = memory.allocate((4,), torch.bfloat16)
    region.view(1 - rank).fill_(rank + 1)
    memory.barrier("filled")
    found["mine"] = region.view(rank).tolist()
    found["sums"] = []
    for step in range(300):  # two alternating gathers never show a later step's row
        table = memory.gather([torch.tensor([step, rank])], "step")
        found["sums"].append(table.tolist() == [[step, 0], [step, 1]])
    found["left"] = os.listdir(directory)
    memory.barrier("listed")
    try:
        memory.allocate((1 << 48,), torch.float64)
    except CapabilityError as error:
        found["error"] = str(error)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found["hosts"] = choose("auto", None)
    try:
        choose("shm", None)
    except CapabilityError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.distributed
def test_two_processes_share_regions():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        results = run_ranks(shared_memory_of, 2, directory)
    for rank, found in enumerate(results):
        assert found["auto"] == ("shm", "all ranks are on one host")
        assert found["mine"] == [2 - rank] * 4
        assert found["left"] == [] and all(found["sums"])
        assert "too small" in found["error"]
        assert found["hosts"] == ("collective", "the group's ranks are on several hosts")
        assert "several hosts" in found["refused"] and "memory='collective'" in found["refused"]
