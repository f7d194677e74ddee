"""The plain loop: no DeepSpeed, fp64, any expert-parallel size; prints the losses as JSON.

    torchrun --standalone --nproc_per_node=4 tests/distributed/equality_fp64.py STEPS EP[,ACCUMULATION] ...

Nothing here knows the trainer: gradients are summed by hand over all ranks, those of experts over the ranks
that hold the same ones, clipped by one global norm, and AdamW steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from equality import CONTEXT, MODEL, SEQUENCES

VOCAB = 16


def groups_of(ep: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """(ranks that exchange tokens, ranks that hold the same experts) of this rank."""
    world = dist.get_world_size()
    mine: list[dist.ProcessGroup] = []
    exchange = [list(range(i, i + ep)) for i in range(0, world, ep)]
    replicas = [list(range(i, world, ep)) for i in range(ep)]
    for partition in (exchange, replicas):
        for ranks in partition:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine.append(group)
    return mine[0], mine[1]


def build(group: dist.ProcessGroup, capacity: int) -> torch.nn.Module:
    """The model of equality.py in fp64, experts spread over `group`."""
    from model import K3Config, K3Model
    from moonep import MoonEPExperts, QuantileBalancer

    def experts(c, layer):
        sizes = (c.num_experts, c.latent_size, c.expert_ffn_size, c.top_k, capacity)
        return MoonEPExperts(*sizes, group=group, dtype=torch.float64)

    torch.manual_seed(3)
    config = K3Config.preset("tiny", vocab_size=VOCAB, **MODEL)
    model = K3Model(config, experts, lambda c, layer: QuantileBalancer(c.num_experts, c.top_k))
    return model.double()


def step_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch of a step: a noisy counting task, so that there is something to learn."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(0, VOCAB, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    tokens = (start + stride * torch.arange(CONTEXT + 1)) % VOCAB
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(noise, torch.randint(0, VOCAB, tokens.shape, generator=generator), tokens)
    return tokens[:, :-1], tokens[:, 1:]


def reduce_and_clip(model, replicas, exchange, limit: float) -> None:
    """Sums gradients over the ranks that hold a copy, then scales all of them to a global norm of `limit`."""
    home = {id(p) for layer in model.moe_layers() for p in layer.experts.parameters()}
    squares = torch.zeros(2, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        expert = id(parameter) in home
        dist.all_reduce(parameter.grad, group=replicas if expert else None)
        squares[int(expert)] += parameter.grad.square().sum()
    dist.all_reduce(squares[1:], group=exchange)
    factor = min(1.0, limit / float(squares.sum().sqrt()))
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def losses(steps: int, ep: int, accumulation: int) -> list[float]:
    """Mean loss of each step. Collective."""
    world, rank = dist.get_world_size(), dist.get_rank()
    exchange, replicas = groups_of(ep)
    pieces = world * accumulation
    model = build(exchange, SEQUENCES // pieces * CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    result = []
    for step in range(steps):
        tokens, targets = step_batch(step)
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(accumulation):
            piece = micro * world + rank
            loss, _ = model(tokens.chunk(pieces)[piece], targets=targets.chunk(pieces)[piece])
            (loss / targets.numel()).backward()
            total += loss.detach()
        reduce_and_clip(model, replicas, exchange, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for layer in model.moe_layers():
            layer.router.balancer.update()
        dist.all_reduce(total)
        result.append(float(total) / targets.numel())
    return result


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = int(sys.argv[1])
    outcome = {}
    for word in sys.argv[2:]:
        ep, _, accumulation = word.partition(",")
        outcome[word] = losses(steps, int(ep), int(accumulation or 1))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(outcome), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
