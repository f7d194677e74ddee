"""The engine against a plain single-process loop: losses, norms, clipping, accumulation, states."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))

STEPS, SEQUENCES, LENGTH, VOCAB = 5, 8, 5, 24
CASES = [(ep, zero, 1) for ep in (1, 2, 4) for zero in (0, 1, 2)] + [(2, 0, 2), (4, 1, 2), (1, 2, 2)]


def _batches():
    generator = torch.Generator().manual_seed(7)
    draw = torch.randint(0, VOCAB, (STEPS, SEQUENCES, LENGTH + 1), generator=generator)
    return draw[..., :-1], draw[..., 1:]


def _plain_run(clip):
    """The reference: torch alone, one process, whole batch at once."""
    from standin import StandIn

    from moonep.trainer.optimizer import parameter_groups

    torch.manual_seed(0)
    model = StandIn()
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), 0.1), lr=1e-2, betas=(0.9, 0.95))
    losses, norms = [], []
    for tokens, targets in zip(*_batches(), strict=True):
        loss, count = model(tokens, targets=targets)
        (loss / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach() / count))
    return losses, norms


def _engine(ep, zero, accumulation, *, bf16=False, clip=0.3):
    import torch.distributed as dist
    from standin import StandIn

    from moonep.trainer.engine import Engine, EngineSettings, create_expert_groups

    groups = create_expert_groups(ep)
    torch.manual_seed(0)
    model = StandIn(group=groups.ep if ep > 1 else None)
    micro_batch = SEQUENCES // (dist.get_world_size() * accumulation)
    settings = EngineSettings(micro_batch, accumulation, ep, zero, bf16, lr=1e-2, clip=clip)
    return Engine(model, settings, groups, expert_modules=[model.experts], num_experts=8)


def _train(engine, first, last):
    import torch.distributed as dist

    losses, norms = [], []
    all_tokens, all_targets = _batches()
    for tokens, targets in zip(all_tokens[first:last], all_targets[first:last], strict=True):
        total = torch.zeros(())
        parts = engine.settings.accumulation * engine.world_size
        for i in range(engine.settings.accumulation):
            piece = i * engine.world_size + engine.rank
            loss, _ = engine.loss(tokens.chunk(parts)[piece], targets.chunk(parts)[piece], None)
            engine.backward(loss, targets.numel())
            total += loss.detach()
            if i + 1 < engine.settings.accumulation:
                engine.end_micro_batch()
        engine.step(1e-2)
        dist.all_reduce(total)
        losses.append(float(total) / targets.numel())
        norms.append(engine.grad_norm)
    return losses, norms


def _rank_main(rank, world, port, out, job):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    from moonep.trainer.engine import init_distributed

    init_distributed()
    result = job()
    if rank == 0:
        torch.save(result, out)
    torch.distributed.destroy_process_group()


def _run(job, world, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank_main, (world, port, tmp_path / "result.pt", job), nprocs=world)
    return torch.load(tmp_path / "result.pt", weights_only=True)


def _all_cases():
    return {repr(case): _train(_engine(*case), 0, STEPS) for case in CASES}


@pytest.mark.distributed
def test_every_ep_zero_and_accumulation_equals_a_plain_loop(tmp_path):
    """fp32 sums in another order: 2e-6 over five steps; a wrong scale, norm or clip is off by 1e-2."""
    losses, norms = _plain_run(clip=0.3)
    assert min(norms) > 0.3, "clipping must act in this test"
    for case, (got_losses, got_norms) in _run(_all_cases, 4, tmp_path).items():
        torch.testing.assert_close(
            torch.tensor(got_losses), torch.tensor(losses), rtol=2e-6, atol=0, msg=case
        )
        torch.testing.assert_close(torch.tensor(got_norms), torch.tensor(norms), rtol=1e-5, atol=0, msg=case)


def _resume_cases():
    """Continuing after a round trip of states must equal going on without it, bitwise."""
    outcome = {}
    for ep, zero, bf16 in [
        (2, 0, False),
        (2, 1, False),
        (2, 2, False),
        (1, 1, False),
        (2, 1, True),
        (2, 2, True),
    ]:
        whole = _engine(ep, zero, 1, bf16=bf16)
        _train(whole, 0, 2)
        saved = {n: {k: v.clone() for k, v in s.items()} for n, s, _ in whole.parameter_states()}
        expected = _train(whole, 2, STEPS)
        other = _engine(ep, zero, 1, bf16=bf16)
        _train(other, 3, 4)
        other.optimizer_steps = 2
        other.load_parameter_states(lambda name, saved=saved: saved[name])
        resumed = _train(other, 2, STEPS)
        bias = other.model.routing_bias
        ends = zip(whole.parameter_states(), other.parameter_states(), strict=True)
        same = all(torch.equal(a[k], b[k]) for (_, a, _), (_, b, _) in ends for k in a)
        outcome[repr((ep, zero, bf16))] = (expected == resumed, same, bool((bias == 1.0 + 2.0**-20).all()))
    return outcome


@pytest.mark.distributed
def test_states_round_trip_bitwise_and_buffers_keep_fp32(tmp_path):
    outcome = _run(_resume_cases, 2, tmp_path)
    assert all(checks == (True, True, True) for checks in outcome.values()), outcome
    assert len(outcome) == 6


def test_bf16_without_partitioning_is_refused():
    from moonep.errors import ContractError
    from moonep.trainer.engine import Engine, EngineSettings

    with pytest.raises(ContractError, match=r"zero=0.*bf16.*use parallel.zero=1"):
        Engine(
            torch.nn.Linear(2, 2),
            EngineSettings(1, 1, zero=0, bf16=True),
            None,
            expert_modules=[],
            num_experts=0,
        )
