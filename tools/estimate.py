"""What a model needs on hardware that is not here: memory, cost and splits of training; every operator of
inference.

    python -m tools.estimate model=k3 cluster=h200
    python -m tools.estimate model=k3-mini devices=8 train.micro_batch=8 tokens=5e9
    python -m tools.estimate model=k3 what=operators cluster=b200 inference.batch=64 inference.context=32768
    explain=true

Nothing is allocated. Prints tables; writes summary.json, PNG plots and a self-contained report.html to out=.
"""

from __future__ import annotations

from pathlib import Path

from moonep.command import command
from moonep.simulate.config import EstimateConfig
from moonep.simulate.estimation import Estimate, estimate


def run(config: EstimateConfig) -> Estimate:
    """Estimates, prints and writes."""
    from moonep.simulate.estimation_output import print_estimate, write_estimate

    result = estimate(config)
    print_estimate(result)
    for path in write_estimate(result, Path(config.out), report=config.report):
        print(f"wrote {path}")
    return result


if __name__ == "__main__":
    command(run, "estimate", EstimateConfig)
