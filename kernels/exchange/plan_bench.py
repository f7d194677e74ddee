"""Times the device planner by CUDA-graph replay: `python -m kernels.exchange.plan_bench`.

Synthetic histograms: shared lognormal popularity, S tokens a rank, top-k ids drawn for one rank. Columns in
microseconds: solve (totals and attempts), the same with tables, sort, destinations, all of them one after
another in one graph, and forked: the sort on a second stream beside the solver, which does not need it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.exchange import plan

REPLAYS = 200


def replay_us(work: Callable[[], object]) -> float:
    """Mean over back-to-back replays of one captured graph, in microseconds."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / REPLAYS


def routing(num_ranks: int, num_experts: int, tokens: int, top_k: int, sigma: float):
    """(counts [R, E] int32, ids of rank 0 [s, K] int32) on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    popularity = (sigma * torch.randn(num_experts, device="cuda", generator=generator)).exp()
    ids = torch.multinomial(
        popularity.expand(num_ranks * tokens, -1), top_k, replacement=False, generator=generator
    ).view(num_ranks, tokens, top_k)
    counts = torch.stack([torch.bincount(row.flatten(), minlength=num_experts) for row in ids])
    return counts.to(torch.int32), ids[0].to(torch.int32)


def measure(
    num_ranks: int, num_experts: int, top_k: int, tokens: int, sigma: float, rule: int, tau: int
) -> list[float]:
    counts, ids = routing(num_ranks, num_experts, tokens, top_k, sigma)
    slots = -(-num_experts * (num_ranks - 1) // num_ranks**2)

    def tables() -> plan.PlanTables:
        return plan.plan_tables(counts, rule=rule, tau_thousandths=tau, slots=slots, token_padding=8)

    def everything() -> None:
        plan.destinations(plan.sort_entries(ids, num_experts), tables(), rank=0, shard_rows=1 << 17)

    side = torch.cuda.Stream()

    def forked() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            entries = plan.sort_entries(ids, num_experts)
        known = tables()
        torch.cuda.current_stream().wait_stream(side)
        plan.destinations(entries, known, rank=0, shard_rows=1 << 17)

    known, entries = tables(), plan.sort_entries(ids, num_experts)
    solve = replay_us(
        lambda: plan.solve_allocation(counts[None], rule=rule, tau_thousandths=tau, slots=slots)
    )
    sort = replay_us(lambda: plan.sort_entries(ids, num_experts))
    place = replay_us(lambda: plan.destinations(entries, known, rank=0, shard_rows=1 << 17))
    copies = float(known.statistics[5])
    return [solve, replay_us(tables), sort, place, replay_us(everything), replay_us(forked), copies]


def main() -> None:
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; microseconds, mean of {REPLAYS} replays"
    )
    print("  R    E  K     S sigma  rule     tau | solve  +tables   sort  place    all  forked copies")
    for num_ranks in (8, 64):
        for num_experts, top_k, tokens in ((256, 8, 4096), (896, 16, 4096)):
            for sigma in (0.5, 2.0):
                for name, rule, tau in (
                    ("moonep", plan.MOONEP, 1000),
                    ("bounded", plan.BOUNDED, 1000),
                    ("bounded", plan.BOUNDED, 1020),
                ):
                    values = measure(num_ranks, num_experts, top_k, tokens, sigma, rule, tau)
                    case = f"{num_ranks:3} {num_experts:4} {top_k:2} {tokens:5} {sigma:5} {name:8}"
                    print(f"{case} {tau / 1000:5} | " + " ".join(f"{value:6.1f}" for value in values))


if __name__ == "__main__":
    main()
