"""The exchange between real processes: the same bits as loopback, over shared memory and over all-to-all."""

from __future__ import annotations

import os
import time

import pytest
import torch
from harness import run_ranks
from moe_cases import Case, dense_results, draw, run_layer

from moonep import LoopbackGroup, MoonEPError, MoonEPExperts, PeerFailure, PeerTimeout, RankDisagreement

pytestmark = pytest.mark.distributed


def build(case: Case, dtype, group=None, **options) -> MoonEPExperts:
    torch.manual_seed(5)
    sizes = (case.num_experts, case.hidden, case.ffn_hidden, case.top_k, case.capacity)
    return MoonEPExperts(*sizes, group=group, dtype=dtype, **options)


def layer_results(rank: int, cases: list, memories: list) -> list:
    """For every (case, dtype, policy) and memory: what this rank computed."""
    found = []
    for case, dtype, policy in cases:
        for memory in memories:
            layer = build(case, dtype, policy=policy, memory=memory)
            assert layer.workspace().memory.name == memory
            for _ in range(2):
                own = run_layer(layer, [draw(case, dtype)[rank]])
            found.append(own)
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_compute_what_loopback_computes(num_ranks):
    cases = [
        (Case(num_ranks), torch.float64, "bounded"),
        (Case(num_ranks, pattern="one_hot"), torch.float64, "moonep"),
        (Case(num_ranks, pattern="one_rank_hot"), torch.float64, "static"),
        (Case(num_ranks, hidden=16, ffn_hidden=16, top_k=4), torch.float32, "bounded"),
        (Case(num_ranks, hidden=16, ffn_hidden=16, pattern="duplicates"), torch.bfloat16, "bounded"),
    ]
    memories = ["shm", "collective"]
    everyone = run_ranks(layer_results, num_ranks, cases, memories)
    for number, (case, dtype, policy) in enumerate(cases):
        layer = build(case, dtype, LoopbackGroup(num_ranks), policy=policy)
        ranks = draw(case, dtype)
        want = run_layer(layer, ranks)
        truth = dense_results(ranks, layer.parameters())
        for place, memory in enumerate(memories):
            own = [results[number * len(memories) + place] for results in everyone]
            for name in ("y", "d_x", "d_w"):
                for rank in range(num_ranks):
                    assert torch.equal(own[rank][name][0], want[name][rank]), (memory, policy, name)
            for parts, whole, exact in zip(
                zip(*(results["d_parameters"] for results in own), strict=True),
                want["d_parameters"],
                truth["d_parameters"],
                strict=True,
            ):
                assert torch.equal(torch.cat(parts), whole), (memory, policy)
                if dtype == torch.float64:
                    torch.testing.assert_close(whole, exact, rtol=1e-12, atol=1e-12)


TWO = Case(2, tokens=(20, 20), pattern="uniform")
FAULTS = {
    "ids": ("ContractError", "PeerFailure", "outside 0 to 7"),
    "tokens": ("ContractError", "PeerFailure", "40 tokens exceed capacity=20"),
    "geometry": ("RankDisagreement", "RankDisagreement", "rank 0: 3, rank 1: 4"),
    "policy": ("RankDisagreement", "RankDisagreement", "policy (rank 0: bounded, rank 1: moonep)"),
    "mode": ("RankDisagreement", "RankDisagreement", "gradient mode (rank 0: on, rank 1: off)"),
}


def attempt(call) -> tuple[str, str, float]:
    """(class, message, seconds) of what a call raised."""
    start = time.monotonic()
    try:
        call()
    except MoonEPError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", time.monotonic() - start


def faulty_call(rank: int, memory: str, fault: str) -> None:
    """One call of a layer, in which rank 1 makes a mistake."""
    wrong = rank == 1
    case = Case(2, tokens=(20, 20), pattern="uniform", top_k=4 if wrong and fault == "geometry" else 3)
    policy = "moonep" if wrong and fault == "policy" else "bounded"
    layer = build(case, torch.float64, memory=memory, policy=policy, timeout_s=5.0)
    x, ids, weights, _ = draw(case, torch.float64)[rank]
    if wrong and fault == "ids":
        ids = ids + 100
    if wrong and fault == "tokens":
        x, ids, weights = x.repeat(2, 1), ids.repeat(2, 1), weights.repeat(2, 1)
    with torch.set_grad_enabled(not (wrong and fault == "mode")):
        layer(x, ids, weights)


def all_faults(rank: int, memory: str) -> list[tuple[str, str, float]]:
    found = []
    for fault in FAULTS:
        found.append(attempt(lambda f=fault: faulty_call(rank, memory, f)))
        faulty_call(rank, memory, "none")  # the memory has survived
    return found


@pytest.mark.parametrize("memory", ["shm", "collective"])
def test_every_rank_names_the_fault_and_the_next_call_works(memory):
    everyone = run_ranks(all_faults, 2, memory)
    for number, (fault, (culprit, other, words)) in enumerate(FAULTS.items()):
        results = [results[number] for results in everyone]
        assert [kind for kind, _, _ in results] == [other, culprit], fault
        assert all(words in text for _, text, _ in results), fault


def late_or_failing(rank: int, memory: str, fault: str) -> list[tuple[str, str, float]]:
    """What two calls raised. Before the first, rank 1 is late or fails; it never makes the second."""
    x, ids, weights, _ = draw(TWO, torch.float64)[rank]
    layer = build(TWO, torch.float64, memory=memory, timeout_s=2.0)
    layer(x, ids, weights)
    if rank == 1 and fault == "late":
        time.sleep(4)
    if rank == 1 and fault == "fails":
        layer.workspace().memory.abort("OutOfMemoryError: too much")
    first = attempt(lambda: layer(x, ids, weights))
    return [first, attempt(lambda: layer(x, ids, weights))] if rank == 0 else [first]


@pytest.mark.parametrize("memory", ["shm", "collective"])
def test_a_late_rank_is_named_in_time_on_every_rank(memory):
    zero, one = run_ranks(late_or_failing, 2, memory, "late")
    kind, text, seconds = zero[0]
    assert kind == "PeerTimeout" and "rank 1 in" in text and "waited in plan" in text and 1 < seconds < 12
    assert one[0][0] == zero[1][0] == "PeerTimeout"


def test_a_rank_that_fails_stops_the_others_at_once():
    zero, one = run_ranks(late_or_failing, 2, "shm", "fails")
    assert zero[0][:2] == ("PeerFailure", "stopped because rank 1 failed: OutOfMemoryError: too much")
    assert zero[0][2] < 1.5
    # The next call opens the memory anew, together with rank 1's first.
    assert zero[1][0] == one[0][0] == "none"


def killed_between(rank: int, memory: str) -> tuple[str, float]:
    """Rank 2 dies after a forward pass; the others are in backward."""
    case = Case(3, num_experts=9, tokens=(5, 6, 7))
    layer = build(case, torch.float64, memory=memory, timeout_s=2.0)
    x, ids, weights, d_y = draw(case, torch.float64)[rank]
    y = layer(x, ids, weights)
    if rank == 2:
        os._exit(9)
    start = time.monotonic()
    try:
        y.backward(d_y)
    except (PeerTimeout, PeerFailure, RankDisagreement) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "nothing", 0.0


@pytest.mark.parametrize("memory", ["shm", "collective"])
def test_a_killed_rank_is_named_by_the_others(memory):
    results = run_ranks(killed_between, 3, memory, may_die={2})
    assert results[2] is None
    for text, seconds in results[:2]:
        assert text.startswith("PeerTimeout") and "rank 2" in text and "rank 1 in" not in text
        assert seconds < 10
