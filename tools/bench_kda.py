"""KDA kernels on one GPU: time, memory, and the floors in bytes and operations beside them.

    python -m tools.bench target=kda                                  the table of shapes
    python -m tools.bench target=kda cases=[8192x96,65536x8] peer=fla with fla-core 0.6.0 in the same run

A case is TOKENSxHEADS, or LENGTHxSEQUENCESxHEADS for packed sequences. fla-core tunes for minutes at a new
shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moonep.command import command, write_json
from moonep.errors import ConfigError

DEFAULT_CASES = ("64x1", "1024x8", "8192x32", "8192x96", "1024x8x96", "32768x32", "65536x8")
COPY_BYTES_PER_S = 4.3e12
TENSOR_FLOPS_PER_S = 790e12
# Dense count a token-head at K = V = 128, chunks of 64, and the least traffic: inputs read, outputs written,
# once.
FORWARD_FLOPS, BACKWARD_FLOPS = 163_840, 409_600
FORWARD_BYTES, BACKWARD_BYTES = 1282, 2820
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
}


@dataclass(frozen=True)
class Row:
    """One case. Times in ms, memory in GB above what was allocated before; floors at this GPU's measured
    ceilings."""

    case: str
    forward_ms: float
    forward_backward_ms: float
    memory_gb: float
    forward_floor_ms: float
    forward_backward_floor_ms: float
    peer_forward_ms: float | None = None
    peer_forward_backward_ms: float | None = None


def parse_case(case: str) -> tuple[int, int, int]:
    """(tokens a sequence, sequences, heads)."""
    try:
        numbers = [int(part) for part in case.split("x")]
        tokens, sequences, heads = numbers if len(numbers) == 3 else (numbers[0], 1, numbers[1])
    except (ValueError, IndexError):
        raise ConfigError(f"cases={case!r} is not TOKENSxHEADS or LENGTHxSEQUENCESxHEADS") from None
    return tokens, sequences, heads


def make_inputs(tokens: int, sequences: int, heads: int, dim: int = 128) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    rows = (1, tokens * sequences, heads)
    inputs = {name: normal(*rows, dim).bfloat16() for name in ("q", "k", "v", "g")}
    inputs["g"] = (2 * inputs["g"].float() - 3).bfloat16()
    inputs["beta"] = normal(*rows).bfloat16()
    inputs["A_log"] = 0.3 * normal(heads)
    inputs["dt_bias"] = 0.3 * normal(heads * dim)
    return inputs


def time_ms(function) -> float:
    import triton.testing

    return triton.testing.do_bench(function, warmup=10, rep=60, return_mode="median")


def measure(
    function, inputs: dict[str, torch.Tensor], cu_seqlens, **flags: Any
) -> tuple[float, float, float]:
    """Forward ms, forward + backward ms, and the memory of the latter in GB."""
    with torch.no_grad():
        forward = time_ms(lambda: function(**inputs, cu_seqlens=cu_seqlens, **flags))
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    do = torch.randn_like(inputs["v"])

    def step() -> None:
        o = function(**leaves, cu_seqlens=cu_seqlens, **flags)[0]
        torch.autograd.grad(o, list(leaves.values()), do)

    both = time_ms(step)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return forward, both, (torch.cuda.max_memory_allocated() - before) / 1e9


def run_case(case: str, peer: str | None) -> Row:
    from kernels.kda import chunk_kda

    tokens, sequences, heads = parse_case(case)
    inputs = make_inputs(tokens, sequences, heads)
    cu_seqlens = None
    if sequences > 1:
        cu_seqlens = torch.arange(0, tokens * sequences + 1, tokens, device="cuda")
    forward, both, memory = measure(chunk_kda, inputs, cu_seqlens, **FLAGS)
    peer_times: tuple[float | None, float | None] = (None, None)
    if peer == "fla":
        from fla.ops.kda import chunk_kda as fla_chunk_kda

        peer_times = measure(fla_chunk_kda, inputs, cu_seqlens, safe_gate=True, **FLAGS)[:2]
    work = tokens * sequences * heads
    floors = [
        1e3 * work * max(size / COPY_BYTES_PER_S, flops / TENSOR_FLOPS_PER_S)
        for size, flops in (
            (FORWARD_BYTES, FORWARD_FLOPS),
            (FORWARD_BYTES + BACKWARD_BYTES, FORWARD_FLOPS + BACKWARD_FLOPS),
        )
    ]
    return Row(case, forward, both, memory, floors[0], floors[1], *peer_times)


@dataclass
class BenchKdaConfig:
    """Keys of `python -m tools.bench target=kda`."""

    cases: list[str] = field(default_factory=lambda: list(DEFAULT_CASES))
    peer: str | None = None  # "fla": fla-core 0.6.0, measured in the same run
    out: str | None = None  # directory of summary.json


def run(config: BenchKdaConfig) -> None:
    """Prints the table and writes `out`/summary.json.

    Raises:
        ConfigError: no CUDA device, an unknown peer or a malformed case.
    """
    if not torch.cuda.is_available():
        raise ConfigError("target=kda needs a CUDA device; none is visible to torch")
    if config.peer not in (None, "fla"):
        raise ConfigError(f"peer={config.peer!r} is unknown; allowed: fla")
    heads = ("fwd", "floor", "fwd+bwd", "floor", "GB", "peer fwd", "peer f+b")
    print(f"{'case':>14}" + "".join(f" {head:>9}" for head in heads))
    rows = []
    for case in config.cases:
        row = run_case(case, config.peer)
        rows.append(asdict(row))
        values = (
            row.forward_ms,
            row.forward_floor_ms,
            row.forward_backward_ms,
            row.forward_backward_floor_ms,
            row.memory_gb,
            row.peer_forward_ms,
            row.peer_forward_backward_ms,
        )
        print(f"{case:>14}" + "".join(f" {'' if x is None else f'{x:.3f}':>9}" for x in values), flush=True)
        torch.cuda.empty_cache()
    if config.out is not None:
        summary = {"target": "kda", "device": torch.cuda.get_device_name(), "rows": rows}
        write_json(Path(config.out) / "summary.json", summary)


def main(argv: Sequence[str] | None = None) -> None:
    command(run, "bench_kda", BenchKdaConfig, argv)


if __name__ == "__main__":
    main()
