"""Chooses the expert-parallel configuration of a model on a cluster, and writes it as an experiment for
train.py.

    python -m tools.tune model=k3-mini cluster=h200 devices=8 workload=zipf out=DIR
    python -m tools.tune model=nano cluster=cpu devices=2 trace=runs/NAME/trace measure=3
    torchrun --nproc_per_node=8 train.py --config-dir DIR experiment=tuned

Prints the best configurations, the Pareto front and why each other value lost; writes experiment/tuned.yaml,
summary.json, pareto.png and report.html to out=. measure=N runs the best N for real.
"""

from __future__ import annotations

from pathlib import Path

from moonep.command import command
from moonep.simulate.config import TuneConfig
from moonep.simulate.tuning import Tuning, tune


def run(config: TuneConfig) -> Tuning:
    """Searches, measures if asked to, prints and writes."""
    from moonep.simulate.measuring import measure
    from moonep.simulate.tuning_output import print_tuning, write_tuning

    out = Path(config.out)
    result = tune(config)
    failures = measure(result, out) if config.measure else []
    print_tuning(result, failures)
    for path in write_tuning(result, failures, out, report=config.report):
        print(f"wrote {path}")
    return result


if __name__ == "__main__":
    command(run, "tune", TuneConfig)
