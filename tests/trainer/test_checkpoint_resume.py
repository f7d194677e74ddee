"""Checkpoints of the real engine and real processes: bitwise at the same size, to rounding at any other."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_engine import STEPS, _engine, _run, _train

HALF = 2
MODEL = {"width": 16, "experts": 8}


def _states(engine):
    return {name: {k: v.clone() for k, v in state.items()} for name, state, _ in engine.parameter_states()}


def _write_and_continue(folder: str):
    """Two ranks, experts over both, ZeRO-1: train, save, go on; load into a fresh engine and go on again."""
    from moonep.trainer.checkpoint import TrainingState, load_checkpoint, save_checkpoint

    whole = _engine(2, 1, 1)
    _train(whole, 0, HALF)
    bias = torch.linspace(-1, 1, 8)
    path = save_checkpoint(whole, Path(folder), TrainingState(HALF, model=MODEL, balancer={0: bias}))
    torch.manual_seed(100 + whole.rank)
    path_again = save_checkpoint(whole, Path(folder), TrainingState(HALF, model=MODEL, balancer={0: bias}))
    drawn = torch.rand(4)
    losses, norms = _train(whole, HALF, STEPS)
    fresh = _engine(2, 1, 1)
    _train(fresh, 3, 4)
    state = load_checkpoint(fresh, path, model=MODEL)
    same_random = torch.equal(torch.rand(4), drawn)
    resumed = _train(fresh, HALF, STEPS)
    ours, theirs = _states(whole), _states(fresh)
    same = all(torch.equal(ours[n][k], theirs[n][k]) for n in ours for k in ours[n])
    checks = [same_random, resumed == (losses, norms), same, torch.equal(state.balancer[0], bias)]
    return {
        "losses": losses,
        "checks": checks,
        "steps": fresh.optimizer_steps,
        "one": path == path_again,
        "refusal": _load_damaged(fresh, path),
    }


def _load_damaged(engine, path: Path):
    """What both ranks say of a file that one of them finds altered, and whether the engine is as before."""
    import shutil

    import torch.distributed as dist

    from moonep.errors import CheckpointError
    from moonep.trainer.checkpoint import load_checkpoint

    damaged = path.parent / "damaged"
    if engine.rank == 0:
        shutil.copytree(path, damaged)
        file = next(damaged.glob("optimizer_0001_*"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    dist.barrier()
    before, message = _states(engine), ""
    try:
        load_checkpoint(engine, damaged, model=MODEL)
    except CheckpointError as error:
        message = str(error)
    after, messages = _states(engine), ["", ""]
    dist.all_gather_object(messages, message)
    same = all(torch.equal(before[n][k], after[n][k]) for n in before for k in before[n])
    return {"messages": messages, "unchanged": same}


def _load_elsewhere(folder: str, cases: list[tuple[int, int, int]]):
    from moonep.trainer.checkpoint import load_checkpoint

    losses = {}
    for case in cases:
        engine = _engine(*case)
        load_checkpoint(engine, Path(folder) / f"step_{HALF}", model=MODEL)
        losses[repr(case)] = _train(engine, HALF, STEPS)[0]
    return losses


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, _run(functools.partial(_write_and_continue, str(folder)), 2, folder)


@pytest.mark.distributed
def test_resume_is_bitwise_on_the_same_ranks(written):
    _, outcome = written
    assert outcome["checks"] == [True, True, True, True]
    assert outcome["steps"] == STEPS and outcome["one"]


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "cases"), [(1, [(1, 0, 1)]), (4, [(4, 2, 1), (2, 0, 1), (1, 1, 1)])])
def test_loads_at_another_world_size_ep_size_and_zero_stage(written, tmp_path, world, cases):
    """fp32 sums in another order: 2e-6 over three steps, as in test_engine; a lost moment is off by 1e-2."""
    folder, outcome = written
    for case, losses in _run(functools.partial(_load_elsewhere, str(folder), cases), world, tmp_path).items():
        expected = torch.tensor(outcome["losses"])
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=2e-6, atol=0, msg=case)


@pytest.mark.distributed
def test_damage_stops_every_rank_and_changes_nothing(written):
    refusal = written[1]["refusal"]
    assert refusal["unchanged"] and refusal["messages"][0] == refusal["messages"][1]
    assert "optimizer_0001_00000.safetensors was altered" in refusal["messages"][0]
