"""Trains a small K3 model for a few steps at any arrangement of ranks and prints its losses as JSON.

    torchrun --standalone --nproc_per_node=4 tests/distributed/equality.py STEPS EP,ZERO,ACCUMULATION ...

The global batch of a step is the same for every case. Rank 0 prints {case: [loss of each step]}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

SEQUENCES, CONTEXT = 32, 16
MODEL = {
    "hidden_size": 32,
    "num_layers": 3,
    "kda_num_heads": 2,
    "kda_head_dim": 16,
    "mla_every": 3,
    "mla_num_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "dense_ffn_size": 64,
    "num_experts": 8,
    "latent_size": 16,
    "expert_ffn_size": 32,
}


def words(folder: str, steps: int, ep: int, zero: int, accumulation: int, world_size: int) -> list[str]:
    """The configuration of one case."""
    micro_batch = SEQUENCES // (world_size * accumulation)
    return [
        f"run.dir={folder}",
        f"train.steps={steps}",
        f"train.context={CONTEXT}",
        f"train.micro_batch={micro_batch}",
        f"train.tokens_per_step={SEQUENCES * CONTEXT}",
        f"parallel.ep={ep}",
        f"parallel.zero={zero}",
        "optimizer.lr=3e-3",
        "optimizer.clip=0.5",
        "data.name=markov",
        "data.markov_tokens=20000",
        *(f"model.{key}={value}" for key, value in MODEL.items()),
    ]


def losses(folder: str, steps: int, ep: int, zero: int, accumulation: int) -> list[float]:
    """Loss of each step through DeepSpeed, fp32. Collective."""
    from moonep.trainer import loop
    from moonep.trainer.compose import compose
    from moonep.trainer.config import Config
    from moonep.trainer.watch import StopRequest

    given = words(folder, steps, ep, zero, accumulation, dist.get_world_size())
    config, _ = compose("train", Config, given)
    run = loop.prepare(config, torch.device("cpu"), StopRequest())
    result = []
    for _ in range(steps):
        assert loop.train_step(run)
        result.append(run.losses["train"])
    return result


def main() -> None:
    from moonep.trainer.engine import init_distributed

    torch.set_num_threads(1)
    init_distributed()
    steps, cases = int(sys.argv[1]), [tuple(map(int, word.split(","))) for word in sys.argv[2:]]
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    outcome = {repr(case): losses(f"{name[0]}/{i}", steps, *case) for i, case in enumerate(cases)}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(outcome), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
