"""Buffer and ExpertPools between real processes: the bits of loopback; faults are named on every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
from buffer_cases import PROJECTIONS, draw_experts, make_buffer, make_pools, walkthrough
from harness import run_ranks
from moe_cases import Case, draw

from moonep import LoopbackGroup, MoonEPError

pytestmark = pytest.mark.distributed

TWO = Case(2, tokens=(20, 20), pattern="uniform")
MEMORIES = ("shm", "collective")


def walk_alone(rank: int, cases: list, memory: str) -> list[dict]:
    found = []
    for case, dtype, policy in cases:
        buffer = make_buffer(case, dtype, memory=memory, policy=policy)
        assert buffer.memory.name == memory
        pools, ranks = make_pools(buffer, case), draw(case, dtype)
        total = sum(len(r[0]) for r in ranks)
        for zero_copy in (False, True):
            result = walkthrough(buffer, pools, [ranks[rank]], draw_experts(case, dtype), zero_copy, total)
            found.append({name: result[name] for name in ("y", "d_x", "d_w", "d_parameters", "views")})
        pools.destroy()
        buffer.destroy()
    return found


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_compute_what_loopback_computes(num_ranks, memory):
    cases = [
        (Case(num_ranks), torch.float64, "bounded"),
        (Case(num_ranks, pattern="one_hot"), torch.float32, "moonep"),
        (Case(num_ranks, pattern="one_rank_hot"), torch.float64, "static"),
    ]
    everyone = run_ranks(walk_alone, num_ranks, cases, memory)
    for number, (case, dtype, policy) in enumerate(cases):
        buffer = make_buffer(case, dtype, LoopbackGroup(num_ranks), policy=policy)
        pools = make_pools(buffer, case)
        want = walkthrough(buffer, pools, draw(case, dtype), draw_experts(case, dtype), False)
        for repetition in (0, 1):
            own = [results[2 * number + repetition] for results in everyone]
            for name in ("y", "d_x", "d_w"):
                for rank in range(num_ranks):
                    assert torch.equal(own[rank][name][0], want[name][rank]), (policy, name)
            assert [o["views"][0] for o in own] == want["views"]
            for parts, whole in zip(
                zip(*(o["d_parameters"] for o in own), strict=True), want["d_parameters"], strict=True
            ):
                assert torch.equal(torch.cat(parts), whole), policy


def outcome(call) -> tuple[str, str, float]:
    """(class, message, seconds) of what a call raised."""
    start = time.monotonic()
    try:
        call()
    except MoonEPError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", time.monotonic() - start


def misuse(rank: int, buffer, pools, x, ids, w) -> dict:
    """name -> a call in which rank 1 does something else than rank 0."""
    wrong = rank == 1
    rows, _, _, plan = buffer.dispatch(x, w, ids)
    newer = buffer.dispatch(x, w, ids)[3]
    private = {n: torch.zeros(2, *pools.staging(n).shape) for n in PROJECTIONS}
    return {
        "ids": lambda: buffer.dispatch(x, w, ids + 100 if wrong else ids),
        "dtype": lambda: buffer.dispatch(x.double() if wrong else x, w, ids),
        "capacity": lambda: buffer.dispatch(*((t.repeat(2, 1) if wrong else t) for t in (x, w, ids))),
        "s": lambda: buffer.dispatch(*((t[:7] if wrong else t) for t in (x, w, ids))),
        "total differs": lambda: buffer.dispatch(x, w, ids, total_num_tokens=41 if wrong else 40),
        "total wrong": lambda: buffer.dispatch(x, w, ids, total_num_tokens=39),
        "old plan": lambda: buffer.dispatch(x[:5] if wrong else x, plan=plan),
        "plans": lambda: buffer.combine(newer if wrong else plan, rows),
        "operation": lambda: buffer.combine(plan, rows) if wrong else buffer.dispatch(x, w, ids),
        "weights": lambda: buffer.dispatch(x, None if wrong else w, ids),
        "private": lambda: buffer.copy_experts(plan, {n: (pools.staging(n), private[n]) for n in private}),
    }


def all_misuse(rank: int, memory: str) -> dict:
    buffer = make_buffer(TWO, torch.float32, memory=memory, timeout_s=5.0)
    pools = make_pools(buffer, TWO)
    x, ids, w, _ = (t.detach() for t in draw(TWO, torch.float32)[rank])
    found = {}
    for name, call in misuse(rank, buffer, pools, x, ids, w).items():
        found[name] = outcome(call)
        rows, _, _, plan = buffer.dispatch(x, w, ids)
        torch.testing.assert_close(buffer.combine(plan, rows)[0], TWO.top_k * x)
    return found


# name -> (class on rank 0, class on rank 1, words both say)
MISUSE = {
    "ids": ("PeerFailure", "ContractError", "outside 0 to 7"),
    "dtype": ("PeerFailure", "ContractError", "hidden_sh is torch.float64"),
    "capacity": ("PeerFailure", "ContractError", "40 tokens exceed S=20"),
    "s": ("RankDisagreement", "RankDisagreement", "num_tokens (rank 0: 20, rank 1: 7)"),
    "total differs": ("RankDisagreement", "RankDisagreement", "(rank 0: 40, rank 1: 41)"),
    "total wrong": ("ContractError", "ContractError", "total_num_tokens=39, but the ranks hold 40"),
    "old plan": ("PeerFailure", "ContractError", "hidden_sh has 5 tokens, the plan was made for 20"),
    "plans": ("RankDisagreement", "RankDisagreement", "disagree on plan (rank 0: "),
    "operation": ("RankDisagreement", "RankDisagreement", "rank 0: dispatch, rank 1: combine"),
    "weights": ("RankDisagreement", "RankDisagreement", "number of tensors (rank 0: 1, rank 1: 0)"),
    "private": ("ContractError", "ContractError", "the view that ExpertPools gives"),
}


@pytest.mark.parametrize("memory", MEMORIES)
def test_misuse_is_named_on_every_rank_and_the_buffer_goes_on(memory):
    everyone = run_ranks(all_misuse, 2, memory)
    for name, (zero, one, words) in MISUSE.items():
        found = [results[name] for results in everyone]
        assert [kind for kind, _, _ in found] == [zero, one], (name, found)
        assert all(words in text for _, text, _ in found), (name, found)
        assert all(seconds < 4 for _, _, seconds in found), (name, found)


def different_constructions(rank: int, memory: str) -> dict:
    wrong = rank == 1
    options = {"memory": memory, "timeout_s": 5.0}
    found = {
        "dtype": outcome(lambda: make_buffer(TWO, torch.float64 if wrong else torch.float32, **options)),
        "policy": outcome(
            lambda: make_buffer(TWO, torch.float32, policy="moonep" if wrong else "bounded", **options)
        ),
        "capacity": outcome(
            lambda: make_buffer(Case(2, capacity=30 if wrong else 20), torch.float32, **options)
        ),
    }
    buffer = make_buffer(TWO, torch.float32, **options)
    found["ffn"] = outcome(lambda: make_pools(buffer, Case(2, ffn_hidden=13 if wrong else 12)))
    return found


@pytest.mark.parametrize("memory", MEMORIES)
def test_ranks_that_construct_different_things_are_told(memory):
    words = {
        "dtype": "dtype (rank 0: torch.float32, rank 1: torch.float64)",
        "policy": "policy (rank 0: bounded, rank 1: moonep)",
        "capacity": "capacity (rank 0: 20, rank 1: 30)",
        "ffn": "(rank 0: 12, rank 1: 13)",
    }
    for found in run_ranks(different_constructions, 2, memory):
        for name, (kind, text, _) in found.items():
            assert kind == "RankDisagreement" and words[name] in text, (name, kind, text)


def killed_in_the_middle(rank: int, memory: str) -> tuple[str, str, float] | None:
    """Rank 1 dies between dispatch and combine."""
    buffer = make_buffer(TWO, torch.float32, memory=memory, timeout_s=2.0)
    x, ids, w, _ = (t.detach() for t in draw(TWO, torch.float32)[rank])
    rows, _, _, plan = buffer.dispatch(x, w, ids)
    if rank == 1:
        os._exit(9)
    return outcome(lambda: buffer.combine(plan, rows))


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_killed_rank_is_named_in_time(memory):
    (kind, text, seconds), dead = run_ranks(killed_in_the_middle, 2, memory, may_die={1})
    assert dead is None and kind in ("PeerTimeout", "PeerFailure") and "rank 1" in text
    # timeout_s of waiting, and as long again to ask who left a note.
    assert seconds < 8
